"""Which plan? Every legal way to train a model on a machine, ranked by the time that it would take.

Idea.   `candidates` lists meshes, ZeRO stages, microbatches, recomputation and schedules; a plan
        must hold in memory with headroom (`cost.memory`) and be legal (`Plan.problem`, the one
        source of what is); `cost.seconds` ranks what is left. For each *family*, the axes that a
        plan uses, the best plan that lost says why; and so does, for each choice of the best plan,
        the best plan without it.
Error.  `ERROR` is what 90 % of published runs stay within (`validate.py`, runs that nothing was
        fitted to): plans that are nearer to each other than that are not told apart.
Source. Zheng et al. 2022 (Alpa, arXiv 2201.12023) and Isaev et al. 2023 (Calculon) search likewise.
"""

import difflib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from minipar.comm.mesh import whole_number
from minipar.model import hf
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.plan import MESH, Plan, meshes
from minipar.sim import cost, hardware
from minipar.sim.replay import Simulated, replay
from minipar.sim.trace import trace

ERROR = 0.15
"""Relative error of the step time that 90 % of published runs stay within."""
GB = 1e9
LARGER = {
    "llama-3-70b": dict(hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64),
    "llama-3-405b": dict(
        hidden_size=16_384, intermediate_size=53_248, num_layers=126, num_heads=128
    ),
    "mixtral-8x7b": dict(vocab_size=32_000, moe=MoEConfig(8, 2, 14_336), max_seq_len=32_768),
}
"""What llama-3-8b differs from these in."""
WHAT_IF = {  # what may be changed, its unit, and where it is
    "nic": (1e9 / 8, "Gb/s of a device's share of the network", "between", "bandwidth"),
    "nvlink": (1e9, "GB/s of a device inside a node", "inside", "bandwidth"),
    "memory": (1e9, "GB of a device", "device", "memory"),
    "gpus": (1, "devices of a node", "", "gpus"),
}


class NothingFits(ValueError):
    """No plan does; the message has the cheapest change that would."""


