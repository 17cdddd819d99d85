"""Pictures of floating-point numbers: their bits, and where tensors lie in a format's range."""

import math
from collections.abc import Mapping

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from minipar.lab.draw import pen
from minipar.lab.draw.pen import EXPOSED, KIND, MUTED, SERIES

FORMATS = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}
"""Floating-point formats by the names that people use."""

_EXPONENT_BITS = dict(zip(FORMATS.values(), (8, 8, 5, 4, 5), strict=True))
_PARTS = {"sign": MUTED, "exponent: the range": SERIES[1], "fraction: the digits": KIND["forward"]}


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest number above zero that `dtype` can hold, subnormal ones included."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def bits_of(value: float, dtype: torch.dtype) -> str:
    """Return the bits of `value` in `dtype`, the sign first: ``bits_of(1.0, torch.bfloat16)``."""
    stored = torch.tensor([value]).to(dtype).view(torch.uint8).tolist()
    return "".join(f"{byte:08b}" for byte in reversed(stored))


def bits(value: float, *, title: str = "") -> Figure:
    """Draw one number in all `FORMATS`: a row of bits for each, and the number that is stored."""
    ax, cell, row = pen.paper(), 0.19, 0.46  # inches
    inks = list(_PARTS.values())
    for i, (name, dtype) in enumerate(FORMATS.items()):
        pen.text(ax, -0.14, 0.15 - row * i, name, ha="right")
        word = bits_of(value, dtype)
        for k, bit in enumerate(word):
            ink = inks[0 if k == 0 else 1 if k <= _EXPONENT_BITS[dtype] else 2]
            pen.cell(ax, (cell * k, -row * i, cell - 0.025, 0.3), bit, ink)
        stored = torch.tensor(value).to(dtype).double().item()
        end = cell * len(word) + 0.1
        pen.text(ax, end, 0.145 - row * i, f"= {stored:.10g}", color=MUTED)
    return pen.cut(ax, title, legend=[(ink, part) for part, ink in _PARTS.items()])


def magnitudes(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    name: str,
    title: str = "",
    note: str = "",
    exponents: tuple[int, int] | None = None,
) -> Figure:
    """Draw where the absolute values of `tensors` lie in the range of `dtype`, as histograms.

    One bar per power of two; what would round to zero or overflow is red, and stands as a share of
    all values that are not zero. `exponents` are the first and last power of two that are shown.
    """
    info, low = torch.finfo(dtype), smallest(dtype)
    # Half a step above the largest number, rounding gives infinity (or NaN, for e4m3).
    overflow = info.max + 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2
    flat = {word: tensor.detach().double().abs().flatten() for word, tensor in tensors.items()}
    sizes = {word: values[(values > 0) & values.isfinite()] for word, values in flat.items()}
    if exponents is None:
        every = torch.cat([*sizes.values(), torch.tensor([low, info.max], dtype=torch.float64)])
        exponents = math.floor(every.min().log2()), math.ceil(every.max().log2())
    first, last = exponents
    width, row, left, right = 8.4, 0.78, 1.55, 1.3
    figure = pen.figure(width, 1.48 + row * len(sizes), title, note)
    ax = pen.panel(figure, left, 0.68, width - left - right, row * len(sizes))
    ax.set(xlim=(first, last + 1), ylim=(1 - len(sizes), 1), yticks=[])
    _zones(ax, info, low, name)
    beside = {"transform": ax.get_yaxis_transform()}
    for i, (word, values) in enumerate(sizes.items()):
        powers = values.log2().floor().long()
        shown, counts = powers.unique(return_counts=True)
        # Halfway between zero and the smallest number, the tie goes to zero.
        too_small, too_large = values <= low / 2, values > overflow
        kept = {*powers[~(too_small | too_large)].tolist()}
        inks = [KIND["backward"] if power in kept else EXPOSED for power in shown.tolist()]
        tall = 0.86 * counts.numpy() / counts.max().item()
        ax.bar(shown.numpy() + 0.5, tall, 0.88, bottom=-i, color=inks, zorder=3)
        ax.axhline(-i, color=pen.GRID, lw=0.8, zorder=2)
        pen.text(ax, -0.015, 0.3 - i, word, ha="right", **beside)
        for y, mask, what in ((0.44, too_small, "to zero"), (0.16, too_large, "overflow")):
            part = mask.double().mean().item()
            share = f"{part:.1%}" if part >= 5e-4 else "under 0.1%" if part else "none"
            style = {"color": EXPOSED if part >= 5e-4 else MUTED, "size": 8, **beside}
            pen.text(ax, 1.015, y - i, f"{share} {what}", **style)
    step = 10 if last - first > 24 else 5
    ticks = [k for k in range(first, last + 2) if k % step == 0]
    ax.set_xticks(ticks, [f"$2^{{{k}}}$" for k in ticks])
    pen.label(ax, "absolute value")
    return figure


def _zones(ax: Axes, info: torch.finfo, low: float, name: str) -> None:
    """Draw the range of the format in the background, with a name above each part."""
    first, last = ax.get_xlim()
    normal, top = math.log2(info.smallest_normal), math.log2(info.max)
    style = {"transform": ax.get_xaxis_transform(), "ha": "center", "size": 8, "color": MUTED}
    for lo, hi, fill, word in (
        (math.log2(low), normal, KIND["idle"], "fewer digits"),
        (normal, top, KIND["compute"], f"all digits of {name}"),
    ):
        lo, hi = max(lo, first), min(hi, last)
        if lo < hi:
            ax.axvspan(lo, hi, color=fill, alpha=0.55, lw=0, zorder=0)
            pen.text(ax, (lo + hi) / 2, 1.04, word, **style)
