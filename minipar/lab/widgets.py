"""Widgets: a slider over a plain drawing function, and nothing more.

    def figure(micro=4, stages=4): ...                     # returns a Figure, tested as such
    box = explore(figure, micro=(1, 32), stages=[2, 4, 8])
    box.sliders["micro"].value = 12                        # what a hand does; box.image follows

The picture is the value of an image widget, never output that an `Output` widget catches: so it
works in every front end and in tests, without a browser. Show the plain figure first, then the
widget: a reader on GitHub sees only the figure.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import traitlets
from matplotlib.figure import Figure

from minipar.lab import draw
from minipar.lab.draw.pen import in_words

Drawn = Figure | tuple[Figure, str]
"""The result of a drawing function: a figure, or a figure and a line of text below it."""


class Picture(ipywidgets.Image):
    """An image with a tooltip. A browser shows a widget's tooltip only beside a description."""

    description = traitlets.Unicode("").tag(sync=True)


class Explorer(ipywidgets.VBox):
    """The picture of `draw_fn` with a control per argument; it is drawn anew when one moves.

    A control is written as for `ipywidgets.interact`: ``(low, high)`` or ``(low, high, step)`` is a
    slider, a list or a dict has choices. It starts at the argument's default if there is one. With
    `only_if={"v": lambda name, **_: name in LOOPED}` v is greyed out for other names. Raises what
    the first drawing raises.

    `sliders` by name; `image` and `text` follow them. The picture has its size on paper, 96 pixels
    to the inch, and the height of the tallest so far, so that the page below does not jump. `error`
    is the exception that the last drawing raised, or None; its message takes the place of the text.
    """

    def __init__(
        self,
        draw_fn: Callable[..., Drawn],
        *,
        only_if: Mapping[str, Callable[..., bool]] | None = None,
        **controls: Any,
    ) -> None:
        defaults = {name: p.default for name, p in inspect.signature(draw_fn).parameters.items()}
        self.draw_fn, self.only_if = draw_fn, dict(only_if or {})
        made = ipywidgets.interactive.widget_from_abbrev
        self.sliders = {name: made(how, defaults[name]) for name, how in controls.items()}
        fit = {"object_fit": "contain", "object_position": "left top", "max_width": "100%"}
        self.image = Picture(format="png", layout=fit)
        self.height = 0.0  # inches of the tallest picture so far
        self.text = ipywidgets.Label()
        self.error: Exception | None = None
        for name, slider in self.sliders.items():
            slider.description, slider.continuous_update = name, False
            slider.observe(lambda _: self.redraw(), "value")
        columns = ipywidgets.Layout(grid_template_columns="repeat(2, max-content)")
        grid = ipywidgets.GridBox(list(self.sliders.values()), layout=columns)
        super().__init__([grid, self.image, self.text])
        self.redraw()
        if self.error is not None:
            raise self.error

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of the sliders."""
        return {name: slider.value for name, slider in self.sliders.items()}

    def redraw(self) -> None:
        """Draw the picture for the values of now."""
        for name, means_something in self.only_if.items():
            self.sliders[name].disabled = not means_something(**self.values)
        try:
            drawn = self.draw_fn(**self.values)
        except Exception as error:  # raised here it would be lost: front ends drop it
            self.error, self.text.value = error, f"{type(error).__name__}: {error}"
            return
        figure, text = drawn if isinstance(drawn, tuple) else (drawn, "")
        width, height = figure.get_size_inches()
        self.height = max(self.height, height)
        self.image.layout.width = f"{96 * width:.0f}px"
        self.image.layout.height = f"{96 * self.height:.0f}px"
        self.image.value, self.text.value, self.error = draw.png(figure), text, None
        self.image.tooltip = in_words(figure)

    def __repr__(self) -> str:
        # Without this, all bytes of the picture would be printed.
        values = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"Controls, in Jupyter only: {values}"


explore = Explorer
