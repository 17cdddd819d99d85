"""Pictures of the model: where data flows, how positions turn, which heads share.

Each is a plain function of a `LlamaConfig`, drawn by the same pen.
"""

import math

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
    ax, count = pen.paper(), parameters(config)
    layers, line, branch, end = config.num_layers, 1.95, 0.98, pen.WIDTH
    once = 2 if config.tie_embeddings else 1
    embedding = f"{count['embedding'] * once // 2:,}"
    pen.rounded(ax, 1.95, 0.42, 5.15, 1.95, 0.1, fc=KIND["idle"], lw=0)
    pen.text(ax, 2.07, 2.22, f"a layer, {layers} times", color=MUTED)
    pen.arrow(ax, (0.45, line), (end - 0.66, line), 13, color=INK, lw=2.6, zorder=1)
    pen.text(ax, 0.18, line, "[T]")
    pen.text(ax, end - 0.6, line, "[T, V]")
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
    total = f"numbers under the boxes: parameters, {config.num_parameters:,} in all"
    return pen.cut(ax, "One stream from byte to prediction; each layer adds to it twice", total)


def _part(ax: Axes, x: float, y: float, width: float, name: str, part: str, below: str) -> None:
    """Draw a box around (x, y) in the colour of `part`, its parameters below."""
    _box(ax, x, y, width, 0.42, name, PARTS[part])
    pen.text(ax, x, y - 0.35, below, color=MUTED, ha="center", size=8, zorder=3)


def rotations(config: LlamaConfig) -> Figure:
    """Draw RoPE on a head: a dial per pair of coordinates (row) and position (column)."""
    turns = rope_frequencies(config).tolist()
    ax, cell, radius = pen.paper(), 0.78, 0.31  # inches
    pairs, positions = [0, 2, 4, len(turns) - 1], range(8)
    for row, pair in enumerate(pairs):
        y = -cell * row
        pen.text(ax, -1.37, y + 0.08, f"pair {pair}", weight="bold")
        pen.text(ax, -1.37, y - 0.12, f"{_degrees(turns[pair])} per token", color=MUTED)
        for position in positions:
            # A clock hand starts on the right and turns against the clock.
            x, angle = cell * (position + 0.5), position * turns[pair]
            ax.add_patch(Circle((x, y), radius, fc=KIND["idle"], lw=0))
            rest = math.degrees(angle) % 360
            ax.add_patch(Wedge((x, y), radius, 0, rest, fc=KIND["forward"], lw=0))
            hand = [x, x + radius * math.cos(angle)], [y, y + radius * math.sin(angle)]
            ax.plot(*hand, color=KIND["backward"], lw=2.2, solid_capstyle="round")
            ax.add_patch(Circle((x, y), 0.03, fc=KIND["backward"], lw=0, zorder=3))
    for position in positions:
        at = cell * (position + 0.5), -cell * len(pairs) + 0.3
        pen.text(ax, *at, f"t = {position}", color=MUTED, ha="center")
    fast, slow = (_degrees(turns[i]) for i in (pairs[0], pairs[-1]))
    return pen.cut(ax, f"Pair {pairs[0]} turns by {fast} per token, pair {pairs[-1]} by {slow}")


def _degrees(angle: float) -> str:
    return f"{math.degrees(angle):.2g}°"


def attention(config: LlamaConfig) -> Figure:
    """Draw which query heads share a key/value head, and which tokens a token may look at."""
    ax, heads, groups, tokens = pen.paper(), config.num_heads, config.num_kv_heads, 8
    side, share, top = 0.26, heads // groups, 1.6  # inches of a cell of the mask; heads per group
    room = pen.WIDTH - 2.4 - side * tokens
    for head in range(heads):
        x, group = room * (head + 0.5) / heads, head // share
        centre, ink = room * (group + 0.5) / groups, RANK[group % len(RANK)]
        ax.plot((centre, x), (0.6, top - 0.2), color=ink, lw=2.5, zorder=1)
        _box(ax, x, top, 0.5, 0.4, f"q{head}", ink)
        if head % share == 0:
            _box(ax, centre, 0.4, 0.85, 0.4, f"k{group}  v{group}", ink)
    for y, text in ((top + 0.42, f"{heads} query"), (0, f"{groups} key/value")):
        pen.text(ax, room / 2, y, f"{text} heads", color=MUTED, ha="center")
    left = room + 1.6
    for query in range(tokens):
        y = 0.2 + side * (tokens - 1 - query)
        for key in range(tokens):
            ink = KIND["backward"] if key == query else KIND["forward" if key < query else "idle"]
            pen.rectangle(ax, left + side * key, y, side - 0.03, side - 0.03, fc=ink)
        style = {"color": MUTED, "ha": "right", "size": 8}
        pen.text(ax, left - 0.1, y + side / 2 - 0.02, f"token {query}", **style)
    pen.text(ax, left + side * tokens / 2, 0, "looks at token 0, 1, 2 …", color=MUTED, ha="center")
    title = f"{share} query heads share one key/value head; no token sees a later one"
    return pen.cut(ax, title)


def _box(ax: Axes, x: float, y: float, width: float, height: float, name: str, ink: str) -> None:
    """Draw a box around (x, y), its name inside."""
    box, style = (x - width / 2, y - height / 2, width, height), {"ec": PAPER, "lw": 1.2}
    pen.cell(ax, box, name, ink, 9, "bold", radius=0.06, zorder=2, **style)
