"""Pictures in one hand: timelines, meshes, collectives, curves; each a plain function -> Figure.

Every kind of work has one colour in all figures of minipar, defined here. The colours stay apart
for readers who see no red or no green (the tests check it); exposed communication, the one loud
colour, is drawn taller than hidden communication, so that it stands out in grey print as well.

No function touches pyplot or any other global state. `register` lets objects draw themselves in a
notebook; `save` writes files that are the same to the byte whenever the figure is.
"""

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator, MaxNLocator
from PIL import Image

from minipar.comm.mesh import Mesh, coordinates, groups_along
from minipar.comm.spans import NOT_COMPUTE, Span, intersect, subtract, union, wire_bytes
from minipar.comm.timeline import Timeline

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
    "ep": "#5c3422",
    "world": "#5b6672",
}
EXPOSED = "#cc2a1f"
MEANING = {
    "forward": "forward pass",
    "backward": "backward pass",
    "weight_gradient": "weight gradient, where the backward pass is split",
    "optimizer": "optimizer step",
    "compute": "any other work",
    "copy": "copies between host and device",
    "idle": "nothing to do",
    "dp": "communication along the data axis",
    "tp": "communication along the tensor axis",
    "pp": "communication along the pipeline axis",
    "cp": "communication along the context axis",
    "ep": "communication along the expert axis",
    "world": "communication among all ranks",
    "exposed": "communication that nothing hides, along any axis",
}
RANK = ["#7cc8f0", "#e39a5c", "#c4e3a4", "#c98fbd", "#fbe36a", "#98988f"]  # whose data it is
SERIES = [KIND["backward"], AXIS["dp"], AXIS["tp"], AXIS["pp"], AXIS["ep"], AXIS["world"]]

WIDTH, DPI = 9.6, 150  # inches; what a notebook and a README show without scaling
LEFT, RIGHT = 0.75, 0.2  # inches beside the panels

Piece = tuple[float, float, str]  # start and end in seconds, name


def colour(kind_or_axis: str) -> str:
    """The colour of a kind of work, or of communication along an axis (joint ones: the first).

    Along the axis "host" (`comm.hostcopy`) it is that of copies.
    """
    first = kind_or_axis.split("+")[0].split()[0] if kind_or_axis else ""
    known = {**KIND, **AXIS, "exposed": EXPOSED, "host": KIND["copy"]}
    return known.get(first, AXIS["world"])


# ---------------------------------------------------------------------- timelines
def timeline(
    timeline: Timeline,
    *,
    title: str | None = None,
    ax: Axes | None = None,
    xlim: tuple[float, float] | None = None,
    unit: str = "a step",
) -> Figure:
    """Who computes, who talks, who waits: a row per rank, compute above communication.

    `xlim` in milliseconds zooms; `unit` is what was recorded, for the finding "308 ms a step, 87 %
    of communication hidden", which is the title, or stands opposite of `title`. With `ax` only the
    rows are drawn, into it. Raises ValueError when there are no spans.
    """
    if ax is not None:
        _check_spans({title or "the timeline": timeline})
        _rows(ax, timeline.shifted(), xlim or (0.0, 1e3 * timeline.duration))
        return ax.figure
    return _panels({title or "": timeline}, xlim, unit)


def before_after(
    timelines: Mapping[str, Timeline],
    *,
    xlim: tuple[float, float] | None = None,
    unit: str = "a step",
) -> Figure:
    """Timelines one below the other on one time axis: `{"After backward": a, "Overlapped": b}`."""
    return _panels(timelines, xlim, unit)


def finding(timeline: Timeline, unit: str = "a step") -> str:
    """The one sentence that a timeline says: "308 ms a step, 87 % of communication hidden"."""
    time = f"{_milliseconds(1e3 * timeline.duration)} {unit}".strip()
    hidden = timeline.hidden_fraction
    if math.isnan(hidden):
        return f"{time}, no communication"
    if hidden < 0.005:
        return f"{time}, nothing hidden"
    return f"{time}, {100 * hidden:.0f} % of communication hidden"


