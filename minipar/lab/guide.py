"""Which plan when? The figure in book/strategies.md: `python -m minipar.lab.guide`.

The planner is asked for each model, number of GPUs and network. Plans that differ by less than the
planner's error are ties: the simplest of them is drawn, with the number of ties, and with the time
that FSDP alone would take. No number in the figure is typed in.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.sim import footprint, planner
from minipar.sim.planner import NEAR, PlanConfig, Ranked, Search, complexity, ties

OUT = "notebooks/assets/guide.png"
MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3-405b")
GPUS = (8, 64, 512)
NETWORKS = {
    "h100-ndr": "InfiniBand, 400 Gb/s for each GPU",
    "h100-100gbe": "Ethernet, 100 Gb/s for each node",
}
ASKED = {"cp": 1, "microbatch": 1, "schedule": "1f1b"}
CUTS = {"dp": "dp: other sequences", "tp": "tp: a part of each matrix", "pp": "pp: other layers"}
PALE = "70"  # of 255: the opacity of a strip
Found = dict[tuple[str, str, int], Search]  # by network, model, and number of GPUs


def ask() -> Found:
    """Ask the planner for 512 sequences of 8,192 tokens a step, one at a time on a GPU."""
    found = {}
    for network, model in product(NETWORKS, MODELS):
        base = planner.base_of(PlanConfig(model=model, hardware=network, seq=8192))
        found |= {(network, model, n): planner.search(base, n, 512, ASKED) for n in GPUS}
    return found


def simplest(found: Search) -> Ranked | None:
    """Return the simplest of the ties, with the least ZeRO; None if nothing fits."""
    return min(ties(found), key=partial(complexity, free=0), default=None)


def meshes(plans: Sequence[Ranked]) -> set[tuple[int, ...]]:
    """Return the different sizes of axes among plans."""
    return {tuple(getattr(r.job.plan, axis) for axis in CUTS) for r in plans}


def fsdp_alone(found: Search) -> Ranked | None:
    """Return the fastest plan that shards everything over dp, with no other axis."""
    return found.best(lambda r: r.job.plan.zero == 3 and r.family == ("dp",))


def guide(found: Found) -> Figure:
    """Draw a box for each model and number of GPUs, the networks side by side."""
    ax, pitch, wide = pen.paper(), 1.02, 1.5
    for i, (network, name) in enumerate(NETWORKS.items()):
        x = 0.8 + i * (len(GPUS) * wide + 0.3)
        pen.text(ax, x, 1.0, name, size=10, weight="bold")
        for k, n in enumerate(GPUS):
            pen.text(ax, x + k * wide, 0.7, f"{n} GPUs", color=pen.MUTED)
            for j, model in enumerate(MODELS):
                _box(ax, x + k * wide, 0.12 - j * pitch, wide - 0.1, found[network, model, n])
    for j, model in enumerate(MODELS):
        name = model.rpartition("-")[2].upper()
        pen.text(ax, 0, 0.29 - j * pitch, name, size=11, weight="bold")
    title = "Which plan when: data parallel over a fast network; over a slow one, tp and pp, too"
    note = (
        f"predicted by minipar plan, the simplest within {NEAR - 1:.0%} of the fastest: 8 H100 a "
        "node, 512 sequences of 8,192 tokens, cp=1, 1F1B, microbatches of one"
    )
    legend = [(pen.colour(axis) + PALE, text) for axis, text in CUTS.items()]
    return pen.cut(ax, title, note, legend)


def _box(ax: Axes, x: float, y: float, wide: float, found: Search) -> None:
    """Draw a strip for each axis of the plan, and below it the rest; or why there is none."""
    ranked = simplest(found)
    if ranked is None:
        least = found.smallest()
        needs, limit = least.held / 1e9, footprint.room(least.job.machine.device) / 1e9
        parts = {"does not fit": pen.KIND["idle"]}
        lines = f"needs {needs:.0f} GB a GPU,", f"may fill {limit:.0f}"
    else:
        plan, best, alone = ranked.job.plan, found.best(), fsdp_alone(found)
        sizes = {axis: getattr(plan, axis) for axis in CUTS}
        parts = {f"{a} {n}": pen.colour(a) + PALE for a, n in sizes.items() if n > 1}
        rest = [f"ZeRO {plan.zero}"] * (plan.zero > 0)
        if plan.checkpointing != "none":
            rest.append(f"recomputes {'all' if plan.checkpointing == 'full' else 'half'}")
        cost = f"{alone.step / best.step - 1:+.0%}" if alone else "does not fit"
        tied = f"ties: {len(meshes(ties(found))) - 1}"
        lines = f"MFU {ranked.mfu(False):.0%}, {tied}", f"FSDP alone: {cost}", ", ".join(rest)
    each = wide / len(parts)
    for i, (said, fill) in enumerate(parts.items()):
        pen.rectangle(ax, x + i * each, y, each, 0.34, fc=fill, ec=pen.PAPER, lw=1.2)
        pen.text(ax, x + (i + 0.5) * each, y + 0.17, said, ha="center", size=8.5)
    for i, line in enumerate(lines):
        pen.text(ax, x, y - 0.12 - 0.15 * i, line, size=8, color=pen.MUTED)


if __name__ == "__main__":
    print(pen.save(guide(ask()), OUT))
