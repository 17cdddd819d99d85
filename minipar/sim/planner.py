"""Which plan? Ways to train a model on a machine, ranked by the time that each would take.

Idea.   `candidates` lists every mesh, with ZeRO stages, microbatches, recomputation and the usual
        schedules; a plan must hold in memory with headroom (`footprint.memory`) and be legal
        (`Plan.problem`, the one source of what is); `cost.seconds` ranks what is left. Other words
        of a plan are as `--fix` has them, or as usual. For each *family*, the axes that a plan
        uses, the best plan that lost says why; and so does, for each choice of the best plan, the
        best plan without it.
Error.  `ERROR` is what 90 % of published runs stay within (`validate.py`, runs that nothing was
        fitted to): plans that are nearer to each other than that are not told apart. Of plans that
        are like none of these runs, `unchecked` says so instead.
Source. Zheng et al. 2022 (Alpa, arXiv 2201.12023) and Isaev et al. 2023 (Calculon) search likewise.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from minipar.model.llama import LlamaConfig
from minipar.parallel.plan import MESH, Plan, meshes
from minipar.sim import cost, footprint, hardware
from minipar.sim.asked import PlanConfig, base_of, fixed, read_plan
from minipar.sim.pasted import flags
from minipar.sim.replay import Simulated, replay
from minipar.sim.trace import trace
from minipar.text import aligned

ERROR = 0.15
"""Relative error of the step time that 90 % of published runs, and more, stay within."""
RUNS_ON = ("a100", "a100-40", "h100")
RUNS_OF = ("any", "nanotron", "llm-foundry", "compiled", "megatron")
RUNS_IN = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")
"""Devices, software and pipelines of the published runs that predictions were compared with."""
NOT_VARIED = (
    "Only --fix varies tp_overlap, context, dispatch, experts_over_cp, stages_per_rank, "
    "compression and most schedules."
)
GB = 1e9


def unchecked(*jobs: cost.Job) -> str:
    """Say that no published run is like these plans, and in what; "" where `ERROR` holds."""
    kinds: dict[str, None] = {}
    for job in jobs:
        plan, device = job.plan, job.machine.device.name
        found = {
            f"on {device}": device not in RUNS_ON,
            f"software={job.software.name}": job.software.name not in RUNS_OF,
            job.dtype: job.dtype not in ("bf16", "fp16"),
            "experts": job.config.moe is not None,
            "cp": plan.cp > 1,
            "zero=2": plan.zero == 2,
            "zero=3 with pp": plan.zero == 3 and plan.pp > 1,
            "tp over nodes": plan.tp > job.machine.gpus,
            "tp_overlap": plan.tp_overlap,
            f"schedule={plan.schedule}": plan.schedule not in RUNS_IN,
            "fewer microbatches than ranks of pp": plan.microbatches < plan.pp,
        }
        kinds |= {kind: None for kind, is_so in found.items() if is_so}
    return f"no published run of this kind was checked: {', '.join(kinds)}" if kinds else ""


def error_of(*jobs: cost.Job) -> str:
    """Say how good predicted step times of these plans are."""
    return unchecked(*jobs) or f"90 % of published runs, and more, are within {ERROR:.0%}"


class NothingFits(ValueError):
    """No plan does; the message has the cheapest change that would."""

    exit_code = 3


@dataclass(frozen=True)
class Ranked:
    """A plan with its time and memory by part."""

    job: cost.Job
    seconds: dict[str, float]
    memory: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Per device."""
        return self.job.tokens_of_step / self.step / self.job.plan.num_ranks

    def mfu(self, causal: bool) -> float:
        """Return the share of the peak, with the whole square of attention or what is causal."""
        job = self.job
        flops = job.config.flops_per_token(job.seq_len, causal)
        return flops * self.tokens_per_second / job.machine.device.peak[job.dtype]

    @property
    def held(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def largest(self) -> str:
        """The category with the most memory."""
        return max(self.memory, key=self.memory.__getitem__)

    def needs(self, limit: float) -> str:
        """Say how much memory it takes beside what there is."""
        largest = f"{self.memory[self.largest] / GB:.0f} of them {self.largest}"
        return f"needs {of_room(self.held, limit)}, {largest}"

    @property
    def family(self) -> tuple[str, ...]:
        """The axes that it uses."""
        return tuple(axis for axis in MESH if getattr(self.job.plan, axis) > 1) or ("dp",)

    def __str__(self) -> str:
        return f"{self.job.plan},microbatch={self.job.microbatch}"

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints: seconds, bytes, and shares."""
        given = {"step_seconds": self.step, "tokens_per_second_per_gpu": self.tokens_per_second}
        given |= {"mfu": self.mfu(False), "mfu_causal": self.mfu(True)}
        given |= {"error": None if unchecked(self.job) else ERROR, "unchecked": unchecked(self.job)}
        parts = {"seconds": self.seconds, "memory": self.memory, "flags": flags(self.job)}
        own = replace(self.job, software=hardware.software("minipar"))
        given["minipar_bytes"] = sum(footprint.memory(own).values())  # with `minipar train`
        plan = asdict(self.job.plan) | {"microbatch": self.job.microbatch}
        return {"plan": plan, **given, **parts}


# ---------------------------------------------------------------------- search
def candidates(
    base: cost.Job, gpus: int, global_batch: int, fix: Collection[str] = ()
) -> Iterator[cost.Job]:
    """Yield plans for `gpus` devices that share out `global_batch` sequences, legal or not.

    Words in `fix` are as in the plan of `base`, where they are not varied anyway.
    """
    for sizes in meshes(gpus):
        pp, tp, ep = sizes["pp"], sizes["tp"], sizes["ep"]
        dp, moe = sizes["dp"] * ep, base.config.moe
        if global_batch % dp or pp > base.config.num_layers or tp > base.config.num_heads:
            continue
        if ep > 1 and (moe is None or moe.num_experts % ep):
            continue
        mine = global_batch // dp
        group = dp * sizes["cp"]
        tried = {1, 2, 4, 8, 16, 32, base.microbatch}
        if "microbatches" in fix:
            tried.add(max(1, mine // max(1, base.plan.microbatches)))
        micros = [n for n in sorted(tried) if mine % n == 0]
        zeros, schedules = (0, 1, 2, 3) if group > 1 else (0,), ["1f1b"]
        if pp > 1:
            if "zero" not in fix:
                zeros = zeros[:2]  # ZeRO 2 and 3 would reduce once per microbatch
            own = ["zb_h1"] * (base.software.name == "minipar")
            schedules = dict.fromkeys(["1f1b", "interleaved_1f1b", *own, base.plan.schedule])
        sequence = tp > 1 and ("sequence_parallel" not in fix or base.plan.sequence_parallel)
        again = ("none", "selective", "full")
        # Of whole experts ranks of tp have copies; or a part of each; or experts of their own.
        shares = ((False, False), (True, False), (False, True))
        shares = shares if moe is not None and tp > 1 else shares[:1]
        every = itertools.product(micros, zeros, schedules, again, shares)
        for micro, zero, schedule, recompute, (cut, over_tp) in every:
            plan = replace(
                base.plan, **sizes, zero=zero, schedule=schedule, microbatches=mine // micro,
                checkpointing=recompute, sequence_parallel=sequence, expert_tensor_parallel=cut,
                experts_over_tp=over_tp,
                dispatch=base.plan.dispatch if ep > 1 or over_tp else "all_to_all",
            )  # fmt: skip
            yield replace(base, plan=plan, microbatch=micro)


def problem(job: cost.Job) -> str | None:
    """Say why a plan cannot be; None if it can."""
    return _problem(job.plan, job.config)


@cache
def _problem(plan: Plan, config: LlamaConfig) -> str | None:
    return plan.problem(config)


@dataclass(frozen=True)
class Search:
    """All candidates, sorted: those that fit by time, those that do not by memory."""

    limit: float
    fit: list[Ranked]
    too_large: list[Ranked]

    def best(self, wanted: Callable[[Ranked], bool] = lambda _: True) -> Ranked | None:
        """Return the fastest legal plan among those that fit and are wanted."""
        return next((r for r in self.fit if wanted(r) and problem(r.job) is None), None)

    def smallest(self, wanted: Callable[[Ranked], bool] = lambda _: True) -> Ranked | None:
        """Return the smallest legal plan among those that do not fit and are wanted."""
        return next((r for r in self.too_large if wanted(r) and problem(r.job) is None), None)

    def top(self, count: int) -> list[Ranked]:
        """Return the fastest legal plans, one per mesh and ZeRO stage."""
        found: dict[tuple, Ranked] = {}
        for ranked in self.fit:
            plan = ranked.job.plan
            key = (*(getattr(plan, axis) for axis in MESH), plan.zero)
            if len(found) < count and key not in found and problem(ranked.job) is None:
                found[key] = ranked
        return list(found.values())


def search(
    base: cost.Job,
    gpus: int,
    global_batch: int,
    fix: dict[str, Any] | None = None,
    watch: Callable[[Iterable], Iterable] = iter,
) -> Search:
    """Rank all candidates; `watch` may show how far it is."""
    limit = footprint.room(base.machine.device)
    fit, too_large = [], []
    fix = fix or {}
    # Candidates take from `base` what they do not vary; the precision is the machine's.
    given = {k: v for k, v in fix.items() if k not in ("microbatch", "precision")}
    plan = replace(base.plan, **given)
    base = replace(base, plan=plan, microbatch=fix.get("microbatch", base.microbatch))
    jobs = [j for j in candidates(base, gpus, global_batch, fix) if _has(j, fix)]
    for job in watch(jobs):
        held = footprint.memory(job)
        if sum(held.values()) > limit:
            too_large.append(Ranked(job, {}, held))
        else:
            fit.append(Ranked(job, cost.seconds(job), held))
    fit.sort(key=lambda ranked: ranked.step)
    too_large.sort(key=lambda ranked: ranked.held)
    return Search(limit, fit, too_large)


def _has(job: cost.Job, fix: dict[str, Any]) -> bool:
    given = {"microbatch": job.microbatch}
    return all(given.get(k, getattr(job.plan, k, None)) == v for k, v in fix.items())


# ---------------------------------------------------------------------- words
def of_room(held: float, limit: float) -> str:
    """Say how many GB of a device's are taken, in as many digits as tell the two apart."""
    pairs = ((f"{held / GB:.{n}f}", f"{limit / GB:.{n}f}") for n in range(4))
    taken, room = next((pair for pair in pairs if pair[0] != pair[1]), ("all", f"{limit / GB:.0f}"))
    return f"{taken} of {room} GB"


def reasons(found: Search, best: Ranked, fix: Collection[str] = ()) -> list[str]:
    """Say of each choice of the best plan what the best plan with it switched off would pay.

    Another value of a choice (tp=4 in the place of tp=2, not tp=1) may cost less: see the ranking.
    """
    lines, job, plan, machine = [], best.job, best.job.plan, best.job.machine
    names = *(axis for axis in MESH if axis != "dp"), "expert_tensor_parallel", "experts_over_tp"
    for name in (*names, "zero", "checkpointing", "schedule"):
        own, plain = getattr(plan, name), getattr(Plan, name)

        def is_plain(ranked: Ranked, name: str = name, plain: Any = plain) -> bool:
            return getattr(ranked.job.plan, name) == plain

        if own != plain and name not in fix:
            lines.append(f"{name}={own}: with {name}={plain}, {lost(found, best, is_plain)}")
    if plan.ep > 1 and plan.dispatch == "all_to_all":
        words = ["dispatch=halves"]
        if not job.software.per_node:
            nodes = job.spread(job.experts_apart, job.experts_over)
            words.append(f"dispatch=hierarchical,expert_nodes={nodes}")
        for word in words:
            other = replace(job, plan=Plan.parse(f"{plan},{word}"))
            if problem(other) is None:
                lines.append(
                    f"dispatch=all_to_all: with {word}, ep would be waited for "
                    f"{cost.seconds(other)['ep']:.2f} s instead of {best.seconds['ep']:.2f} "
                    f"(ask with --fix)"
                )
    if plan.tp <= machine.gpus < plan.num_ranks and plan.tp % 2 == 0:
        n = 2 * job.tokens * job.config.hidden_size
        times = [machine.seconds_of_collective("all_reduce", n, plan.tp, k) for k in (1, 2)]
        lines.append(
            f"tp stays inside a node: an all-reduce of a layer takes {times[0] * 1e3:.2f} ms "
            f"there, {times[1] * 1e3:.2f} ms over two"
        )
    return lines


def lost(found: Search, best: Ranked, wanted: Callable[[Ranked], bool]) -> str:
    """Say in one line why the best of the wanted plans is not the best of all."""
    if other := found.best(wanted):
        worse = {part: s - best.seconds.get(part, 0.0) for part, s in other.seconds.items()}
        part = max(worse, key=worse.__getitem__)
        return (
            f"{other} is {other.step / best.step - 1:.0%} slower: "
            f"{other.seconds[part]:.2f} s of {part} instead of {best.seconds.get(part, 0):.2f}"
        )
    if other := found.smallest(wanted):
        return f"nothing fits: {other} {other.needs(found.limit)}"
    refused = next((r for r in (*found.fit, *found.too_large) if wanted(r)), None)
    return f"no plan is legal: {problem(refused.job)}" if refused else "there is no such plan"


def table(plans: Iterable[Ranked]) -> str:
    """Return a table of plans, a line each, and below it what it says of their errors."""
    head = ("", "step", "error", "tokens/s/GPU", "MFU", "causal", "memory", "bubble", "exposed")
    lines = [(*head, "plan")]
    known: dict[str, list[cost.Job]] = {}
    for place, r in enumerate(plans, 1):
        error = "?" if unchecked(r.job) else f"{ERROR:.0%}"
        known.setdefault(error, []).append(r.job)
        exposed = [f"{axis} {r.seconds[axis]:.2f}" for axis in cost.AXES if r.seconds[axis] > 5e-3]
        lines.append((
            str(place), f"{r.step:.2f} s", error,
            f"{r.tokens_per_second:,.0f}", f"{r.mfu(False):.0%}", f"{r.mfu(True):.0%}",
            f"{r.held / GB:.0f} GB", f"{r.seconds['bubble'] / r.step:.0%}",
            ", ".join(exposed) or "-", str(r),
        ))  # fmt: skip
    notes = [f"  error {error}: {error_of(*jobs)}" for error, jobs in known.items()]
    return "\n".join([*aligned(lines), *notes])


def where_time_goes(plans: Iterable[Ranked]) -> dict[str, dict[str, float]]:
    """Return the parts of each plan's step that can be seen, by a short name of the plan."""
    shown = {}
    for place, r in enumerate(plans, 1):
        axes = " ".join(f"{axis}{getattr(r.job.plan, axis)}" for axis in r.family)
        name = f"{place}: {axes} zero{r.job.plan.zero}"
        shown[name] = {part: s for part, s in r.seconds.items() if s > 0.002 * r.step}
    return shown


# ---------------------------------------------------------------------- the command
def answer(
    config: PlanConfig, watch: Callable[[Iterable], Iterable] = iter
) -> tuple[str, list[Ranked]]:
    """Return what to print, and the plans to draw.

    Raises `ValueError` for what cannot be asked, and `NothingFits` with a change that would.
    """
    base = base_of(config)
    if config.explain and config.fix:
        raise ValueError(
            f"--fix {config.fix} is of a search, and --explain has one plan; leave out one of them"
        )
    if config.explain:
        ranked = _explained(base, config)
        return (json.dumps(ranked.as_dict()) if config.json else explain(ranked)), [ranked]
    fix = fixed(config.fix)
    found = search(base, config.gpus, config.global_batch, fix, watch)
    best = found.top(config.top)
    if not best:
        raise NothingFits(_nothing_fits(config, base, found))
    first = best[0]
    losers = {
        " x ".join(family): lost(found, first, lambda r, family=family: r.family == family)
        for family in dict.fromkeys(r.family for r in (*found.fit, *found.too_large))
        if family != first.family
    }
    if config.json:
        plans = {"plans": [ranked.as_dict() for ranked in best], "others": losers}
        return json.dumps(plans | {"why": reasons(found, first, fix)}), best[:5]
    parts = [
        f"{config.model} on {config.gpus} x {base.machine.name}, {base.seq_len:,} tokens, "
        f"{config.global_batch} sequences a step",
        table(best),
        "The best, by part:\n" + _by_part(first),
        "Why:\n" + "\n".join(f"  {line}" for line in reasons(found, first, fix)),
        "Others:\n" + "\n".join(f"  {family}: {why}" for family, why in losers.items()),
        "To paste:\n" + "\n".join(f"  {name}: {text}" for name, text in flags(first.job).items()),
        NOT_VARIED,
    ]
    return "\n\n".join(part for part in parts if not part.endswith(":\n")), best[:5]


def _by_part(ranked: Ranked) -> str:
    seconds = [f"{part} {s:.2f}" for part, s in ranked.seconds.items() if s >= 5e-3]
    held = [f"{part} {b / GB:.1f}" for part, b in ranked.memory.items() if b >= 0.05 * GB]
    lines = [f"  seconds: {', '.join(seconds)}", f"  GB: {', '.join(held)}"]
    if (how := ranked.job.plan.compression) != "none":
        lines.append(
            f"  The closed form does not price compression={how}: its numbers are without."
        )
    return "\n".join(lines)


def explain(ranked: Ranked) -> str:
    """Say all about one plan."""
    text = f"{table([ranked])}\n\n{_by_part(ranked)}"
    limit = footprint.room(ranked.job.machine.device)
    if ranked.held > limit:
        text += f"\n  It does not fit: {of_room(ranked.held, limit)}, most of it {ranked.largest}"
    return text


def simulate(ranked: Ranked) -> Simulated:
    """Trace minipar's own code under a plan, and replay it on the machine: no closed form.

    What no trace tells, hosts and the efficiency of attention in training, is the software's.
    Raises `ValueError` for a plan that cannot be traced.
    """
    job = ranked.job
    traces = trace(
        job.config, job.plan, sequences=job.microbatch, seq_len=job.seq_len, experts=job.experts
    )
    return replay(traces, job.machine, host=cost.host(job), attention=job.software.attention)


def as_minipar(ranked: Ranked) -> str:
    """Say what a plan takes when minipar's own code runs it: its time and its memory.

    Traced and replayed whole, with what software loses once in a step; of a long pipeline, so many
    microbatches that its memory is full.
    """
    job, plan = ranked.job, ranked.job.plan
    limit = footprint.room(job.machine.device)
    some = min(plan.microbatches, 4 * plan.pp) if plan.pp > 1 else plan.microbatches
    shorter = replace(ranked, job=replace(job, plan=replace(plan, microbatches=some)))
    try:
        simulated = simulate(shorter)
    except ValueError as error:
        return f"not traced: {error}"
    seconds = simulated.seconds + job.software.fixed
    time = f"{seconds:.2f} s"
    if some < plan.microbatches:
        time += f" for {some} of {plan.microbatches} microbatches"
    closed = sum(cost.seconds(shorter.job).values())
    time += f" ({seconds / closed - 1:+.0%} of the closed form)"
    fits = simulated.peak_bytes <= limit
    memory = f"{simulated.peak_bytes / GB:.0f} GB: {'fits' if fits else 'does not fit'}"
    more = "" if fits or job.software.name == "minipar" else "; ask again with --software minipar"
    return f"{time}, {memory} in {limit / GB:.0f} GB{more}"


def _explained(base: cost.Job, config: PlanConfig) -> Ranked:
    plan, microbatch, names = read_plan(config.explain, "--explain")
    own = base.plan.precision
    if "precision" in names and plan.precision != own:
        raise ValueError(
            f"--explain precision={plan.precision}: {base.machine.name} is priced in {own} alone; "
            f"use precision={own}, or leave it out"
        )
    plan = replace(plan, precision=own)
    plan.check(base.config)
    job = replace(base, plan=plan)
    count = job.dp * plan.microbatches
    if plan.num_ranks != config.gpus or config.global_batch % count:
        raise ValueError(
            f"--explain {plan}: it has {plan.num_ranks} ranks and {count} microbatches; use "
            f"--gpus {plan.num_ranks} and a --global-batch that these divide"
        )
    job = replace(job, microbatch=config.global_batch // count)
    if microbatch and microbatch != job.microbatch:
        raise ValueError(
            f"--explain {plan},microbatch={microbatch}: in {count} microbatches that is a batch of "
            f"{count * microbatch}; use --global-batch {count * microbatch}, or microbatch="
            f"{job.microbatch}"
        )
    return Ranked(job, cost.seconds(job), footprint.memory(job))


def _nothing_fits(config: PlanConfig, base: cost.Job, found: Search) -> str:
    """Say why nothing does, and the cheapest change that would help."""
    fix = fixed(config.fix)
    if (small := found.smallest()) is None:
        some = next(iter(found.too_large or found.fit), None)
        if some:
            why = problem(some.job) + (f", with --fix {config.fix}" if fix else "")
        else:  # without --fix there is cp alone, which divides no batch
            why = (
                f"no candidate has --fix {config.fix}; pp is at most {base.config.num_layers} and "
                f"tp {base.config.num_heads}, dp x ep x microbatch divides --global-batch "
                f"{config.global_batch}, and the precision is {base.plan.precision}"
            )
        return f"no legal plan for {config.gpus} devices: {why}"
    needs = f"nothing fits: the smallest plan, {small}, {small.needs(found.limit)}"
    if fix and search(base, config.gpus, config.global_batch).best():
        return f"{needs}; without --fix {config.fix} something does"
    for factor in (2, 4, 8, 16, 32, 64):
        if search(base, config.gpus * factor, config.global_batch, fix).best():
            return f"{needs}; --gpus {config.gpus * factor} would do"
        if base.seq_len % factor == 0:
            shorter = replace(base, seq_len=base.seq_len // factor)
            if search(shorter, config.gpus, config.global_batch, fix).best():
                return f"{needs}; --seq {shorter.seq_len} would do"
    return f"{needs}; no 64 times as many devices would do"
