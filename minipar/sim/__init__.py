"""What a training run will need, computed before anything starts: pure functions and plans."""
