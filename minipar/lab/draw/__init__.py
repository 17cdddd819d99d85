"""Pictures in one hand: timelines, meshes, collectives, curves; each a plain function -> Figure.

What one subject alone needs (pipelines, memory, attention ...) has a module of its own beside.
"""

from minipar.lab.draw.charts import bars, curves, loss_curves, palette
from minipar.lab.draw.display import DRAWN, register
from minipar.lab.draw.meshes import blocks_of, collective, mesh, rounds, shares
from minipar.lab.draw.pen import (
    AXIS,
    EXPOSED,
    GRID,
    INK,
    KIND,
    MEANING,
    MUTED,
    PAPER,
    RANK,
    SERIES,
    WIDTH,
    colour,
    png,
    save,
    svg,
)
from minipar.lab.draw.timelines import before_after, finding, timeline

__all__ = [
    "AXIS",
    "DRAWN",
    "EXPOSED",
    "GRID",
    "INK",
    "KIND",
    "MEANING",
    "MUTED",
    "PAPER",
    "RANK",
    "SERIES",
    "WIDTH",
    "bars",
    "before_after",
    "blocks_of",
    "collective",
    "colour",
    "curves",
    "finding",
    "loss_curves",
    "mesh",
    "palette",
    "png",
    "register",
    "rounds",
    "save",
    "shares",
    "svg",
    "timeline",
]