def _panels(
    timelines: Mapping[str, Timeline], xlim: tuple[float, float] | None, unit: str
) -> Figure:
    _check_spans(timelines)
    shown = [t.shifted() for t in timelines.values()]
    xlim = xlim or (0.0, 1.005e3 * max(t.duration for t in shown))
    most = max(len(t.ranks) for t in shown)
    row = min(0.42, max(0.09, 6.5 / (len(shown) * most)))  # inches
    heights = [row * len(t.ranks) + 0.08 for t in shown]
    legend = _flow(_legend(shown, xlim))
    head, gap, foot = 0.42, 0.14, 0.62 + 0.22 * len(legend)
    total = sum(heights) + head * len(shown) + gap * (len(shown) - 1) + foot
    figure = _figure(WIDTH, total)
    top = total
    for i, (title, t, height) in enumerate(zip(timelines, shown, heights, strict=True)):
        top -= head + height
        box = (LEFT / WIDTH, top / total, (WIDTH - LEFT - RIGHT) / WIDTH, height / total)
        ax = figure.add_axes(box)
        _rows(ax, t, xlim)
        _heading(ax, title, t, xlim, unit)
        ax.tick_params(labelbottom=i == len(shown) - 1)
        top -= gap
    ax.set_xlabel("milliseconds", color=MUTED, fontsize=9, loc="right", labelpad=1)
    _key(figure, legend, LEFT, 0.32)
    labels = dict.fromkeys(t.label for t in timelines.values() if t.label)
    _footnote(figure, "; ".join(labels), total)
    return figure


def _check_spans(timelines: Mapping[str, Timeline]) -> None:
    for title, t in timelines.items():
        if not t.spans:
            raise ValueError(
                f"{title or 'the timeline'} has no spans; was `record` around any work?"
            )
    if not timelines:
        raise ValueError("there is no timeline to draw")


def _rows(ax: Axes, t: Timeline, xlim: tuple[float, float]) -> None:
    """Draw the ranks of a timeline that starts at 0 s; `xlim` in milliseconds."""
    pixel = (xlim[1] - xlim[0]) / (ax.get_position().width * ax.figure.get_figwidth() * DPI)
    ax.set_xlim(xlim)
    ax.set_ylim(-0.06, len(t.ranks) + 0.06)
    axes = {s.axis for s in t if s.kind == "comm"}
    two_lanes = "host" in axes and len(axes) > 1  # copies run below what ranks say to each other
    for row, rank in enumerate(reversed(t.ranks)):
        for key, pieces in _pieces(t.select(rank=rank)).items():
            low, high = (0.46, 0.44) if key in KIND else (0.16, 0.2)
            if key.startswith("exposed"):
                low, high = 0.08, 0.36
            if two_lanes and key not in KIND:
                low, high = (low / 2, high / 2) if "host" in key else (0.22 + low / 2, high / 2)
            _bars(ax, row + low, high, pieces, colour(key), pixel)
    _quiet(ax)
    every = math.ceil(0.16 / (_inches(ax) / len(t.ranks)))
    ticks = [(len(t.ranks) - i - 0.5, f"rank {r}") for i, r in enumerate(t.ranks) if i % every == 0]
    ax.set_yticks([y for y, _ in ticks], [name for _, name in ticks], color=MUTED, fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(10))
    ax.grid(axis="x", color=GRID, lw=0.8)
    end = 1e3 * t.duration
    if xlim[0] <= end <= xlim[1]:
        ax.axvline(end, color=INK, lw=0.9)


def _pieces(mine: Timeline) -> dict[str, list[Piece]]:
    """The bars of one rank by what gives their colour: a kind of work, an axis, or "exposed"."""
    busy = union((s.start, s.end) for s in mine if s.kind not in NOT_COMPUTE)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for s in mine:
        if s.kind != "comm":
            known = s.kind if s.kind in KIND else "compute"
            pieces[known].append((s.start, s.end, _short(s.name)))
            continue
        whole = [(s.start, s.end)]
        pieces[s.axis or "world"] += [(*p, _message(s)) for p in intersect(whole, busy)]
        exposed = "exposed host" if s.axis == "host" else "exposed"
        pieces[exposed] += [(*p, _message(s)) for p in subtract(whole, busy)]
    return pieces


def _inches(ax: Axes) -> float:
    return ax.get_position().height * ax.figure.get_figheight()


def _bars(
    ax: Axes,
    y: float,
    height: float,
    pieces: Iterable[Piece],
    fill: str,
    pixel: float,
) -> None:
    """Bars (start and end in seconds, name), parted by white hairlines; names where they fit.

    Pieces too narrow to see are joined with what touches them: so a trace of 100,000 kernels is
    drawn in a moment, and in its true colours.
    """
    joined: list[Piece] = []
    for start, end, name in sorted((1e3 * s, 1e3 * e, n) for s, e, n in pieces):
        if joined:
            last_start, last_end, last_name = joined[-1]
            if end <= last_end:
                continue
            start = max(start, last_end)  # collectives in flight together are drawn as a queue
            small = min(end - start, last_end - last_start) < 3 * pixel
            if start - last_end < pixel / 2 and (small or name == last_name):
                # The sum keeps a name only if nearly all of it has that name.
                own, longest = max((end - start, name), (last_end - last_start, last_name))
                end = max(last_end, end)
                same = name == last_name or own > 0.8 * (end - last_start)
                joined[-1] = (last_start, end, longest if same else "")
                continue
        joined.append((start, end, name))
    wide = [(s, e - s) for s, e, _ in joined if e - s >= 4 * pixel]
    narrow = [(s, max(e - s, pixel / 2)) for s, e, _ in joined if e - s < 4 * pixel]
    tall = height * _inches(ax) / (ax.get_ylim()[1] - ax.get_ylim()[0])  # inches
    hairline = min(0.7, 5 * tall)
    ax.broken_barh(wide, (y, height), facecolor=fill, edgecolor=PAPER, lw=hairline, zorder=2)
    ax.broken_barh(narrow, (y, height), facecolor=fill, lw=0, zorder=2)
    size = min(7.0, 72 * tall * 0.62)  # points
    if size < 4.5:
        return
    for start, end, name in joined:
        if name and (end - start) / pixel > (0.68 * len(name) + 1.2) * size / 72 * DPI:
            ax.text(
                (start + end) / 2,
                y + height / 2 - 0.01,
                name,
                size=size,
                color=_on(fill),
                ha="center",
                va="center",
                clip_on=True,
            )


