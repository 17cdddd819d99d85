"""Floor 2: one strategy, one file."""
