"""Choosing a plan: a calculator, and where the rest of a step goes.

    calculator("llama-3-8b", "dp=8,tp=8", tokens=8192)    # memory, a step, MFU: a Figure
    draw.bars(losses(calculate("llama-3-8b", "dp=8,tp=8")))  # from the peak down to the step

All numbers are the planner's closed form (`minipar.sim.cost`); nothing is measured here.
"""

from collections.abc import Iterable
from dataclasses import replace

from matplotlib.figure import Figure

from minipar.lab.draw import bars, pen
from minipar.parallel.plan import Plan
from minipar.sim import cost, footprint, planner
from minipar.sim.hardware import OF_CEILING
from minipar.sim.planner import PlanConfig, Ranked

ENDLESS = 1e30  # bytes/s


# ---------------------------------------------------------------------- the calculator
def calculate(
    model: str = "llama-3-8b",
    plan: str = "dp=8,tp=8",
    tokens: int = 8192,
    recompute: str = "none",
    link: str = "h100-ndr",
) -> Ranked:
    """Return the time and memory of a plan by part; the plan says how many GPUs there are.

    Words are those of `minipar plan`: a model, a plan, tokens of a sequence, recomputation
    (none, selective or full), and a machine with its network. Raises `ValueError`, in one line, for
    unknown words and plans that cannot be.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: use 1 or more")
    parsed = Plan.parse(plan if recompute == "none" else f"{plan},checkpointing={recompute}")
    batch = parsed.dp * parsed.ep * parsed.microbatches
    asked = PlanConfig(model, parsed.num_ranks, link, tokens, batch, explain=str(parsed))
    return planner.answer(asked)[1][0]


def calculator(
    model: str = "llama-3-8b",
    plan: str = "dp=8,tp=8",
    tokens: int = 8192,
    recompute: str = "none",
    link: str = "h100-ndr",
) -> Figure:
    """Draw the parts of memory and of a step; arguments and errors are as in `calculate`."""
    found = calculate(model, plan, tokens, recompute, link)
    limit = footprint.room(found.job.machine.device)
    of_limit = {part: 100 * num_bytes / limit for part, num_bytes in found.memory.items()}
    of_step = {part: 100 * s / found.step for part, s in found.seconds.items() if s}
    published = f"at least 90 % of published runs lie within {100 * planner.ERROR:.0f} %"
    verb = "fits" if found.held <= limit else "does not fit"
    return bars(
        {f"memory, of {limit / 1e9:.0f} GB": of_limit, f"a step of {found.step:.2f} s": of_step},
        unit="%",
        colours={"bubble": pen.MUTED, "fixed": pen.INK},
        title=f"{model}: {found.mfu(False):.0%} MFU, needs {found.held / 1e9:.0f} GB; it {verb}",
        note=f"predicted; {planner.unchecked(found.job) or published}",
    )


# ---------------------------------------------------------------------- where the rest goes
def where_time_goes(plans: Iterable[Ranked]) -> dict[str, dict[str, float]]:
    """Return the parts of each plan's step that can be seen, by a short name of the plan."""
    shown = {}
    for place, r in enumerate(plans, 1):
        axes = " ".join(f"{axis}{getattr(r.job.plan, axis)}" for axis in r.family)
        name = f"{place}: {axes} zero{r.job.plan.zero}"
        shown[name] = {part: s for part, s in r.seconds.items() if s > 0.002 * r.step}
    return shown


def losses(found: Ranked) -> dict[str, float]:
    """Return the seconds of a step at the peak, then what each shortcoming adds, in this order.

    The machine is made ideal, and gets its shortcomings back one after the other. All seconds
    together are the step. Seconds that belong to two shortcomings count with the first. The FLOPs
    at the peak are those that are needed, without the masked half of attention.
    """
    job, device = found.job, found.job.machine.device
    before = found.mfu(True) * found.step
    free = dict(bandwidth=ENDLESS, latency=0.0, launch=0.0)
    networks = {name: replace(getattr(job.machine, name), **free) for name in ("inside", "between")}
    peak = {job.dtype: device.peak[job.dtype] / OF_CEILING}
    ideal = {
        "products below the peak": dict(ceiling=peak, tile=1, processors=1, launch=0),
        "attention below the peak": dict(
            attention_forward=1, attention_backward=1, attention_half=0
        ),
        "moving bytes": dict(memory_bandwidth=ENDLESS),
    }
    prompt = dict(host=0.0, host_tp=0.0, host_across=0.0, fixed=0.0)
    added = {"FLOPs at the peak": before}
    for i, name in enumerate(["computed again, uneven stages", *ideal]):
        left = {key: v for part in list(ideal)[i:] for key, v in ideal[part].items()}
        software = replace(job.software, **prompt, exposed=0.0)
        if "attention_half" in left:
            software = replace(software, attention=1.0)
        machine = replace(job.machine, device=replace(device, **left), **networks)
        seconds = cost.seconds(replace(job, machine=machine, software=software))
        now = sum(v for part, v in seconds.items() if part not in ("bubble", *cost.AXES))
        added[name], before = now - before, now
    talking = cost.seconds(replace(job, software=replace(job.software, **prompt)))
    added |= {axis: talking[axis] for axis in cost.AXES if talking[axis]}
    added["the pipeline's bubble"] = found.seconds["bubble"]
    added["host, once a step"] = found.step - sum(added.values())
    return added
