"""Hardware that a laptop lacks: a network and a GPU whose time is emulated, and strict checks."""
