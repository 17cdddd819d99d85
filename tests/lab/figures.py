"""What tests look for in figures."""

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline


def words(figure) -> list[str]:
    """Every text in the figure."""
    found = [*(text for ax in figure.axes for text in ax.texts), *figure.texts]
    return [text.get_text() for text in found]


def texts(figure) -> str:
    return " | ".join(words(figure))


def shapes(figure, kind=Rectangle) -> list:
    """The shapes of one kind in the picture, its legend left out."""
    return [patch for patch in figure.axes[0].patches if isinstance(patch, kind)]


def fills(figure, kind=Rectangle) -> list[str]:
    """The colours of `shapes`."""
    return [to_hex(patch.get_facecolor()) for patch in shapes(figure, kind)]


def boxes(figure, *colours: str) -> list[tuple]:
    """Colour, x, y, width and height of the rectangles of these colours."""
    return [
        (fill, *patch.get_xy(), patch.get_width(), patch.get_height())
        for patch, fill in zip(shapes(figure), fills(figure), strict=True)
        if fill in colours
    ]


def step(overlapped, ranks=4, label="measured, 4 ranks") -> Timeline:
    """Forward 4 x 10 ms, backward 4 x 20 ms, 4 all-reduces of 15 ms, optimizer 10 ms."""
    spans = []
    for rank in range(ranks):
        forward = [(10 * i, 10 * i + 10, "forward", f"layers.{i}") for i in range(4)]
        backward = [(40 + 20 * i, 60 + 20 * i, "backward", f"layers.{3 - i}") for i in range(4)]
        first, gap = (60, 20) if overlapped else (120, 15)
        comm = [(first + gap * i, first + gap * i + 15) for i in range(4)]
        end = comm[-1][1]
        work = [*forward, *backward, (end, end + 10, "optimizer", "AdamW")]
        spans += [Span(k, n, rank, 1e-3 * s, 1e-3 * e) for s, e, k, n in work]
        spans += [
            Span("comm", "all_reduce", rank, 1e-3 * s, 1e-3 * e, "dp", 4_000_000) for s, e in comm
        ]
    return Timeline(spans, label)
