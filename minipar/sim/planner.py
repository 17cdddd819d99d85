"""Rank the plans to train a model on a machine, by the time that a step would take.

Idea.   `candidates` lists every mesh, with ZeRO stages, microbatches, recomputation and the usual
        schedules. A plan must fit into memory with headroom (`footprint.memory`) and be legal
        (`Plan.problem`, which alone decides this); `cost.seconds` ranks the rest. The best plans
        are also traced and replayed (`simulate`). The replay orders them, where our code stands for
        the software (`replayed`). The best plan of each other *family* says why it lost.
Error.  90 % of published runs that nothing was fitted to are within `ERROR` (`validate.py`). Plans
        that differ by less are equal. `unchecked` names what a plan has, but no such run.
Source. Zheng et al. 2022 (Alpa, arXiv 2201.12023) and Isaev et al. 2023 (Calculon) search likewise.
"""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

from minipar.parallel.plan import MESH, Plan, meshes
from minipar.sim import cost, footprint, hardware
from minipar.sim.asked import PlanConfig, base_of, explained, fixed
from minipar.sim.job import Job
from minipar.sim.replay import shorter, simulate
from minipar.sim.validate import ERROR, unchecked
from minipar.text import aligned

CAN: dict[str, dict[str, tuple]] = {
    "nanotron": {"zero": (0, 1), "schedule": ("1f1b",), "cp": (1,), "ep": (1,)},
    "llm-foundry": {"zero": (2, 3), "tp": (1,), "pp": (1,), "cp": (1,), "ep": (1,)},
    **dict.fromkeys(("megatron", "megatron-core"), {"zero": (0, 1)}),
}
"""Values of a plan's words that software can carry out, where it cannot carry out all."""
STAGES_PER_RANK = (2, 3, 5, 8)
"""Stages per rank of the interleaved pipelines that are searched, as published runs had them."""
UNEVEN = 1.15
"""Stages are too uneven if the longest, times their number, exceeds all layers by this factor."""
REPLAYED = ("any", "minipar")  # software for which minipar's own code stands
PRICED = {"dispatch": ("all_to_all", "paired"), "context": ("ring",)}
NEAR = 1 + ERROR
"""Plans that take at most this many times as long as the fastest are ties: see `ERROR`."""
GB = 1e9
Watch = Callable[[Iterable], Iterable]  # shows the progress of an iteration
Wanted = Callable[["Ranked"], bool]


class NothingFits(ValueError):
    """No plan fits; the message has a change that would help, if one is known."""

    exit_code = 3


