"""minipar: every way to train a Llama on many GPUs, each in one file, proved and drawn."""

__version__ = "0.1.0"
