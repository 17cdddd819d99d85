"""The time and memory that a run will need, computed before it starts: pure functions and plans."""