@dataclass(frozen=True)
class Ranked:
    """A plan with its time and memory by part."""

    job: Job
    seconds: dict[str, float]
    memory: dict[str, float]
    replayed: float = 0.0  # seconds of minipar's own code, traced and replayed; 0: it was not
    traced_bytes: float = 0.0  # at the peak of that trace

    @property
    def step(self) -> float:
        """Seconds of a step in closed form."""
        return sum(self.seconds.values())

    @property
    def expected(self) -> float:
        """Seconds of a step: by the replay, where our code stands for the software."""
        return (self.job.software.name in REPLAYED and self.replayed) or self.step

    @property
    def held(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.job.tokens_of_step / self.step / self.job.plan.num_ranks

    def mfu(self, causal: bool) -> float:
        """Return the share of the peak, with the whole square of attention or its causal half."""
        return self.job.ideal(causal) / self.step

    @property
    def family(self) -> tuple[str, ...]:
        """The axes that it uses."""
        return tuple(axis for axis in MESH if getattr(self.job.plan, axis) > 1) or ("dp",)

    def needs(self) -> str:
        """Return the memory it takes beside the limit, in words."""
        most, limit = max(self.memory, key=self.memory.get), footprint.room(self.job.machine.device)
        room = f"{self.held / GB:.1f} of {limit / GB:.1f} GB"
        return f"needs {room}, {self.memory[most] / GB:.1f} of them {most}"

    def __str__(self) -> str:
        return f"{self.job.plan},microbatch={self.job.microbatch}"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `--json`: seconds, bytes, and shares."""
        why, plan = unchecked(self.job), asdict(self.job.plan) | {"microbatch": self.job.microbatch}
        times = {"step_seconds": self.step, "replayed_seconds": self.replayed or None}
        rates = {"tokens_per_second_per_gpu": self.tokens_per_second, "mfu": self.mfu(False)}
        rates |= {"mfu_causal": self.mfu(True), "error": None if why else ERROR, "unchecked": why}
        parts = {"seconds": self.seconds, "memory": self.memory, "flags": flags(self.job)}
        return {"plan": plan, **times, **rates, **parts}


# ---------------------------------------------------------------------- search
def candidates(
    base: Job, gpus: int, global_batch: int, fix: dict[str, Any] | None = None
) -> Iterator[Job]:
    """Yield plans for `gpus` devices that share out `global_batch` sequences, legal or not.

    All have the words of `fix`, and values that the software can carry out. Words that are not
    varied here are as in the plan of `base`; the machine sets the precision.
    """
    fix, can = fix or {}, CAN.get(base.software.name, {}) if gpus > 1 else {}
    given = {k: v for k, v in fix.items() if k not in ("microbatch", "precision")}
    base, moe = replace(base, plan=replace(base.plan, **given)), base.config.moe

    def is_asked(**words: Any) -> bool:
        return all(fix.get(k, v) == v and v in can.get(k, [v]) for k, v in words.items())

    for sizes in meshes(gpus):
        pp, tp, cp, ep = (sizes[axis] for axis in ("pp", "tp", "cp", "ep"))
        dp = sizes["dp"] * ep
        if global_batch % dp or not is_asked(**sizes, precision=base.plan.precision):
            continue
        if pp > base.config.num_layers or tp > base.config.num_heads:
            continue
        if ep > 1 and (moe is None or moe.num_experts % ep):
            continue
        mine = global_batch // dp
        is_sized = fix.keys() & {"microbatch", "microbatches"}
        tried = range(1, mine + 1) if is_sized else (1, 2, 4, 8, 16, 32)
        zeros = (0, 1, 2, 3) if dp * cp > 1 else (0,)
        if pp > 1 and "zero" not in fix:
            zeros = zeros[:2]  # ZeRO 2 and 3 would reduce once per microbatch
        again = ("none", "selective", "full")
        # Ranks of tp have copies of whole experts, a part of each expert, or experts of their own.
        shares = ((False, False), (True, False), (False, True))
        shares = shares if moe is not None and tp > 1 else shares[:1]
        micros = [n for n in tried if mine % n == 0]
        every = itertools.product(micros, zeros, _orders(base, pp, fix), again, shares)
        for micro, zero, (schedule, stages), recompute, (cut, over_tp) in every:
            words = sizes | dict(
                zero=zero, schedule=schedule, stages_per_rank=stages, checkpointing=recompute,
                microbatches=mine // micro, experts_over_tp=over_tp, expert_tensor_parallel=cut,
                sequence_parallel=tp > 1 and fix.get("sequence_parallel", True),
            )  # fmt: skip
            if is_asked(**words, microbatch=micro):
                yield replace(base, plan=replace(base.plan, **words), microbatch=micro)


def _orders(base: Job, pp: int, fix: Collection[str]) -> list[tuple[str, int]]:
    """Return schedules for a pipeline with their stages per rank; 0: the schedule's default."""
    if pp == 1:
        return [("1f1b", 0)]
    own = ["zb_h1"] * (base.software.name == "minipar")
    # Short stages wait for the longest, as if all stages had as many layers.
    layers, counts = base.config.num_layers, {v: v * pp for v in STAGES_PER_RANK}
    stages = [v for v, n in counts.items() if math.ceil(layers / n) * n <= UNEVEN * layers]
    stages = [base.plan.stages_per_rank] if "stages_per_rank" in fix else stages
    found = [(name, base.plan.stages_per_rank) for name in ("1f1b", *own, base.plan.schedule)]
    return [*dict.fromkeys(found + [("interleaved_1f1b", v) for v in stages])]


_problem = cache(Plan.problem)  # a search asks for the same plan several times


def problem(job: Job) -> str | None:
    """Return the rule that a plan breaks; None if it breaks none."""
    return _problem(job.plan, job.config)


@dataclass(frozen=True)
class Search:
    """All candidates, sorted: those that fit by time, those that do not by memory."""

    fit: list[Ranked]
    too_large: list[Ranked]

    def legal(self) -> Iterator[Ranked]:
        """Yield the legal plans among those that fit, the fastest first."""
        return (ranked for ranked in self.fit if problem(ranked.job) is None)

    def best(self, wanted: Wanted = lambda _: True) -> Ranked | None:
        """Return the fastest legal plan among those that fit and are wanted."""
        return next((r for r in self.fit if wanted(r) and problem(r.job) is None), None)

    def smallest(self, wanted: Wanted = lambda _: True) -> Ranked | None:
        """Return the smallest legal plan among those that do not fit and are wanted."""
        return next((r for r in self.too_large if wanted(r) and problem(r.job) is None), None)

    def top(self, count: int) -> list[Ranked]:
        """Return the fastest legal plans, one per mesh and ZeRO stage."""
        found: dict[tuple, Ranked] = {}
        for ranked in self.legal():
            plan = ranked.job.plan
            found.setdefault((*(getattr(plan, axis) for axis in MESH), plan.zero), ranked)
            if len(found) == count:
                break
        return list(found.values())


def search(
    base: Job, gpus: int, global_batch: int, fix: dict[str, Any] | None = None, watch: Watch = iter
) -> Search:
    """Rank all candidates by the closed form; `watch` may show how far it is."""
    limit, fit, too_large = footprint.room(base.machine.device), [], []
    for job in watch(list(candidates(base, gpus, global_batch, fix))):
        held = footprint.memory(job)
        if sum(held.values()) > limit:
            too_large.append(Ranked(job, {}, held))
        else:
            fit.append(Ranked(job, cost.seconds(job), held))
    fit.sort(key=lambda ranked: ranked.step)
    too_large.sort(key=lambda ranked: ranked.held)
    return Search(fit, too_large)


def ties(found: Search) -> list[Ranked]:
    """Return the legal plans within the error of the fastest; none if nothing fits."""
    best = found.best()
    return [*itertools.takewhile(lambda r: r.step <= NEAR * best.step, found.legal())]


def complexity(ranked: Ranked, free: int = 1) -> tuple:
    """Return a key, the least for the simplest plan: tp in a node, few axes beside dp, no cp.

    Then the least ZeRO; stages up to `free` count as equal, as stage 1 sends no more than stage 0.
    Then no recomputation, then the fastest.
    """
    plan, axes = ranked.job.plan, [axis for axis in ranked.family if axis != "dp"]
    apart = plan.tp > ranked.job.machine.gpus, len(axes), plan.cp > 1, max(free, plan.zero)
    return *apart, plan.checkpointing != "none", ranked.step


# ---------------------------------------------------------------------- replay
def replayed(ranked: Ranked) -> Ranked:
    """Return the plan with the time and memory of minipar's own code, or as it is if untraceable.

    A few microbatches are replayed. The closed form extends their time to the whole step. Other
    software's selective recomputation repeats more and keeps less: our code does not stand for it.
    """
    if ranked.job.plan.checkpointing == "selective" and ranked.job.software.name != "minipar":
        return ranked
    short = shorter(ranked.job)
    try:
        found = simulate(short)
    except ValueError:
        return ranked
    # Our code copies less under ZeRO 3 than software="any". The replay is of our code, so the
    # closed form beside the replay has our copies.
    own = replace(short.software, copies=hardware.software("minipar").copies)
    closed = sum(cost.seconds(replace(short, software=own)).values())
    seconds = ranked.step * (found.seconds + short.software.fixed) / closed
    return replace(ranked, replayed=seconds, traced_bytes=found.peak_bytes)


# ---------------------------------------------------------------------- words
def flags(job: Job) -> dict[str, str]:
    """Return flags of the plan to paste; for torchtitan 0.3.0, degrees only."""
    plan, batch = job.plan, job.dp * job.plan.microbatches * job.microbatch
    degrees = {
        "data_parallel_shard": job.dp if plan.zero else 1,  # it has no ZeRO 1, but ZeRO 2
        "data_parallel_replicate": 1 if plan.zero else job.dp,
        "tensor_parallel": plan.tp,
        "context_parallel": plan.cp,
        "pipeline_parallel": plan.pp,
        "expert_parallel": plan.ep,
    }
    words = [f"--parallelism.{name}_degree {n}" for name, n in degrees.items() if n > 1]
    own = f"--plan {plan} --batch-size {batch} --seq-len {job.seq_len}"
    return {"minipar train": own, "torchtitan": " ".join(words)}


def reasons(found: Search, best: Ranked, fix: Collection[str] = ()) -> list[str]:
    """Return, for each choice of the best plan, how the best plan without this choice compares.

    Another value of a choice (tp=4 in the place of tp=2, not tp=1) may cost less: see the ranking.
    """
    lines = []
    names = *(axis for axis in MESH if axis != "dp"), "expert_tensor_parallel", "experts_over_tp"
    for name in (*names, "zero", "checkpointing", "schedule"):
        word, plain = attrgetter(f"job.plan.{name}"), getattr(Plan, name)
        if word(best) != plain and name not in fix:
            without = lost(found, best, lambda r, word=word, plain=plain: word(r) == plain)
            lines.append(f"{name}={word(best)}: with {name}={plain}, {without}")
    return lines


def lost(found: Search, best: Ranked | None, wanted: Wanted) -> str:
    """Return in one line why the best of the wanted plans is not the best of all, if any is."""
    if other := found.best(wanted):
        more = {part: s - best.seconds.get(part, 0.0) for part, s in other.seconds.items()}
        part = (max if other.step >= best.step else min)(more, key=more.__getitem__)
        return (
            f"{other} takes {other.step / best.step - 1:+.0%}: {other.seconds[part]:.2f} s of "
            f"{part} instead of {best.seconds.get(part, 0):.2f}"
        )
    if other := found.smallest(wanted):
        return f"nothing fits: {other} {other.needs()}"
    refused = next((r for r in (*found.fit, *found.too_large) if wanted(r)), None)
    return f"no plan is legal: {problem(refused.job)}" if refused else "there is no such plan"


def table(plans: Sequence[Ranked], simple: Ranked | None = None) -> str:
    """Return a table of plans, a line each, and the errors that it names; a star marks `simple`."""
    head = ("", "step", "replay", "error", "tokens/s/GPU", "MFU", "causal", "memory", "bubble")
    lines = [(*head, "exposed", "plan")]
    known: dict[str, list[Job]] = {}
    for place, r in enumerate(plans, 1):
        error = "?" if unchecked(r.job) else f"{ERROR:.0%}"
        known.setdefault(error, []).append(r.job)
        exposed = [f"{axis} {r.seconds[axis]:.2f}" for axis in cost.AXES if r.seconds[axis] > 5e-3]
        lines.append((
            f"{place}{'*' * (r is simple)}", f"{r.step:.2f} s",
            f"{r.replayed:.2f} s" if r.replayed else "-", error, f"{r.tokens_per_second:,.0f}",
            f"{r.mfu(False):.0%}", f"{r.mfu(True):.0%}", f"{r.held / GB:.0f} GB",
            f"{r.seconds['bubble'] / r.step:.0%}", ", ".join(exposed) or "-", str(r),
        ))  # fmt: skip
    within = f"90 % of published runs, and more, are within {ERROR:.0%}"
    notes = [f"  error {error}: {unchecked(*jobs) or within}" for error, jobs in known.items()]
    if simple is not None:
        is_known = not unchecked(plans[0].job, simple.job)
        so = "and so equal: take it" if is_known else "whose errors are not known: time both"
        notes.append(f"  *: the simplest plan that is within {ERROR:.0%} of the first, {so}")
    return "\n".join([*aligned(lines), *notes])


# ---------------------------------------------------------------------- the command
def answer(config: PlanConfig, watch: Watch = iter) -> tuple[str, list[Ranked]]:
    """Return the text to print, and the plans to draw.

    Raises `ValueError` for a question without an answer, `NothingFits` if nothing fits.
    """
    base = base_of(config)
    if config.explain:
        job = explained(base, config)
        ranked = Ranked(job, cost.seconds(job), footprint.memory(job))
        text = f"{table([ranked])}\n\n{_by_part(ranked)}"
        return (json.dumps(ranked.as_dict()) if config.json else text), [ranked]
    fix = fixed(config.fix)
    found = search(base, config.gpus, config.global_batch, fix, watch)
    best = found.top(config.top)
    if not best:
        raise NothingFits(_nothing_fits(config, base, found))
    if (simple := min(ties(found), key=complexity)) not in best:
        best.append(simple)
    if config.replay:
        best = [replayed(ranked) for ranked in watch(best)]
    best.sort(key=lambda ranked: ranked.expected)
    # The replay may show that a plan is slower than in closed form.
    simple = min((r for r in best if r.expected <= NEAR * best[0].expected), key=complexity)
    losers = {
        " x ".join(family): lost(found, simple, lambda r, family=family: r.family == family)
        for family in dict.fromkeys(r.family for r in (*found.fit, *found.too_large))
        if family != simple.family
    }
    why = reasons(found, simple, fix)
    if config.json:
        plans = [ranked.as_dict() for ranked in best]
        text = {"plans": plans, "simplest": simple.as_dict(), "others": losers, "why": why}
        return json.dumps(text), best[:6]
    parts = [
        f"{config.model} on {config.gpus} x {base.machine.name}, {base.seq_len:,} tokens, "
        f"{config.global_batch} sequences a step",
        table(best, simple),
        "The simplest, by part:\n" + _by_part(simple),
        "Why:\n" + "\n".join(f"  {line}" for line in why),
        "Others:\n" + "\n".join(f"  {family}: {line}" for family, line in losers.items()),
        "To paste:\n" + "\n".join(f"  {name}: {text}" for name, text in flags(simple.job).items()),
        "Only --fix varies tp_overlap, context, dispatch and most schedules.",
    ]
    return "\n\n".join(part for part in parts if not part.endswith(":\n")), best[:6]


def _by_part(ranked: Ranked) -> str:
    plan, limit = ranked.job.plan, footprint.room(ranked.job.machine.device)
    seconds = [f"{part} {s:.2f}" for part, s in ranked.seconds.items() if s >= 5e-3]
    held = [f"{part} {b / GB:.1f}" for part, b in ranked.memory.items() if b >= 0.05 * GB]
    lines = [f"  seconds: {', '.join(seconds)}", f"  GB: {', '.join(held)}"]
    if ranked.held > limit:
        lines.append(f"  It does not fit: it {ranked.needs()}")
    if ranked.replayed:
        fits = "fits" if ranked.traced_bytes <= limit else "does not fit; try --software minipar"
        lines.append(
            f"  minipar's own code, traced and replayed: {ranked.replayed:.2f} s, "
            f"{ranked.traced_bytes / GB:.1f} of {limit / GB:.1f} GB: {fits}"
        )
    for word, priced in PRICED.items():
        if (own := getattr(plan, word)) not in priced:
            lines.append(f"  The closed form does not price {word}={own}: its numbers are without.")
    return "\n".join(lines)


def _nothing_fits(config: PlanConfig, base: Job, found: Search) -> str:
    """Return why nothing fits, and a number of devices that would help."""
    why = lost(found, None, lambda _: True)
    if found.smallest() is None:
        return f"for these --gpus, --global-batch, --software and --fix, {why}"
    tried = (config.gpus * 2**n for n in range(1, 7))
    asked = config.global_batch, fixed(config.fix)
    enough = next((n for n in tried if search(base, n, *asked).best()), None)
    change = f"--gpus {enough} would do" if enough else "64 times as many would not do either"
    return f"{why}; {change}"