def _short(name: str) -> str:
    """layers.3 of a Llama is "3"; time between blocks has no name."""
    if name in ("forward", "backward"):
        return ""
    return name.rsplit(".", 1)[-1]


def _message(span: Span) -> str:
    size = f" {_bytes(span.num_bytes)}" if span.num_bytes else ""
    return span.name.replace("_", "-") + size


def _heading(ax: Axes, title: str, t: Timeline, xlim: tuple[float, float], unit: str) -> None:
    said = finding(t, unit)
    hidden = t.hidden_fraction
    top = ax.get_ylim()[1] + 0.1 * ax.get_ylim()[1] / _inches(ax)
    loud = not math.isnan(hidden) and hidden < 0.5
    ink = EXPOSED if loud else INK
    place = {"va": "bottom", "clip_on": False}
    if not title:
        ax.text(xlim[0], top, said, size=12, weight="bold", color=ink, **place)
        return
    ax.text(xlim[0], top, title, size=12, weight="bold", color=INK, **place)
    # The finding ends where the step ends, unless it would run into the title.
    end = min(1e3 * t.duration, xlim[1])
    inches = WIDTH - LEFT - RIGHT
    room = (end - xlim[0]) / (xlim[1] - xlim[0]) * inches
    if room < (0.62 * 12 * len(title) + 0.56 * 10 * len(said)) / 72 + 0.2:
        x = (0.66 * 12 * len(title) / 72 + 0.25) / inches
        ax.text(xlim[0] + x * (xlim[1] - xlim[0]), top, said, size=10, color=ink, **place)
    else:
        ax.text(end, top, said, size=10, color=ink, ha="right", **place)


def _legend(shown: Sequence[Timeline], xlim: tuple[float, float]) -> list[tuple[str, str]]:
    """(colour, text) of what can be seen: work first, then communication, exposed last."""
    seen: set[str] = set()
    for t in shown:
        for rank in t.ranks:
            for key, pieces in _pieces(t.select(rank=rank)).items():
                if any(1e3 * end > xlim[0] and 1e3 * start < xlim[1] for start, end, _ in pieces):
                    seen.add(key.split()[0])  # copies that are exposed are "exposed host"
    verbs = {s.name.replace("_", "-") for t in shown for s in t if s.kind == "comm"}
    what = verbs.pop() if len(verbs) == 1 else "communication"
    axes = sorted(seen - KIND.keys() - {"exposed"}, key=lambda a: ([*AXIS, a].index(a), a))
    hidden = {a: f"{what}, hidden" if len(axes) == 1 else f"{a}, hidden" for a in axes}
    names = {kind: kind.replace("_", " ") for kind in KIND} | hidden
    names["exposed"] = f"{what}, exposed"
    return [(colour(key), text) for key, text in names.items() if key in seen]