@dataclass(frozen=True)
class PlanConfig:
    """Rank the plans to train a model on machines that one need not have."""

    model: str = "llama-3-8b"
    """A name, a config.json, or a Hugging Face folder."""
    gpus: int = 8
    """Devices in all."""
    hardware: str = "h100-ndr"
    """A machine's name, or a .toml file of `minipar calibrate`."""
    seq: int = 0
    """Tokens of a sequence; 0: as many as the model can see, 8192 at most."""
    global_batch: int = 512
    """Sequences of a step."""
    software: str = "any"
    """Whose habits are assumed: any, minipar, megatron, nanotron or llm-foundry."""
    top: int = 5
    """Plans to show."""
    fix: str = ""
    """Only plans such as tp=8,zero=1; microbatch is one of the words."""
    what_if: str = ""
    """Change the machine: nic=200 (Gb/s), nvlink=450 (GB/s), memory=141 (GB), gpus=72 (a node)."""
    explain: str = ""
    """Say all about one plan, such as dp=8,tp=8,zero=1,microbatches=4, instead."""
    json: bool = False
    """Print JSON."""
    out: str = "plan.png"
    """Where to draw where the time of the best five goes; empty: nowhere."""


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
        job = self.job
        tokens = job.dp * job.plan.microbatches * job.microbatch * job.seq_len
        return tokens / self.step / job.plan.num_ranks

    def mfu(self, causal: bool) -> float:
        """Return the share of the peak, with the whole square of attention or what is causal."""
        job = self.job
        flops = job.config.flops_per_token(job.seq_len, causal)
        return flops * self.tokens_per_second / job.machine.device.peak[job.dtype]

    @property
    def largest(self) -> str:
        """The category with the most memory."""
        return max(self.memory, key=self.memory.__getitem__)

    @property
    def family(self) -> tuple[str, ...]:
        """The axes that it uses."""
        return tuple(axis for axis in MESH if getattr(self.job.plan, axis) > 1) or ("dp",)

    def __str__(self) -> str:
        return f"{self.job.plan},microbatch={self.job.microbatch}"

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints: seconds, bytes, and shares."""
        given = {"step_seconds": self.step, "tokens_per_second_per_gpu": self.tokens_per_second}
        given |= {"mfu": self.mfu(False), "mfu_causal": self.mfu(True), "error": ERROR}
        parts = {"seconds": self.seconds, "memory": self.memory, "flags": flags(self)}
        own = replace(self.job, software=hardware.software("minipar"))
        given["minipar_bytes"] = sum(cost.memory(own).values())  # with `minipar train`
        plan = asdict(self.job.plan) | {"microbatch": self.job.microbatch}
        return {"plan": plan, **given, **parts}


# ---------------------------------------------------------------------- what was asked
def model_config(name: str) -> LlamaConfig:
    """Return the shape of a model by its name, config.json or folder; raise `ValueError`."""
    if name in PRESETS:
        return PRESETS[name]
    if name in LARGER:
        return replace(PRESETS["llama-3-8b"], head_dim=128, **LARGER[name])
    path = Path(name)
    if path.exists():
        return hf.load_config(path.parent if path.is_file() else path)
    near = difflib.get_close_matches(name, [*PRESETS, *LARGER], 3, 0.0)
    raise ValueError(
        f"no model {name!r}: no such file, and the nearest names are {', '.join(near)}"
    )


def machine_of(config: PlanConfig) -> hardware.Machine:
    """Return the machine, changed as `--what-if` says. Raises `ValueError`."""
    machine = hardware.load(config.hardware)
    for word in filter(None, config.what_if.split(",")):
        key, _, value = word.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if key not in WHAT_IF or not 0 < number < 1e9 or (key == "gpus" and number % 1):
            known = ", ".join(f"{k} ({v[1]})" for k, v in WHAT_IF.items())
            raise ValueError(f"--what-if {word}: write name=number, above 0, of {known}")
        unit, _, where, name = WHAT_IF[key]
        if not where:
            machine = replace(machine, gpus=int(number))
        else:
            part = replace(getattr(machine, where), **{name: number * unit})
            machine = replace(machine, **{where: part})
    return machine


def fixed(text: str) -> dict[str, Any]:
    """Return what `--fix` names: words of a plan, and microbatch. Raises `ValueError`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    found = {}
    for word in [w for w in words if w.partition("=")[0] == "microbatch"]:
        found["microbatch"] = whole_number(word.partition("=")[2])
        if not found["microbatch"]:
            raise ValueError(f"--fix {word}: microbatch must be 1 or more")
        words.remove(word)
    plan = Plan.parse(",".join(words))
    return found | {w.partition("=")[0]: getattr(plan, w.partition("=")[0]) for w in words}


# ---------------------------------------------------------------------- search
def candidates(base: cost.Job, gpus: int, global_batch: int) -> Iterator[cost.Job]:
    """Yield plans for `gpus` devices that share out `global_batch` sequences, legal or not."""
    for sizes in meshes(gpus):
        pp, tp, ep = sizes["pp"], sizes["tp"], sizes.get("ep", 1)
        dp, moe = sizes["dp"] * ep, base.config.moe
        if global_batch % dp or pp > base.config.num_layers or tp > base.config.num_heads:
            continue
        if ep > 1 and (moe is None or moe.num_experts % ep):
            continue
        mine = global_batch // dp
        group = dp * sizes["cp"]
        micros = [n for n in (1, 2, 4, 8, 16, 32) if mine % n == 0]
        zeros = (0, 1, 2, 3) if group > 1 else (0,)
        if pp > 1:  # ZeRO 2 and 3 would reduce once per microbatch
            zeros = zeros[:2]
        schedules = ("1f1b", "interleaved_1f1b") if pp > 1 else ("1f1b",)
        if pp > 1 and base.software.name == "minipar":
            schedules += ("zb_h1",)
        again = ("none", "selective", "full")
        for micro, zero, schedule, recompute in itertools.product(micros, zeros, schedules, again):
            plan = replace(
                base.plan, **sizes, zero=zero, schedule=schedule, microbatches=mine // micro,
                checkpointing=recompute, sequence_parallel=tp > 1,
            )  # fmt: skip
            yield replace(base, plan=plan, microbatch=micro)


