"""Seeing what ranks do: timelines, the recorder, the watchdog, memory."""
