"""Which plan when? The figure in book/strategies.md: `python -m minipar.lab.guide`.

The planner is asked for each model, number of GPUs and network. Plans that differ by less than the
planner's error are ties: the simplest of them is drawn, with the number of ties, and with the time
that FSDP alone would take. No number in the figure is typed in.
"""

from collections.abc import Mapping, Sequence
from functools import partial

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
Found = Mapping[tuple[str, str, int], Search]  # by network, model, and number of GPUs


def ask(
    models: Sequence[str] = MODELS,
    gpus: Sequence[int] = GPUS,
    networks: Sequence[str] = (*NETWORKS,),
) -> dict[tuple[str, str, int], Search]:
    """Ask the planner for 512 sequences of 8,192 tokens a step, one at a time on a GPU."""
    found = {}
    for network in networks:
        for model in models:
            base = planner.base_of(PlanConfig(model=model, hardware=network, seq=8192))
            for n in gpus:
                found[network, model, n] = planner.search(base, n, 512, ASKED)
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
    networks, models, gpus = (list(dict.fromkeys(key[i] for key in found)) for i in range(3))
    left, gap, pitch, wide = 0.95, 0.3, 1.02, 1.5
    width = left + len(networks) * (len(gpus) * wide + gap)
    height = 1.15 + pitch * len(models) + 0.62
    title = "Which plan when: data parallel over a fast network; over a slow one, tp and pp, too"
    note = (
        "predicted by minipar plan: Llama 3 on nodes of 8 H100, 512 sequences of 8,192 tokens, "
        f"cp=1, 1F1B, microbatches of one; the simplest plan within {NEAR - 1:.0%} of the fastest"
    )
    figure, ax = pen.sheet(width, height, title, note)
    for i, network in enumerate(networks):
        x = left + i * (len(gpus) * wide + gap)
        pen.text(ax, x, height - 0.62, NETWORKS.get(network, network), size=10, weight="bold")
        for k, n in enumerate(gpus):
            pen.text(ax, x + k * wide, height - 0.92, f"{n} GPUs", color=pen.MUTED)
            for j, model in enumerate(models):
                _box(
                    ax, x + k * wide, height - 1.5 - j * pitch, wide - 0.1, found[network, model, n]
                )
    for j, model in enumerate(models):
        name = model.rpartition("-")[2].upper()
        pen.text(ax, 0.15, height - 1.33 - j * pitch, name, size=11, weight="bold")
    pen.key(figure, [(pen.colour(axis), text) for axis, text in CUTS.items()], left, 0.32, width)
    return figure


def _box(ax: Axes, x: float, y: float, wide: float, found: Search) -> None:
    """Draw a strip for each axis of the plan, and below it the rest; or why there is none."""
    ranked = simplest(found)
    small = {"size": 8, "color": pen.MUTED}
    if ranked is None:
        least = found.smallest()
        needs, limit = least.held, footprint.room(least.job.machine.device)
        pen.rectangle(ax, x, y, wide, 0.34, fc=pen.KIND["idle"])
        pen.text(ax, x + wide / 2, y + 0.17, "does not fit", ha="center", color=pen.MUTED)
        pen.text(ax, x, y - 0.12, f"needs {needs / 1e9:.0f} GB a GPU,", **small)
        pen.text(ax, x, y - 0.27, f"may fill {limit / 1e9:.0f}", **small)
        return
    plan = ranked.job.plan
    axes = [axis for axis in CUTS if getattr(plan, axis) > 1]
    for i, axis in enumerate(axes):
        ink, start = pen.colour(axis), x + i * wide / len(axes)
        pen.rectangle(ax, start, y, wide / len(axes), 0.34, fc=ink + "70", ec=pen.PAPER, lw=1.2)
        middle = start + wide / len(axes) / 2
        pen.text(ax, middle, y + 0.17, f"{axis} {getattr(plan, axis)}", ha="center", size=8.5)
    rest = [f"ZeRO {plan.zero}"] * (plan.zero > 0)
    if plan.checkpointing != "none":
        rest.append(f"recomputes {'all' if plan.checkpointing == 'full' else 'half'}")
    best, alone, others = found.best(), fsdp_alone(found), len(meshes(ties(found))) - 1
    cost = f"{alone.step / best.step - 1:+.0%}" if alone else "does not fit"
    tied = f"{others} tie{'s' * (others != 1)}"
    lines = (f"MFU {ranked.mfu(False):.0%}, {tied}", f"FSDP alone: {cost}", ", ".join(rest))
    for i, line in enumerate(lines):
        pen.text(ax, x, y - 0.12 - 0.15 * i, line, **small)


if __name__ == "__main__":
    print(pen.save(guide(ask()), OUT))