def problem(job: cost.Job) -> str | None:
    """Say why a plan cannot be; None if it can."""
    return _problem(job.plan, job.config) or (
        f"seq={job.seq_len} is not divided by 2 cp={2 * job.plan.cp}"
        if job.plan.cp > 1 and job.seq_len % (2 * job.plan.cp)
        else None
    )


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
    limit = cost.HEADROOM * base.machine.device.memory
    fit, too_large = [], []
    jobs = [j for j in candidates(base, gpus, global_batch) if _has(j, fix or {})]
    for job in watch(jobs):
        held = cost.memory(job)
        if sum(held.values()) > limit:
            too_large.append(Ranked(job, {}, held))
        else:
            fit.append(Ranked(job, cost.seconds(job), held))
    fit.sort(key=lambda ranked: ranked.step)
    too_large.sort(key=lambda ranked: sum(ranked.memory.values()))
    return Search(limit, fit, too_large)


def _has(job: cost.Job, fix: dict[str, Any]) -> bool:
    given = {"microbatch": job.microbatch}
    return all(given.get(k, getattr(job.plan, k, None)) == v for k, v in fix.items())


# ---------------------------------------------------------------------- words
def reasons(found: Search, best: Ranked, fix: Collection[str] = ()) -> list[str]:
    """Say of each choice of the best plan what the best plan without it would pay."""
    lines = []
    for name in (*(axis for axis in MESH if axis != "dp"), "zero", "checkpointing", "schedule"):
        own, plain = getattr(best.job.plan, name), getattr(Plan, name)
        if own != plain and name not in fix:
            wanted = partial(_is, name, plain)
            lines.append(f"{name}={own}: with {name}={plain}, {lost(found, best, wanted)}")
    nodes, machine = best.job.plan.num_ranks / best.job.machine.gpus, best.job.machine
    if 1 < best.job.plan.tp <= machine.gpus and nodes > 1:
        n = 2 * best.job.tokens * best.job.config.hidden_size
        times = [machine.seconds_of_collective("all_reduce", n, machine.gpus, k) for k in (1, 2)]
        lines.append(
            f"tp stays inside a node: an all-reduce of a layer takes {times[0] * 1e3:.2f} ms "
            f"there, {times[1] * 1e3:.2f} ms over two"
        )
    return lines


def _is(name: str, value: Any, ranked: Ranked) -> bool:
    return getattr(ranked.job.plan, name) == value


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
        needs = sum(other.memory.values())
        return (
            f"nothing fits: {other} needs {needs / GB:.0f} of {found.limit / GB:.0f} GB, "
            f"{other.memory[other.largest] / GB:.0f} of them {other.largest}"
        )
    refused = next((r for r in (*found.fit, *found.too_large) if wanted(r)), None)
    return f"no plan is legal: {problem(refused.job)}" if refused else "there is no such plan"


