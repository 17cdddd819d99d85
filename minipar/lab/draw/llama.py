"""Pictures of the model: where data flows, how positions turn, which heads share.

Each is a plain function of a `LlamaConfig`, drawn by the same pen.
"""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Wedge

from minipar.lab.draw import pen
from minipar.lab.draw.pen import INK, KIND, MUTED, PAPER, RANK, SERIES
from minipar.model.llama import LlamaConfig, rope_frequencies

PARTS = dict(zip(("attention", "embedding", "mlp", "norm"), SERIES, strict=False))
"""The colour of each part of the model, as `draw.bars` gives them."""


def parameters(config: LlamaConfig) -> dict[str, int]:
    """Return parameters of the whole model by part; tied embeddings are counted once."""
    tables = 1 if config.tie_embeddings else 2
    layers = [config.layer_parts(layer) for layer in range(config.num_layers)]
    return {
        "attention": sum(layer["attention"] for layer in layers),
        "embedding": tables * config.vocab_size * config.hidden_size,
        "mlp": sum(layer["mlp"] for layer in layers),
        "norm": sum(layer["norm"] for layer in layers) + config.hidden_size,
    }


def model(config: LlamaConfig) -> Figure:
    """Draw the way of a token through the model, with shapes and the parameters of each part."""
    width, height = pen.WIDTH, 2.95
    title = "One stream from byte to prediction; each layer adds to it twice"
    total = f"numbers under the boxes: parameters, {config.num_parameters:,} in all"
    figure, ax = pen.sheet(width, height, title, total)
    count = parameters(config)
    layers, line, branch = config.num_layers, 1.95, 0.98
    once = 2 if config.tie_embeddings else 1
    embedding = f"{count['embedding'] * once // 2:,}"
    pen.rounded(ax, 1.95, 0.42, 5.15, 1.95, 0.1, fc=KIND["idle"], lw=0)
    pen.text(ax, 2.07, 2.22, f"a layer, {layers} times", color=MUTED)
    pen.arrow(ax, (0.45, line), (width - 0.66, line), 13, color=INK, lw=2.6, zorder=1)
    pen.text(ax, 0.18, line, "[T]")
    pen.text(ax, width - 0.6, line, "[T, V]")
    pen.text(ax, 1.62, line + 0.16, "[T, D]", color=MUTED, ha="center")
    tied = "same as embed" if config.tie_embeddings else embedding
    _part(ax, 1.02, line, 0.74, "embed", "embedding", embedding)
    _part(ax, 7.55, line, 0.62, "norm", "norm", f"{config.hidden_size:,}")
    _part(ax, 8.42, line, 0.62, "head", "embedding", tied)
    for x, name, part in ((2.5, "attention", "attention"), (4.95, "SwiGLU", "mlp")):
        plus = x + 1.75
        style = {"color": INK, "lw": 1.2, "zorder": 1}
        ax.plot([x - 0.25, x - 0.25, plus], [line, branch, branch], **style)
        pen.arrow(ax, (plus, branch), (plus, line - 0.1), 13, **style)
        _part(ax, x + 0.2, branch, 0.58, "norm", "norm", f"{layers} · {config.hidden_size:,}")
        each = config.layer_parts(0)[part]
        same = layers * each == count[part]  # a dense layer beside others with experts is not
        below = f"{layers} · {each:,}" if same else f"{count[part]:,} in all"
        _part(ax, x + 1.1, branch, 0.92, name, part, below)
        ax.add_patch(Circle((plus, line), 0.12, fc=PAPER, ec=INK, lw=1.2, zorder=3))
        pen.text(ax, plus, line - 0.005, "+", ha="center", size=11, zorder=4)
    return figure


def _part(ax: Axes, x: float, y: float, width: float, name: str, part: str, below: str) -> None:
    """Draw a box around (x, y) in the colour of `part`, its parameters below."""
    _box(ax, x, y, width, 0.42, name, PARTS[part])
    pen.text(ax, x, y - 0.35, below, color=MUTED, ha="center", size=8, zorder=3)


