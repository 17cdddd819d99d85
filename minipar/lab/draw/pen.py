"""The style of all pictures: colours, letters, paper, files.

One visual language in all figures of minipar, defined here:

- work has the colour of its kind (`KIND`), communication the colour of its axis (`AXIS`);
- communication is pale while computing hides it, and taller and outlined in red where exposed;
- `WAITS`, a hatched grey, is a rank that computes nothing;
- memory has the palette `HELD`; data that moves has the colour of its rank (`RANK`).

The colours stay apart for readers who see no red or no green.

No function touches pyplot or any other global state. `save` writes equal figures to equal bytes.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.transforms import Bbox
from PIL import Image

INK, MUTED, GRID, PAPER = "#1f2430", "#6f7688", "#e9ebf1", "#ffffff"
KIND = {
    "forward": "#a9c8ee",
    "backward": "#2560a8",
    "weight_gradient": "#66a99b",
    "optimizer": "#432a5e",
    "compute": "#ddd2ac",
    "copy": "#6a7caa",
    "idle": "#eef0f4",
}
AXIS = {
    "dp": "#e2a33f",
    "tp": "#2ea866",
    "pp": "#a77be0",
    "cp": "#f0e04c",
    "ep": "#78423a",
    "replica": "#5b48d2",
    "world": "#5b6672",
}
EXPOSED = "#cc2a1f"
WAITS: dict[str, Any] = {"fc": "#f6f7f9", "ec": "#a9afbd", "hatch": "/////", "lw": 0}
HELD = {
    "weights": "#5f7a96",
    "gradients": KIND["weight_gradient"],
    "optimizer state": KIND["optimizer"],
    "activations": KIND["forward"],
}
"""The palette of memory; other parts beside it have quiet colours."""
HELD_OTHERS = ["#c9d3dd", "#8b8b80", "#d7cfe6", "#cfe3c8"]
SAME = "#d5d8e0"  # what all ranks have alike
RANK = ["#7cc8f0", "#e39a5c", "#c4e3a4", "#c98fbd", "#fbe36a", "#98988f"]  # where data comes from
SERIES = [KIND["backward"], AXIS["dp"], AXIS["tp"], AXIS["pp"], AXIS["ep"], AXIS["world"]]

WIDTH, DPI = 9.6, 150  # inches; what a notebook and a README show without scaling
LEFT, RIGHT = 0.75, 0.2  # inches beside the panels
MARGIN, LEAST = 0.15, 4.9  # inches around what is drawn, and of the narrowest picture
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, low, width, height
Style = dict[str, Any]  # properties of a rectangle
Entry = tuple[str | Style, str]  # of a legend
FINDING = "finding"
"""The id of a text that belongs into the figure's alt text, such as "nothing hidden"."""


def colour(kind_or_axis: str) -> str:
    """Return the colour of a kind of work, or of an axis; joint axes have the colour of the first.

    "replica+dp" has the colour of all ranks; "host" (`comm.hostcopy`) has the colour of copies.
    """
    first = kind_or_axis.split("+")[0].split()[0] if kind_or_axis else ""
    first = "world" if kind_or_axis.startswith("replica+") else first
    known = {**KIND, **AXIS, "exposed": EXPOSED, "host": KIND["copy"]}
    return known.get(first, AXIS["world"])


def held(part: str) -> str | None:
    """Return the colour of a part of memory, by names such as "gradient" or "Adam"; else None."""
    word = part.lower().split(" ")[0].rstrip("s")
    names = {name.split(" ")[0].rstrip("s"): ink for name, ink in HELD.items()}
    names |= {"parameter": HELD["weights"]}
    names |= dict.fromkeys(("adam", "adamw"), HELD["optimizer state"])
    return names.get(word)


def pale(ink: str) -> str:
    """Return a tint of `ink`."""
    return to_hex([1 - 0.42 * (1 - part) for part in to_rgb(ink)])


def hidden(ink: str) -> Style:
    """Return the style of communication that computing hides, in the colour of its axis."""
    return {"fc": pale(ink), "ec": readable(ink), "lw": 0.5}


def exposed(ink: str) -> Style:
    """Return the style of exposed communication, in the colour of its axis."""
    return {"fc": ink, "ec": EXPOSED, "lw": 1.1}


# ---------------------------------------------------------------------- paper
def figure(width: float, height: float, title: str = "", note: str = "") -> Figure:
    """Return paper of so many inches: the title on top, the source of its numbers at the bottom."""
    paper = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(paper)
    _entitle(paper, title, note)
    return paper


def _entitle(paper: Figure, title: str, note: str) -> None:
    width, height = paper.get_size_inches()
    style = {"size": 12, "weight": "bold", "color": INK, "va": "top", "parse_math": False}
    paper.text(MARGIN / width, 1 - 0.13 / height, title, **style)
    style = {"size": 8, "color": MUTED, "ha": "right", "va": "bottom", "parse_math": False}
    paper.text(1 - RIGHT / width, 0.07 / height, caption(note), **style)