def flags(ranked: Ranked) -> dict[str, str]:
    """Return what to paste into the command lines of three projects.

    Where one has no ZeRO 1 or 2, the next stage that it has; without such a schedule, a word on it.
    """
    job, plan = ranked.job, ranked.job.plan
    batch = job.dp * plan.microbatches * job.microbatch
    ours = f"--plan {plan} --batch-size {batch} --seq-len {job.seq_len}"
    p, names = "--parallelism.", {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
    cut = ("shard", "replicate") if plan.zero else ("replicate", "shard")
    ep = getattr(plan, "ep", 1)
    titan = (
        f"--training.seq_len {job.seq_len} --training.global_batch_size {batch} "
        f"--training.local_batch_size {job.microbatch * (plan.microbatches if plan.pp > 1 else 1)} "
        f"{p}data_parallel_{cut[0]}_degree {job.dp} {p}data_parallel_{cut[1]}_degree 1 "
        f"{p}tensor_parallel_degree {plan.tp} {p}context_parallel_degree {plan.cp} "
        f"{p}pipeline_parallel_degree {plan.pp} --activation_checkpoint.mode {plan.checkpointing}"
    )
    megatron = (
        f"--tensor-model-parallel-size {plan.tp} --pipeline-model-parallel-size {plan.pp} "
        f"--context-parallel-size {plan.cp} --micro-batch-size {job.microbatch} "
        f"--global-batch-size {batch} --seq-length {job.seq_len}"
    )
    if plan.zero:
        titan += f" {p}fsdp_reshard_after_forward {'always' if plan.zero == 3 else 'never'}"
    if ep > 1:
        titan += f" {p}expert_parallel_degree {ep}"
        megatron += f" --expert-model-parallel-size {ep}"
    megatron += " --sequence-parallel" if plan.sequence_parallel else ""
    megatron += {0: "", 1: " --use-distributed-optimizer", 2: " --use-distributed-optimizer"}.get(
        plan.zero, " --use-torch-fsdp2"
    )
    if plan.checkpointing == "full":
        megatron += " --recompute-granularity full --recompute-method uniform"
        megatron += " --recompute-num-layers 1"
    elif plan.checkpointing == "selective":
        megatron += " --recompute-granularity selective"
    if plan.pp > 1:
        if plan.schedule not in names:
            none = f"has no schedule {plan.schedule}"
            return {"minipar train": ours, "torchtitan": none, "Megatron-LM": none}
        titan += f" {p}pipeline_parallel_schedule {names[plan.schedule]}"
        titan += f" {p}pipeline_parallel_microbatch_size {job.microbatch}"
        if plan.schedule == "interleaved_1f1b":
            megatron += f" --num-virtual-stages-per-pipeline-rank {job.chunks}"
    return {"minipar train": ours, "torchtitan": titan, "Megatron-LM": megatron}


def table(plans: Iterable[Ranked]) -> str:
    """Return a table of plans, a line each."""
    head = ("", "step", "tokens/s/GPU", "MFU", "causal", "memory", "bubble", "exposed", "plan")
    lines = [head]
    for place, r in enumerate(plans, 1):
        exposed = [f"{axis} {r.seconds[axis]:.2f}" for axis in cost.AXES if r.seconds[axis] > 5e-3]
        lines.append((
            str(place), f"{r.step:.2f} s", f"{r.tokens_per_second:,.0f}", f"{r.mfu(False):.0%}",
            f"{r.mfu(True):.0%}", f"{sum(r.memory.values()) / GB:.0f} GB",
            f"{r.seconds['bubble'] / r.step:.0%}", ", ".join(exposed) or "-", str(r),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def where_time_goes(plans: Iterable[Ranked]) -> dict[str, dict[str, float]]:
    """Return the parts of each plan's step that can be seen, by a short name of the plan."""
    shown = {}
    for place, r in enumerate(plans, 1):
        axes = " ".join(f"{axis}{getattr(r.job.plan, axis)}" for axis in r.family)
        name = f"{place}: {axes} zero{r.job.plan.zero}"
        shown[name] = {part: s for part, s in r.seconds.items() if s > 0.002 * r.step}
    return shown


# ---------------------------------------------------------------------- the command
def base_of(config: PlanConfig) -> cost.Job:
    """Return what all plans have in common. Raises `ValueError` for what cannot be asked."""
    for name in ("gpus", "global_batch", "top"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: use 1 or more")
    model = model_config(config.model)
    seq = config.seq or min(8192, model.max_seq_len)
    if not 1 <= seq <= model.max_seq_len:
        raise ValueError(f"--seq {seq}: {config.model} sees 1 to {model.max_seq_len:,} tokens")
    software = hardware.software(config.software)
    machine = machine_of(config)
    dtype = "bf16" if "bf16" in machine.device.peak else "fp16"
    plan = Plan(precision="bf16" if dtype == "bf16" else "fp16")
    return cost.Job(model, plan, machine, software, seq, dtype=dtype)


def answer(
    config: PlanConfig, watch: Callable[[Iterable], Iterable] = iter
) -> tuple[str, list[Ranked]]:
    """Return what to print, and the plans to draw.

    Raises `ValueError` for what cannot be asked, and `NothingFits` with a change that would.
    """
    base = base_of(config)
    if config.explain:
        ranked = _explained(base, config)
        return (json.dumps(ranked.as_dict()) if config.json else explain(ranked)), [ranked]
    fix = fixed(config.fix)
    found = search(base, config.gpus, config.global_batch, fix, watch)
    best = found.top(config.top)
    if not best:
        raise NothingFits(_nothing_fits(config, base, found))
    if config.json:
        return json.dumps([ranked.as_dict() for ranked in best]), best[:5]
    families: dict[tuple[str, ...], None] = {}
    for ranked in (*found.fit, *found.too_large):
        families.setdefault(ranked.family)
    losers = [
        f"  {' x '.join(family)}: {lost(found, best[0], lambda r, f=family: r.family == f)}"
        for family in families
        if family != best[0].family
    ]
    first = best[0]
    parts = [
        f"{config.model} on {config.gpus} x {base.machine.name}, {base.seq_len:,} tokens, "
        f"{config.global_batch} sequences a step; step times are good to {ERROR:.0%} "
        "(90 % of published runs)",
        table(best),
        "The best, by part:\n" + _by_part(first),
        "Why:\n" + "\n".join(f"  {line}" for line in reasons(found, first, fix)),
        "Others:\n" + "\n".join(losers),
        "To paste:\n" + "\n".join(f"  {name}: {text}" for name, text in flags(first).items()),
    ]
    return "\n\n".join(part for part in parts if not part.endswith(":\n")), best[:5]


def _by_part(ranked: Ranked) -> str:
    seconds = [f"{part} {s:.2f}" for part, s in ranked.seconds.items() if s >= 5e-3]
    held = [f"{part} {b / GB:.1f}" for part, b in ranked.memory.items() if b >= 0.05 * GB]
    return f"  seconds: {', '.join(seconds)}\n  GB: {', '.join(held)}"


def explain(ranked: Ranked) -> str:
    """Say all about one plan."""
    text = f"{table([ranked])}\n\n{_by_part(ranked)}"
    limit = cost.HEADROOM * ranked.job.machine.device.memory
    if (held := sum(ranked.memory.values())) > limit:
        text += f"\n  It does not fit: {held / GB:.0f} of {limit / GB:.0f} GB, most of it "
        text += ranked.largest
    return text


def simulate(ranked: Ranked) -> Simulated:
    """Trace minipar's own code under a plan, and replay it on the machine: no closed form."""
    job = ranked.job
    traces = trace(job.config, job.plan, sequences=job.microbatch, seq_len=job.seq_len)
    return replay(traces, job.machine, host=job.software.host)


def as_minipar(ranked: Ranked) -> str:
    """Say what a plan takes when minipar's own code runs it, in float32 and autocast.

    Traced and replayed whole; of a long pipeline, so many microbatches that its memory is full.
    """
    job, plan = ranked.job, ranked.job.plan
    limit = cost.HEADROOM * job.machine.device.memory
    some = plan.microbatches
    if plan.pp > 1 and some > 4 * plan.pp:
        some = 4 * plan.pp
    shorter = replace(ranked, job=replace(job, plan=replace(plan, microbatches=some)))
    simulated = simulate(shorter)
    time = f"{simulated.seconds:.2f} s"
    if some < plan.microbatches:
        time += f" for {some} of {plan.microbatches} microbatches"
    fits = simulated.peak_bytes <= limit
    return (
        f"minipar's own code, traced and replayed: {time}, {simulated.peak_bytes / GB:.0f} GB: "
        f"{'fits' if fits else 'does not fit'} in {limit / GB:.0f} GB"
        + ("" if fits or job.software.name == "minipar" else "; ask again with --software minipar")
    )


def _explained(base: cost.Job, config: PlanConfig) -> Ranked:
    plan = replace(Plan.parse(config.explain), precision=base.plan.precision)
    plan.check(base.config)
    job = replace(base, plan=plan)
    count = job.dp * plan.microbatches
    if plan.num_ranks != config.gpus or config.global_batch % count:
        raise ValueError(
            f"--explain {plan}: it has {plan.num_ranks} ranks and {count} microbatches; use "
            f"--gpus {plan.num_ranks} and a --global-batch that these divide"
        )
    job = replace(job, microbatch=config.global_batch // count)
    return Ranked(job, cost.seconds(job), cost.memory(job))


def _nothing_fits(config: PlanConfig, base: cost.Job, found: Search) -> str:
    """Say why nothing does, and the cheapest change that would help."""
    fix = fixed(config.fix)
    if (small := found.smallest()) is None:
        some = next(iter(found.too_large or found.fit), None)
        why = problem(some.job) if some else f"no dp divides --global-batch {config.global_batch}"
        if fix:
            why += f", with --fix {config.fix}"
        return f"no legal plan for {config.gpus} devices: {why}"
    needs = (
        f"nothing fits: the smallest plan, {small}, needs {sum(small.memory.values()) / GB:.0f} of "
        f"{found.limit / GB:.0f} GB, {small.memory[small.largest] / GB:.0f} of them {small.largest}"
    )
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
