"""Pipelines: schedules are data, checked and simulated before a process starts."""