# ---------------------------------------------------------------------- meshes
def mesh(mesh: Mesh | Mapping[str, int]) -> Figure:
    """Ranks as a grid; those joined by a line of an axis' colour talk to each other along it.

    The last axis runs to the right, the one before it downward, a third makes panels to the right
    and a fourth panels below; between panels of many ranks, one line stands for all.
    Raises ValueError for more axes, or more ranks than can be read.
    """
    given = mesh.sizes if isinstance(mesh, Mesh) else mesh
    sizes = {name: size for name, size in given.items() if size > 1}
    if len(sizes) > 4 or math.prod(sizes.values()) > 256:
        raise ValueError(f"mesh {dict(given)} cannot be read; at most 4 axes and 256 ranks")
    names = [*reversed(sizes), "", "", "", ""][:4]  # right, down, panels right, panels down
    right, down = (sizes.get(name, 1) + 0.7 for name in names[:2])
    where = {}  # rank -> units of the grid from the upper left corner
    for rank in range(math.prod(sizes.values())):
        at = coordinates(rank, sizes)
        i = [at.get(name, 0) for name in names]
        where[rank] = i[0] + right * i[2], i[1] + down * i[3]
    crowded = math.prod(sizes.get(name, 1) for name in names[:2]) > 8

    def near(rank: int) -> list[int]:
        at = coordinates(rank, sizes)
        return [at.get(name, 0) for name in names[:2]]

    columns, lines = (max(axis) + 1 for axis in zip(*where.values(), strict=True))
    cell = min(0.8, (WIDTH - 0.5) / columns)  # inches
    groups = {name: groups_along([name], sizes) for name in sizes}
    legend = {name: _group_text(name, listed) for name, listed in groups.items()}
    width = max(columns * cell + 0.5, 0.075 * max(map(len, legend.values()), default=0) + 0.9, 4.2)
    height = lines * cell + 0.75 + 0.24 * len(sizes)
    figure = _figure(width, height)
    ax = _canvas(figure, width, height)
    shape = " × ".join(f"{name} {size}" for name, size in sizes.items()) or "one device"
    _title(figure, f"{len(where)} ranks: {shape}" if sizes else shape)
    xy = {
        r: (0.2 + (x + 0.5) * cell, height - 0.5 - (y + 0.5) * cell) for r, (x, y) in where.items()
    }
    for name, listed in groups.items():
        far = names.index(name) >= 2  # in a bow, past the ranks between
        line = {"arrowstyle": "-", "color": colour(name), "lw": 1.8 if far else 3.5, "zorder": 1}
        bow = -min(0.22, 0.6 / (right if names.index(name) == 2 else down)) if far else 0
        line |= {"connectionstyle": f"arc3,rad={bow}", "shrinkA": 0, "shrinkB": 0}
        if far and crowded:  # one bow from panel to panel; the other ranks' would look the same
            listed = [g for g in listed if all(at == 0 for at in near(g[0]))]
            legend[name] += "  (only the first are drawn)"
        for group in listed:
            for a, b in zip(group, group[1:], strict=False):
                ax.add_patch(FancyArrowPatch(xy[a], xy[b], **line))
    side, rounding = 0.52 * cell, f"round,pad=0,rounding_size={0.14 * cell}"
    for rank, (x, y) in xy.items():
        corner = x - side / 2, y - side / 2
        box = {"boxstyle": rounding, "facecolor": PAPER, "edgecolor": INK, "lw": 1.1}
        ax.add_patch(FancyBboxPatch(corner, side, side, **box, zorder=2))
        _text(ax, x, y - 0.01, rank, size=13 * cell, ha="center", zorder=3)
    for i, (name, text) in enumerate(reversed(legend.items())):
        y = 0.18 + 0.24 * i
        ax.plot([0.25, 0.6], [y, y], color=colour(name), lw=3.5, solid_capstyle="butt")
        _text(ax, 0.7, y - 0.01, text)
    return figure


def _group_text(name: str, groups: Sequence[Sequence[int]]) -> str:
    shown = [
        " ".join(map(str, g)) if len(g) <= 8 else f"{g[0]} {g[1]} … {g[-1]}" for g in groups[:4]
    ]
    return f"{name} groups: " + "  |  ".join(shown) + ("  |  …" if len(groups) > 4 else "")


# ---------------------------------------------------------------------- collectives
SENTENCE = {
    "all_reduce": "everybody gets the sum",
    "reduce": "rank 0 gets the sum",
    "reduce_scatter": "rank r gets block r of the sum",
    "all_gather": "everybody gets everybody's block",
    "gather": "rank 0 gets everybody's block",
    "broadcast": "everybody gets what rank 0 has",
    "scatter": "rank r gets block r of rank 0",
    "all_to_all": "block s of rank r becomes block r of rank s",
}
Cell = tuple[frozenset[int], int]  # (ranks whose data is summed in it, number of the block)


def blocks_of(verb: str, size: int) -> tuple[list[dict[int, Cell]], list[dict[int, Cell]]]:
    """What each rank holds before and after `verb`: slot -> cell. Root of rooted verbs is rank 0.

    Raises ValueError for an unknown verb.
    """
    n = range(size)
    everyone = frozenset(n)
    own = [{b: (frozenset({r}), b) for b in n} for r in n]
    shard = [{r: (frozenset({r}), r)} for r in n]
    total: dict[int, Cell] = {b: (everyone, b) for b in n}
    joined = {r: (frozenset({r}), r) for r in n}
    nothing: list[dict[int, Cell]] = [{} for _ in n[1:]]
    pictures = {
        "all_reduce": (own, [total for _ in n]),
        "reduce": (own, [total, *nothing]),
        "reduce_scatter": (own, [{r: total[r]} for r in n]),
        "all_gather": (shard, [joined for _ in n]),
        "gather": (shard, [joined, *nothing]),
        "broadcast": ([own[0], *nothing], [own[0] for _ in n]),
        "scatter": ([own[0], *nothing], [{r: own[0][r]} for r in n]),
        "all_to_all": (own, [{s: (frozenset({s}), r) for s in n} for r in n]),
    }
    if verb not in pictures:
        raise ValueError(f"no picture of {verb!r}; there are {', '.join(pictures)}")
    return pictures[verb]