def canvas(figure: Figure) -> Axes:
    """Return axes over the whole figure, in inches."""
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, figure.get_figwidth()), ylim=(0, figure.get_figheight()))
    ax.set_axis_off()
    return ax


def paper() -> Axes:
    """Return axes in inches on paper that has no size yet: draw anywhere, then `cut`."""
    return canvas(figure(1, 1))


def cut(ax: Axes, title: str = "", note: str = "", legend: Sequence[Entry] = ()) -> Figure:
    """Cut the paper to what is drawn: the title above, the legend and the note below."""
    paper = ax.figure
    drawn = [*ax.texts, *ax.patches, *ax.lines, *ax.images]
    renderer = paper.canvas.get_renderer()
    box = Bbox.union([one.get_window_extent(renderer) for one in drawn])
    left, low, right, top = box.extents / DPI
    longest = max((len(said) for _, said in legend), default=0)
    words = 0.1 + 0.105 * len(title), 0.07 * len(note), 0.3 + 0.07 * longest
    room = max(right - left, *words, LEAST)
    lines = len(flow(legend, room)) if legend else 0
    foot = MARGIN + 0.16 * bool(note) + 0.22 * lines + 0.1 * bool(legend)
    paper.set_size_inches(room + 2 * MARGIN, top - low + foot + (0.5 if title else MARGIN))
    width, height = paper.get_size_inches()
    ax.set(xlim=(left - MARGIN, left - MARGIN + width), ylim=(low - foot, low - foot + height))
    _entitle(paper, title, note)
    if legend:
        key(paper, legend, MARGIN, MARGIN + 0.16 * bool(note), room)
    return paper


