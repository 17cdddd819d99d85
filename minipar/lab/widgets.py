"""Widgets: a slider over a plain drawing function, and nothing more.

    def figure(micro=4, stages=4): ...                     # returns a Figure, tested as such
    box = explore(figure, micro=(1, 32), stages=[2, 4, 8])
    box.sliders["micro"].value = 12                        # what a hand does; box.image follows

The picture is the value of an image widget, never output that an `Output` widget catches: so it
works in every front end and in tests, without a browser. Show the plain figure first, then the
widget: a reader on GitHub sees only the figure.
"""

import inspect
from collections.abc import Callable
from typing import Any

import ipywidgets
import traitlets
from matplotlib.figure import Figure

from minipar.lab import draw
from minipar.lab.draw.pen import in_words


class Picture(ipywidgets.Image):
    """An image with a tooltip. A browser shows a widget's tooltip only beside a description."""

    description = traitlets.Unicode("").tag(sync=True)


class Explorer(ipywidgets.VBox):
    """The picture of `draw_fn` with a control per argument; it is drawn anew when one moves.

    `draw_fn` returns a figure, or a figure and a line of text below it. A control is written as for
    `ipywidgets.interact`: ``(low, high)`` or ``(low, high, step)`` is a slider, a list or a dict
    has choices. It starts at the argument's default. Raises what the first drawing raises.

    `sliders` by name; `image` and `text` follow them. `error` is the exception that the last
    drawing raised, or None; its message takes the place of the text.
    """

    def __init__(self, draw_fn: Callable[..., Figure | tuple[Figure, str]], **controls: Any):
        defaults = {name: p.default for name, p in inspect.signature(draw_fn).parameters.items()}
        self.draw_fn, made = draw_fn, ipywidgets.interactive.widget_from_abbrev
        self.sliders = {name: made(how, defaults[name]) for name, how in controls.items()}
        self.image = Picture(format="png", layout={"object_fit": "contain", "max_width": "100%"})
        self.text = ipywidgets.Label()
        self.error: Exception | None = None
        for name, slider in self.sliders.items():
            slider.description, slider.continuous_update = name, False
            slider.observe(lambda _: self.redraw(), "value")
        super().__init__([*self.sliders.values(), self.image, self.text])
        self.redraw()
        if self.error is not None:
            raise self.error

    def redraw(self) -> None:
        """Draw the picture for the current values."""
        try:
            drawn = self.draw_fn(**{name: slider.value for name, slider in self.sliders.items()})
        except Exception as error:  # raised here it would be lost: front ends drop it
            self.error, self.text.value = error, f"{type(error).__name__}: {error}"
            return
        figure, text = drawn if isinstance(drawn, tuple) else (drawn, "")
        self.image.layout.width = f"{96 * figure.get_figwidth():.0f}px"
        self.image.value, self.text.value, self.error = draw.png(figure), text, None
        self.image.tooltip = in_words(figure)

    def __repr__(self) -> str:
        # Without this, all bytes of the picture would be printed.
        return f"Controls, in Jupyter only: {', '.join(self.sliders)}"


explore = Explorer