def collective(verb: str, size: int = 4) -> Figure:
    """Data moving: what every rank holds before `verb`, and after. Root of rooted verbs is rank 0.

    A colour is the rank that data comes from, a number its block; a cell of all colours is the sum.
    Raises ValueError for an unknown verb, or a size that makes no picture.
    """
    before, after = blocks_of(verb, size)
    if not 2 <= size <= len(RANK):
        raise ValueError(f"size={size} makes no picture that can be read; use 2 to {len(RANK)}")
    cell, row, left, middle = 0.44, 0.56, 0.8, 1.1  # inches
    side = cell * size
    width, height = max(left + 2 * side + middle + 0.25, 5.2), 1.2 + row * size
    figure = _figure(width, height)
    ax = _canvas(figure, width, height)
    spoken = verb.replace("_", "-")
    _title(figure, f"{spoken}: {SENTENCE[verb]}")
    top = height - 0.8
    for x, word, held in ((left, "before", before), (left + side + middle, "after", after)):
        _text(ax, x + 0.03, top + 0.14, word, color=MUTED)
        for rank, slots in enumerate(held):
            y = top - row * rank - cell
            for slot in range(size):
                _cell(ax, x + slot * cell, y, cell, slots.get(slot))
            _text(ax, left - 0.12, y + cell / 2, f"rank {rank}", color=MUTED, ha="right")
    x, y = left + side, top - (row * size - (row - cell)) / 2
    ends = (x + 0.25, y), (x + middle - 0.25, y)
    ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=16, color=INK, lw=1.4))
    share = wire_bytes(verb, 1200, size) / 1200
    note = f"of a tensor of N bytes, the ledger counts {share:.3g} N per rank (ring formula)"
    _footnote(figure, note, height)
    return figure


Held = Sequence[Sequence[Set[int]]]
"""What ranks hold: ``held[rank][block]`` is the set of ranks whose data is summed in that block."""


