"""What tests look for in figures."""

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle


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
