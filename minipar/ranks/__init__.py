"""Processes that are the ranks: for notebooks, tests and the command line, and torchrun's."""
