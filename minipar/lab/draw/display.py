"""Objects that draw themselves in a notebook."""

from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from minipar.comm.mesh import Mesh
from minipar.lab.draw.meshes import mesh
from minipar.lab.draw.pen import in_words, png
from minipar.lab.draw.timelines import timeline
from minipar.observe.timeline import Timeline

DRAWN: dict[type, Callable[[Any], Figure]] = {Timeline: timeline, Mesh: mesh, Figure: lambda f: f}
"""Kinds that draw themselves once `register` was called. Modules of pictures add theirs."""


def register() -> None:
    """Make the kinds in `DRAWN` draw themselves in a notebook; elsewhere do nothing."""
    from IPython import get_ipython  # here: drawing takes no notebook

    shell = get_ipython()
    if shell is None:
        return

    def picture(draw: Callable[[Any], Figure], value: Any) -> tuple[bytes, dict[str, str]] | None:
        """Return the picture, and as its metadata the text that stands for it."""
        try:
            figure = draw(value)
            return png(figure), {"alt": in_words(figure)}
        except ValueError:  # nothing to draw: the notebook shows the text
            return None

    for drawn, draw in DRAWN.items():
        shell.display_formatter.formatters["image/png"].for_type(drawn, partial(picture, draw))
