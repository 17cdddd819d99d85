"""Notebook tools: pictures, widgets, exercises. Only this floor may import plotting or IPython."""