def rotations(
    config: LlamaConfig, pairs: Sequence[int] = (), positions: Sequence[int] = range(8)
) -> Figure:
    """Draw RoPE on a head: a dial per pair of coordinates (row) and position (column).

    Raises ValueError for a pair that the head does not have.
    """
    turns = rope_frequencies(config).tolist()
    pairs = pairs or [0, 2, 4, len(turns) - 1]
    if not all(0 <= pair < len(turns) for pair in pairs):
        raise ValueError(f"pairs={list(pairs)}: a head has pairs 0 to {len(turns) - 1}")
    cell, left = 0.78, 1.55
    width, height = left + cell * len(positions) + 0.2, 0.85 + cell * len(pairs)
    fast, slow = (_degrees(turns[i]) for i in (pairs[0], pairs[-1]))
    title = f"Pair {pairs[0]} turns by {fast} per token, pair {pairs[-1]} by {slow}"
    figure, ax = pen.sheet(width, height, title)
    for row, pair in enumerate(pairs):
        y = height - 0.95 - cell * row
        pen.text(ax, 0.18, y + 0.08, f"pair {pair}", weight="bold")
        pen.text(ax, 0.18, y - 0.12, f"{_degrees(turns[pair])} per token", color=MUTED)
        for column, position in enumerate(positions):
            _dial(ax, left + cell * (column + 0.5), y, 0.31, position * turns[pair])
    for column, position in enumerate(positions):
        x = left + cell * (column + 0.5)
        pen.text(ax, x, 0.16, f"t = {position}", color=MUTED, ha="center")
    return figure


def _degrees(angle: float) -> str:
    return f"{math.degrees(angle):.2g}°"


def _dial(ax: Axes, x: float, y: float, radius: float, angle: float) -> None:
    """Draw a clock hand that starts on the right and has turned by `angle`, against the clock."""
    ax.add_patch(Circle((x, y), radius, fc=KIND["idle"], lw=0))
    rest = math.degrees(angle) % 360
    ax.add_patch(Wedge((x, y), radius, 0, rest, fc=KIND["forward"], lw=0))
    tip = x + radius * math.cos(angle), y + radius * math.sin(angle)
    ax.plot((x, tip[0]), (y, tip[1]), color=KIND["backward"], lw=2.2, solid_capstyle="round")
    ax.add_patch(Circle((x, y), 0.03, fc=KIND["backward"], lw=0, zorder=3))


def attention(config: LlamaConfig, num_tokens: int = 8) -> Figure:
    """Draw which query heads share a key/value head, and which tokens a token may look at."""
    heads, groups = config.num_heads, config.num_kv_heads
    side = 0.26  # inches of a cell of the mask
    width = pen.WIDTH
    height = 1.15 + side * num_tokens
    share = heads // groups
    title = f"{share} query heads share one key/value head; no token sees a later one"
    figure, ax = pen.sheet(width, height, title)
    inks = [RANK[i % len(RANK)] for i in range(groups)]
    room = width - side * num_tokens - 2.4
    top, bottom = height - 0.95, 0.8
    for head in range(heads):
        x = 0.5 + room * (head + 0.5) / heads
        group = head // share
        centre = 0.5 + room * (group + 0.5) / groups
        ax.plot((centre, x), (bottom + 0.2, top - 0.2), color=inks[group], lw=2.5, zorder=1)
        _box(ax, x, top, 0.5, 0.4, f"q{head}", inks[group])
    for group in range(groups):
        centre = 0.5 + room * (group + 0.5) / groups
        _box(ax, centre, bottom, 0.85, 0.4, f"k{group}  v{group}", inks[group])
    pen.text(ax, 0.5 + room / 2, top + 0.42, f"{heads} query heads", color=MUTED, ha="center")
    text = f"{groups} key/value heads"
    pen.text(ax, 0.5 + room / 2, bottom - 0.42, text, color=MUTED, ha="center")
    corner = width - 0.3 - side * num_tokens, 0.62
    for query in range(num_tokens):
        for key in range(num_tokens):
            at = corner[0] + side * key, corner[1] + side * (num_tokens - 1 - query)
            ink = KIND["backward"] if key == query else KIND["forward" if key < query else "idle"]
            pen.rectangle(ax, *at, side - 0.03, side - 0.03, fc=ink)
    middle = side * num_tokens / 2
    pen.text(ax, corner[0] + middle, 0.42, "looks at token 0, 1, 2 …", color=MUTED, ha="center")
    for query in range(num_tokens):
        y = corner[1] + side * (num_tokens - 0.5 - query) - 0.02
        pen.text(ax, corner[0] - 0.1, y, f"token {query}", color=MUTED, ha="right", size=8)
    return figure


def _box(ax: Axes, x: float, y: float, width: float, height: float, name: str, ink: str) -> None:
    """Draw a box around (x, y), its name inside."""
    corner, style = (x - width / 2, y - height / 2), {"fc": ink, "ec": PAPER, "lw": 1.2}
    pen.rounded(ax, *corner, width, height, 0.06, **style, zorder=2)
    pen.text(ax, x, y - 0.01, name, color=pen.ink_on(ink), ha="center", weight="bold", zorder=3)
