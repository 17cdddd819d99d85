"""The model: a Llama that knows nothing of ranks. It imports neither `comm` nor `os.environ`."""