def panel(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Return axes without a frame, with pale numbers; a place in inches from the lower left."""
    wide, tall = figure.get_size_inches()
    ax = figure.add_axes((left / wide, bottom / tall, width / wide, height / tall))
    ax.set_facecolor("none")
    ax.set_axisbelow(True)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, colors=MUTED, labelsize=9)
    return ax


def stack(
    heights: Sequence[float], legend: Sequence[Entry], xlabel: str, sources: Iterable[str]
) -> tuple[Figure, list[Axes]]:
    """Stack panels of so many inches, each with room for a headline.

    Below them stand the one axis of all, the legend, and where the numbers are from.
    """
    said = textwrap.wrap(caption(*sources), 140)
    low = 0.18 + 0.14 * max(1, len(said))
    head, gap, foot = 0.42, 0.14, low + 0.3 + 0.22 * len(flow(legend, WIDTH - LEFT - RIGHT))
    top = total = sum(heights) + (head + gap) * len(heights) - gap + foot
    paper, axes = figure(WIDTH, total, note="\n".join(said)), []
    for height in heights:
        top -= head + height
        axes.append(panel(paper, LEFT, top, WIDTH - LEFT - RIGHT, height))
        axes[-1].tick_params(labelbottom=len(axes) == len(heights))
        top -= gap
    label(axes[-1], xlabel, labelpad=1)
    key(paper, legend, LEFT, low)
    return paper, axes


def inches_of(ax: Axes) -> tuple[float, float]:
    """Return the width and the height of `ax` on paper."""
    return tuple(ax.get_position().size * ax.figure.get_size_inches())


# ---------------------------------------------------------------------- words
def text(ax: Axes, x: float, y: float, text: Any, **style: Any) -> None:
    """Write letters at (x, y), in the middle of their height."""
    style = {"size": 9, "color": INK, "va": "center", "parse_math": False, **style}
    ax.text(x, y, str(text), **style)


def label(ax: Axes, x: str, y: str = "", above: float = 1.04, **style: Any) -> None:
    """Say what the axes count: `x` below on the right, `y` above on the left."""
    ax.set_xlabel(x, color=MUTED, fontsize=9, loc="right", parse_math=False, **style)
    style = {"color": MUTED, "size": 9, "transform": ax.transAxes, "parse_math": False}
    ax.text(0, above, y, **style)


def headline(ax: Axes, title: str, said: str, ink: str = INK) -> None:
    """Write a title above the left end of `ax`, its finding above the right end.

    Without a title, the finding takes its place.
    """
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    style = {"size": 12, "weight": "bold", "color": INK if title else ink, "parse_math": False}
    ax.annotate(title or said, (0, 1), (0, 5), **place, **style)
    if title:
        style = {"size": 10, "color": ink, "ha": "right", "gid": FINDING, "parse_math": False}
        ax.annotate(said, (1, 1), (0, 5), **place, **style)


def caption(*notes: str) -> str:
    """Join notes to sentences: the first letter is large, and a full stop ends each."""
    said = [note.strip() for note in dict.fromkeys(notes) if note.strip()]
    said = [note if note.endswith((".", "?")) else note + "." for note in said]
    return " ".join(note[0].upper() + note[1:] for note in said)


def flow(entries: Iterable[Entry], width: float) -> list[list[tuple[float, str | Style, str]]]:
    """Return lines of (inches from the left, style, text), broken where `width` inches are full."""
    lines, end = [[]], 0.0
    for ink, text in entries:
        takes = 0.5 + 0.07 * len(text)
        if lines[-1] and end + takes > width:
            lines, end = [*lines, []], 0.0
        lines[-1].append((end, ink, text))
        end += takes
    return lines


def key(figure: Figure, entries: Iterable[Entry], left: float, y: float, width: float = 0) -> None:
    """Draw a legend, `width` wide or as wide as the paper; its last line is `y` above the edge.

    An entry is a colour, or the style of a rectangle, and its text; "" draws the text alone.
    """
    ax = canvas(figure)
    lines = flow(entries, width or figure.get_figwidth() - left - RIGHT)
    for i, line in enumerate(reversed(lines)):
        for x, ink, name in line:
            if ink:
                style = {"fc": ink} if isinstance(ink, str) else ink
                rectangle(ax, left + x, y + 0.22 * i, 0.2, 0.13, **style)
            text(ax, left + x + (0.27 if ink else 0), y + 0.22 * i + 0.06, name)


def of_ranks(size: int) -> list[Entry]:
    """Return entries of a legend: the colour of each rank."""
    return [(RANK[rank], f"rank {rank}") for rank in range(size)]


# ---------------------------------------------------------------------- shapes
def rectangle(ax: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """Draw a rectangle from its lower left corner, without an edge unless `style` has one."""
    edge = {} if style.keys() & {"ec", "lw"} else {"lw": 0}
    ax.add_patch(Rectangle((x, y), width, height, **edge, **style))


def rounded(
    ax: Axes, x: float, y: float, width: float, height: float, radius: float, **style: Any
) -> None:
    """Draw a rectangle with round corners from its lower left corner."""
    shape = f"round,pad=0,rounding_size={radius}"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **style))


def cell(
    ax: Axes, box: Box, said: Any, fill: str, size: float = 8, weight: str = "normal", **style: Any
) -> None:
    """Draw a box with a word in its middle that can be read on it; round with a `radius`."""
    left, low, width, height = box
    draw = rounded if "radius" in style else rectangle
    draw(ax, *box, fc=fill, **style)
    words = {"size": size, "weight": weight, "ha": "center", "color": ink_on(fill)}
    text(ax, left + width / 2, low + height / 2 - 0.005, said, **words)


def striped(ax: Axes, box: Box, fills: Sequence[str], said: Any = "", size: float = 10) -> None:
    """Draw a box of stripes, the first on top, with a bold word on paper in its middle."""
    left, low, width, height = box
    tall = height / len(fills)
    for i, fill in enumerate(reversed(fills)):
        rectangle(ax, left, low + i * tall, width, tall, fc=fill)
    paper = {"boxstyle": "round,pad=0.16", "fc": PAPER, "ec": "none", "alpha": 0.88}
    style = {"size": size, "weight": "bold", "ha": "center"}
    style |= {"bbox": paper} if said != "" and len(fills) > 1 else {}
    text(ax, left + width / 2, low + height / 2 - 0.01, said, **style)


def arrow(ax: Axes, start: Point, end: Point, head: float, **style: Any) -> None:
    """Draw an arrow from point to point, with a head of so many points."""
    ends = {"arrowstyle": "-|>", "mutation_scale": head, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, **ends, **style))


# ---------------------------------------------------------------------- ink and numbers
def _luminance(ink: str) -> float:
    red, green, blue = to_rgb(ink)
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def ink_on(fill: str) -> str:
    """Return ink that can be read on `fill`."""
    return PAPER if _luminance(fill) < 0.3 else INK


def readable(ink: str) -> str:
    """Return `ink` for text on paper: darker where it would be too pale."""
    while _luminance(ink) > 0.28:
        ink = to_hex([0.9 * part for part in to_rgb(ink)])
    return ink


def number(value: float) -> str:
    """Return 1234.5 as "1,234"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def num_bytes(count: float) -> str:
    """Return 1500000 as "1.5 MB"."""
    for unit in ("B", "kB", "MB"):
        if round(count) < 1000:  # 999,700 bytes are 1 MB
            return f"{number(count)} {unit}"
        count /= 1000
    return f"{number(count)} GB"


# ---------------------------------------------------------------------- files
def png(figure: Figure) -> bytes:
    """Return the figure as a PNG of at most 128 colours: a third of the size, no visible change."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    image = Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True, dpi=(DPI, DPI))
    return small.getvalue()


def in_words(figure: Figure) -> str:
    """Return a figure's text for those who do not see it: headings, findings, and the note."""
    texts = [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]
    notes = [text for text in figure.texts if text.get_size() == 8]
    heard = [text for text in texts if text.get_weight() == "bold" and text.get_size() >= 11]
    heard = [text for text in texts if text in heard or text.get_gid() == FINDING]
    said = (text.get_text().replace("\n", " ") for text in (*heard, *notes))
    return ". ".join(dict.fromkeys(text for text in said if text))


def save(figure: Figure, path: str | Path) -> Path:
    """Write a .png; equal figures give equal files. Raises `ValueError` for other names."""
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"{path} ends with {path.suffix!r}; use .png")
    path.write_bytes(png(figure))
    return path
