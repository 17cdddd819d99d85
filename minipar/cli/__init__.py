"""The command line, `minipar COMMAND`. `minipar train --help` is worth reading.

Exit codes: 2 for what a user got wrong, 1 where a rank failed or a comparison is not equal, 3 for a
model that fits nowhere, 130 for Ctrl-C. A run that a signal has stopped, and that has saved, ends
with 0.
"""
