"""Training: data, optimizer, precision, the training step and checkpoints (floor 3)."""