def rounds(history: Mapping[str, Held], *, title: str = "", note: str = "") -> Figure:
    """An algorithm round by round: `{"after round 1": held, ...}`, a panel for each, colours as in
    `collective`. What a rank did not hold in the panel before has a frame: it has just arrived.

    Raises ValueError when there is nothing to draw, or for sizes that cannot be read.
    """
    panels = list(history.items())
    ranks = len(panels[0][1]) if panels else 0
    blocks = max((len(row) for _, held in panels for row in held), default=0)
    if not (1 <= ranks <= len(RANK) and 1 <= blocks <= 8):
        raise ValueError(f"{ranks} ranks of {blocks} blocks: at most {len(RANK)} and 8 can be read")
    cell, row, left, gap = 0.42, 0.54, 0.75, 0.34  # inches
    side = cell * blocks
    columns = min(len(panels), max(1, int((WIDTH - left) / (side + gap))))
    lines = math.ceil(len(panels) / columns)
    panel = row * ranks + 0.42
    width, height = max(left + columns * (side + gap), 5.2), 0.55 + panel * lines + 0.2
    figure = _figure(width, height)
    ax = _canvas(figure, width, height)
    _title(figure, title)
    for i, (word, held) in enumerate(panels):
        x, top = left + (i % columns) * (side + gap), height - 0.85 - (i // columns) * panel
        _text(ax, x + 0.03, top + 0.14, word, color=MUTED)
        for rank, sources in enumerate(held):
            y = top - row * rank - cell
            if x == left:
                _text(ax, left - 0.12, y + cell / 2, f"rank {rank}", color=MUTED, ha="right")
            for block, whose in enumerate(sources):
                content = (frozenset(whose), block) if whose else None
                _cell(ax, x + block * cell, y, cell, content)
                if i and whose and whose != panels[i - 1][1][rank][block]:
                    at, inner = (x + block * cell + 0.03, y + 0.03), cell - 0.06
                    ax.add_patch(Rectangle(at, inner, inner, fill=False, ec=INK, lw=1.6, zorder=4))
    _footnote(figure, note, height)
    return figure


def _cell(ax: Axes, x: float, y: float, cell: float, content: Cell | None) -> None:
    """One block at (x, y): its colours from top to bottom are the ranks that it comes from."""
    pad = 0.03
    sources, block = content or (frozenset({-1}), "")
    summed = len(sources) > 1
    stripe = (cell - 2 * pad) / len(sources)
    for i, source in enumerate(sorted(sources, reverse=True)):
        fill = RANK[source] if content else KIND["idle"]
        at = x + pad, y + pad + i * stripe
        ax.add_patch(Rectangle(at, cell - 2 * pad, stripe, facecolor=fill, lw=0))
    box = {"boxstyle": "round,pad=0.16", "fc": PAPER, "ec": "none", "alpha": 0.88}
    style = {"size": 10, "weight": "bold", "ha": "center", "bbox": box if summed else None}
    text = f"Σ{block}" if summed else block
    _text(ax, x + cell / 2, y + cell / 2 - 0.01, text, **style)


# ---------------------------------------------------------------------- shares of the data
def shares(order: Sequence[int], size: int, batch_size: int) -> Figure:
    """An epoch: a row per batch, its samples in the order of the epoch, coloured by their rank.

    Sample i of a batch belongs to rank i mod `size`, as `train.data.share` deals them out. Raises
    ValueError for an order, size or batch that makes no picture.
    """
    if not 2 <= size <= len(RANK) or not 1 <= batch_size <= 20 or not 1 <= len(order) <= 200:
        raise ValueError(
            f"{len(order)} samples in batches of {batch_size} for {size} ranks make no picture "
            f"that can be read; use up to 200, up to 20, and 2 to {len(RANK)}"
        )
    cell, left, batches = 0.46, 0.95, math.ceil(len(order) / batch_size)
    width = max(left + cell * batch_size + 0.25, 5.2)
    height = 0.98 + cell * batches
    figure = _figure(width, height)
    ax = _canvas(figure, width, height)
    _title(figure, f"every sample once, dealt out to {size} ranks")
    for i, sample in enumerate(order):
        row, column = divmod(i, batch_size)
        x, y = left + cell * column, height - 0.48 - cell * (row + 1)
        fill = RANK[column % size]
        box = {"facecolor": fill, "lw": 0}
        ax.add_patch(Rectangle((x + 0.025, y + 0.025), cell - 0.05, cell - 0.05, **box))
        _text(ax, x + cell / 2, y + cell / 2 - 0.01, int(sample), color=_on(fill), ha="center")
        if column == 0:
            _text(ax, left - 0.12, y + cell / 2, f"step {row}", color=MUTED, ha="right")
    _key(figure, _flow([(RANK[r], f"rank {r}") for r in range(size)]), left + 0.03, 0.16)
    return figure


# ---------------------------------------------------------------------- curves and bars
def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    note: str = "",
    points: Iterable[str] = (),
    logx: bool = False,
    logy: bool = False,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Curves `{name: (x, y)}` with their names at their ends; those in `points` are dots.

    A name that begins with "_" is not shown: for dots that belong to a line, in its colour.
    Raises ValueError when a curve is empty or its x and y differ in length.
    """
    for name, (x, y) in lines.items():
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"curve {name!r} has {len(x)} x and {len(y)} y; give equally many, at least 1"
            )
    points = set(points)
    longest = max((len(name) for name in lines if not name.startswith("_")), default=0)
    width, height = 7.2, 3.9
    figure = _figure(width, height)
    right = min(2.6, 0.085 * longest + 0.3)
    ax = figure.add_axes(
        (0.75 / width, 0.72 / height, (width - 0.75 - right) / width, (height - 1.3) / height)
    )
    _quiet(ax)
    ax.spines["bottom"].set(visible=True, color=MUTED, lw=0.8)
    ax.grid(axis="y", color=GRID, lw=0.8)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    ax.minorticks_off()
    for logarithmic, axis in ((logx, ax.xaxis), (logy, ax.yaxis)):
        values = [v for xy in lines.values() for v in xy[axis is ax.yaxis]]
        if logarithmic and min(values, default=0) > 0 and max(values) < 200 * min(values):
            doubles = axis is ax.xaxis and all(math.log2(v).is_integer() for v in values)
            # Powers of ten are too few.
            ticks = FixedLocator(values) if doubles else LogLocator(subs=(1, 2, 5))
            axis.set_major_locator(ticks)
            axis.set_major_formatter(FormatStrFormatter("%g"))
    seen = {name: xy for name, xy in lines.items() if name not in points}
    if logy and all(v > 0 for _, y in seen.values() for v in y):
        # Near is what lies together in the picture.
        seen = {name: (x, [math.log10(v) for v in y]) for name, (x, y) in seen.items()}
    widths = _widths(seen)
    ends = []
    for i, (name, (x, y)) in enumerate(lines.items()):
        ink = (colours or {}).get(name, SERIES[i % len(SERIES)])
        if name in points:
            ax.plot(x, y, "o", color=ink, ms=5, mec=PAPER, mew=0.8, zorder=4)
        else:
            ax.plot(x, y, color=ink, lw=widths[name], solid_capstyle="round", zorder=3)
        if not name.startswith("_"):
            ends.append((x[-1], y[-1], name, ink))
    _end_labels(ax, ends)
    ax.set_xlabel(xlabel, color=MUTED, fontsize=9, loc="right")
    ax.text(0, 1.04, ylabel, color=MUTED, size=9, transform=ax.transAxes)
    ax.tick_params(axis="both", colors=MUTED, labelsize=9, labelleft=True)
    _title(figure, title)
    _footnote(figure, note, height)
    return figure


def _widths(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> dict[str, float]:
    """Line widths in points: of curves that coincide, the later lie thin upon the earlier."""
    widths: dict[str, float] = {}
    values = [v for _, y in lines.values() for v in y]
    near = 0.01 * (max(values, default=0.0) - min(values, default=0.0))
    names = list(lines)
    for i, name in enumerate(names):
        x, y = lines[name]
        covered = 0
        for later in names[i + 1 :]:
            other = lines[later][1]
            if len(other) == len(y) and all(
                abs(a - b) <= near for a, b in zip(y, other, strict=True)
            ):
                covered += 1
        widths[name] = 2.0 + 2.4 * covered
    return widths


def _end_labels(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Names at the ends of curves, pushed apart until none covers another."""
    ax.get_xlim(), ax.get_ylim()  # until asked for, the limits are not those of the data
    apart = 0.18 / _inches(ax)
    to_axes = ax.transData + ax.transAxes.inverted()
    lowest = -1.0
    for y, name, ink in sorted(
        (to_axes.transform((x, y))[1], name, ink) for x, y, name, ink in ends
    ):
        lowest = max(y, lowest + apart)
        _text(ax, 1.015, lowest, name, color=_readable(ink), transform=ax.transAxes)


def loss_curves(
    losses: Mapping[str, Sequence[float]], *, title: str = "", note: str = "", xlabel: str = "step"
) -> Figure:
    """Losses by step `{name: [loss of step 0, ...]}`. Equal ones lie on each other, all visible."""
    lines = {name: (range(len(values)), list(values)) for name, values in losses.items()}
    return curves(lines, xlabel=xlabel, ylabel="loss", title=title, note=note)


def bars(
    values: Mapping[str, float | Mapping[str, float]],
    *,
    unit: str = "",
    title: str = "",
    note: str = "",
    highlight: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Horizontal bars `{name: value}`, or stacked ones `{name: {part: value}}`, with their values.

    Parts named as a kind of work or an axis have its colour, unless `colours` has one for them.
    Raises ValueError for negative values.
    """
    stacked = {n: dict(v) if isinstance(v, Mapping) else {"": v} for n, v in values.items()}
    for name, parts in stacked.items():
        if any(value < 0 for value in parts.values()):
            raise ValueError(f"bar {name!r} has a negative value: {parts}")
    names = list(dict.fromkeys(part for parts in stacked.values() for part in parts if part))
    inks = {n: SERIES[i % len(SERIES)] for i, n in enumerate(names)}
    inks.update({n: colour(n) for n in names if n in KIND or n in AXIS or n == "exposed"})
    inks.update(colours or {})
    left = 0.3 + 0.075 * max(map(len, stacked), default=0)
    width, row = 7.2, 0.36
    foot = 0.3 + (0.3 if names else 0)
    height = 0.55 + row * len(stacked) + foot
    figure = _figure(width, height)
    ax = figure.add_axes(
        (left / width, foot / height, (width - left - 0.2) / width, row * len(stacked) / height)
    )
    _quiet(ax)
    longest = max((sum(parts.values()) for parts in stacked.values()), default=1.0) or 1.0
    labels = {n: f"{_number(sum(parts.values()))} {unit}".strip() for n, parts in stacked.items()}
    room = 0.25 + 0.085 * max(map(len, labels.values()), default=0)  # inches, for the values
    wide = width - left - 0.2
    ax.set_xlim(0, longest * wide / (wide - room))
    ax.set_ylim(len(stacked) - 0.5, -0.5)
    ax.set_xticks([])
    ax.set_yticks(range(len(stacked)), list(stacked), color=INK, fontsize=9)
    for i, (name, parts) in enumerate(stacked.items()):
        start = 0.0
        for part, value in parts.items():
            ink = inks.get(part, KIND["forward" if highlight not in (None, name) else "backward"])
            ax.barh(i, value, left=start, height=0.62, color=ink, edgecolor=PAPER, lw=0.7)
            start += value
        weight = "bold" if name == highlight else "normal"
        _text(ax, start + 0.012 * longest, i, labels[name], weight=weight)
    _title(figure, title)
    if names:
        parts = [(inks[n], n.replace("_", " ")) for n in names]
        _key(figure, _flow(parts, width - left), left, 0.3)
    _footnote(figure, note, height)
    return figure


def palette() -> Figure:
    """The colour of every kind of work, as a table."""
    rows = [*KIND, *AXIS, "exposed"]
    width, height = 5.6, 0.28 * len(rows) + 0.25
    figure = _figure(width, height)
    ax = _canvas(figure, width, height)
    for i, key in enumerate(rows):
        y = height - 0.28 * (i + 1)
        ax.add_patch(Rectangle((0.15, y - 0.08), 0.42, 0.19, color=colour(key)))
        _text(ax, 0.7, y, key.replace("_", " "), weight="bold")
        _text(ax, 2.05, y, MEANING[key], color=MUTED)
    return figure


# ---------------------------------------------------------------------- house style
def _flow(
    entries: Iterable[tuple[str, str]], width: float = WIDTH - LEFT - RIGHT
) -> list[list[tuple[float, str, str]]]:
    """Lines of (inches from the left, colour, text), broken where `width` inches are full."""
    lines: list[list[tuple[float, str, str]]] = [[]]
    x = 0.0
    for ink, text in entries:
        takes = 0.5 + 0.075 * len(text)
        if lines[-1] and x + takes > width:
            lines.append([])
            x = 0.0
        lines[-1].append((x, ink, text))
        x += takes
    return lines


def _key(figure: Figure, lines: list[list[tuple[float, str, str]]], left: float, y: float) -> None:
    """Draw a legend whose last line is `y` inches above the lower edge."""
    width, height = figure.get_size_inches()
    ax = _canvas(figure, width, height)
    for i, line in enumerate(reversed(lines)):
        for x, ink, text in line:
            at = left + x, y + 0.22 * i
            ax.add_patch(Rectangle(at, 0.16, 0.12, color=ink, lw=0))
            ax.text(at[0] + 0.24, at[1] + 0.055, text, size=9, color=INK, va="center")


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _canvas(figure: Figure, width: float, height: float) -> Axes:
    """Axes over the whole figure whose unit is the inch."""
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, width)
    ax.set_ylim(0, height)
    ax.set_axis_off()
    return ax


def _text(ax: Axes, x: float, y: float, text: Any, **style: Any) -> None:
    ax.text(x, y, str(text), **{"size": 9, "color": INK, "va": "center", **style})


def _title(figure: Figure, text: str) -> None:
    width, height = figure.get_size_inches()
    style = {"size": 12, "weight": "bold", "color": INK, "va": "top"}
    figure.text(0.15 / width, 1 - 0.13 / height, text, **style)


def _quiet(ax: Axes) -> None:
    ax.set_facecolor("none")
    ax.set_axisbelow(True)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0, colors=MUTED, labelsize=9)


def _footnote(figure: Figure, text: str, height: float) -> None:
    width = figure.get_figwidth()
    x, y = 1 - RIGHT / width, 0.07 / height
    figure.text(x, y, text, size=8, color=MUTED, ha="right", va="bottom")


def _luminance(ink: str) -> float:
    red, green, blue = (int(ink[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def _on(fill: str) -> str:
    """Ink that can be read on `fill`."""
    return PAPER if _luminance(fill) < 0.3 else INK


def _readable(ink: str) -> str:
    """`ink` for text on paper: darker where it would be too pale."""
    while _luminance(ink) > 0.28:
        ink = "#" + "".join(f"{int(0.9 * int(ink[i : i + 2], 16)):02x}" for i in (1, 3, 5))
    return ink


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 20 else f"{value:.3g} ms"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


# ---------------------------------------------------------------------- files and notebooks
def png(figure: Figure) -> bytes:
    """The figure as a PNG of at most 256 colours: a third of the size, and no difference to see."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True, dpi=(DPI, DPI))
    return small.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an SVG without date, and with the same names of its parts every time."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "minipar"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a .png or .svg; equal figures give equal files. Raises ValueError for other names."""
    path = Path(path)
    if path.suffix == ".png":
        path.write_bytes(png(figure))
    elif path.suffix == ".svg":
        path.write_text(svg(figure))
    else:
        raise ValueError(f"{path} ends with {path.suffix!r}; use .png or .svg")
    return path


DRAWN: dict[type, Callable[[Any], Figure]] = {Timeline: timeline, Mesh: mesh, Figure: lambda f: f}
"""What draws itself once `register` was called."""


def register(kind: type | None = None, function: Callable[[Any], Figure] | None = None) -> None:
    """Let Timeline, Mesh and figures (and `kind`, by `function`) draw themselves in a notebook.

    Does nothing outside of IPython.
    """
    if kind is not None and function is not None:
        DRAWN[kind] = function
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["image/png"]
    for drawn, draw in DRAWN.items():
        formatter.for_type(drawn, lambda value, draw=draw: _png_or_none(draw, value))


def _png_or_none(draw: Callable[[Any], Figure], value: Any) -> bytes | None:
    try:
        return png(draw(value))
    except ValueError:  # nothing to draw: the notebook shows the text
        return None
