"""Pictures in one style: timelines, meshes, collectives, curves; each a plain function -> Figure.

Pictures of one subject alone (pipelines, memory, attention ...) have modules of their own.
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
