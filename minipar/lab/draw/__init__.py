"""Pictures in one hand: timelines, meshes, collectives, curves; each a plain function -> Figure.

What one subject alone needs (pipelines, memory, attention ...) has a module of its own beside.
"""

# ruff: noqa: F401
from minipar.lab.draw.charts import bars, curves, loss_curves
from minipar.lab.draw.display import register
from minipar.lab.draw.meshes import collective, mesh, rounds
from minipar.lab.draw.pen import (
    AXIS,
    EXPOSED,
    INK,
    KIND,
    MUTED,
    RANK,
    SERIES,
    colour,
    png,
    save,
)
from minipar.lab.draw.timelines import before_after, finding, timeline
