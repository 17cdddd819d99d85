"""`minipar bench`: ours beside PyTorch's own, on the same model, data and link, in one run."""
