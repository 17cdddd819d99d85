"""Floor 0: `torch.distributed`, and nothing of models."""
