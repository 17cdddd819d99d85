"""Notebook tools: pictures, exercises. Only this floor may import plotting or IPython."""
