"""The shell of a rank: whoever looks at what it does changes nothing. The rest: test_cells.py."""
