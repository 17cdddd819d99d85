"""How true is it? Predictions beside runs that others have published, and beside simple rules.

    python -m minipar.sim.validate [--fit] TABLE.csv ...

prints, for each source in the tables, the errors of the step time that `cost.py` predicts; those of
a *constant*, the source's own best utilisation of the peak for all of its rows, which a predictor
must beat to have shown anything; the errors of the memory; how many of the runs that went well, ran
out of memory or failed would fit into what a device has for tensors; and how good a plan the
prediction would have chosen in each cell (runs of one model on as many devices), beside the rule of
thumb "least tp x pp, largest microbatch". Aims stand beside. `--fit` prints the numbers of
`software.toml` that fit best instead: to rows whose column `split` says ``tune``, and to no others.

A table has a row per run, with the columns of tests/sim/data, of which `NEEDED` must be there, and
step_seconds, tokens_per_s_per_gpu or memory_gb; sequences are counted, not tokens, in `microbatch`
and `global_batch`. What is empty or missing is unknown, and taken as usual for its family; of
microbatches, the fastest that fits. Rows that are not understood are left out, counted, and why.
"""

import csv
import difflib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from minipar.model.llama import LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.pipeline import schedules
from minipar.parallel.plan import Plan
from minipar.sim import cost, fit, footprint, hardware

FAMILIES = {"nanotron": "nanotron", "llm-foundry": "llm-foundry", "fms-fsdp": "compiled"}
FAMILIES |= dict.fromkeys(("megatron", "nemo", "mcore"), "megatron")
"""By what is in a table's `framework`, the first that is; "any" for others."""
LATER = {"megatron": "megatron-core"}
"""What has become of a family on devices that have 8 bits, but for forks of what it was."""
NETWORKS = {"nanotron": "-efa-busy"}
"""Where a table of the same cluster tells more of its network than its bandwidth."""
SCHEDULES = {name.replace("_", ""): name for name in schedules.SCHEDULES}
SCHEDULES |= {"": "1f1b", "none": "1f1b", "afab": "gpipe", "zb1p": "zb_h1", "zb2p": "zb_h2"}
SCHEDULES |= dict.fromkeys(("interleaved", "1f1bi", "vpp"), "interleaved_1f1b")
SCHEDULES |= {"zbvzerobubble": "zb_v", "interleavedzerobubble": "interleaved_zb"}
"""By what tables call them, in lower case and without what is no letter or digit."""
DTYPES = {"fp4": "fp4", "fp8": "fp8", "float8": "fp8", "bf16": "bf16", "bfloat16": "bf16"}
"""By what is in a table's word, the first that is: fp8-e4m3, nvfp4, bf16-mixed, amp_bf16."""
RECOMPUTE = {"off": "none", "op": "selective", "layer": "selective", "uniform": "full"}
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")
"""A number whose commas part thousands: in 4,5 one is the point, and it is not read."""
NEEDED = ("layers", "hidden", "heads", "seq", "device", "gpus")
FITTED = ("host", "host_tp", "host_across", "passes", "attention", "exposed", "copies", "fixed")
START = {"host": 1e-3, "host_tp": 0.3e-3, "host_across": 1e-3, "passes": 1.5, "attention": 2}
START |= {"exposed": 0.3, "copies": 24, "fixed": 0.02}


@dataclass(frozen=True)
class Run:
    """A row: what was run, and what was measured of it; 0 where nothing was."""

    name: str
    source: str
    split: str
    job: cost.Job
    gpus: int
    seconds: float
    memory: float
    status: str = "ok"

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.held < self.job.machine.device.usable_memory()

    @property
    def cell(self) -> tuple:
        """What runs have in common that a planner could choose between."""
        job = self.job
        batch = job.plan.dp * job.plan.microbatches * job.microbatch
        same = str(job.config), job.machine, job.software, job.dtype
        return self.source, *map(str, same), self.gpus, job.seq_len, batch

    @cached_property
    def predicted(self) -> float:
        """Seconds of a step."""
        return sum(cost.seconds(self.job).values())

    @cached_property
    def held(self) -> float:
        """Bytes of the fullest device."""
        return sum(footprint.memory(self.job).values())

    @property
    def ideal(self) -> float:
        """Seconds of a step at the device's peak."""
        job, c = self.job, self.job.config
        flops = c.flops_per_token(job.seq_len, causal=True)
        if not job.gated:
            active = 1 if c.moe is None else c.moe.top_k + c.moe.num_shared
            width = c.intermediate_size if c.moe is None else c.moe.expert_size
            flops -= 6 * c.num_layers * c.hidden_size * active * width
        return flops * job.tokens_of_step / self.gpus / job.machine.device.peak[job.dtype]


def read(
    path: str | Path, left_out: Counter[str] | None = None, failed: list[Run] | None = None
) -> list[Run]:
    """Return the runs of a table that went well and that are understood.

    Others that are understood are added to `failed`; why rows are left out is counted in
    `left_out`. Raises `ValueError` for what is no table.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
        lines = [line for line in text if line.strip(' ,"') and line.lstrip(' "')[:1] != "#"]
        head, *body = [*csv.reader(lines)] or [[]]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: is no table: {error}") from error
    names = [name.strip().lower() for name in head]
    for name in NEEDED:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1) or names[:9]
            raise ValueError(f"{path}: has no column {name}; it has {', '.join(near)} ...")
    runs, skipped = [], Counter() if left_out is None else left_out
    for cells in body:
        row = Row(zip(names, map(str.strip, cells), strict=False), source=Path(path).stem)
        try:
            if any(map(str.strip, cells[len(names) :])):
                raise ValueError("more cells than columns: is a number with commas not quoted?")
            run = _run(row)
            if not math.isfinite(run.predicted * run.held):
                raise ValueError("what is predicted is beyond numbers")
            if run.status == "ok":
                runs.append(run)
                continue
            skipped[f"not timed, but {run.status}"] += 1
            if failed is not None:
                failed.append(run)
        except (ValueError, ZeroDivisionError, OverflowError, KeyError) as error:
            skipped[" ".join(str(error).split())] += 1
    return runs


class Row(dict[str, str]):
    """A row of a table: what is missing or empty is unknown."""

    def __init__(self, cells: Iterable[tuple[str, str]], **usual: str) -> None:
        super().__init__(usual | {name: cell for name, cell in cells if cell})

    def number(self, name: str, default: float = 1, lowest: float = 0) -> float:
        """Return a number; raise `ValueError` for what is none or out of bounds."""
        text = self.get(name, "")
        try:
            plain = text.replace(",", "") if GROUPED.fullmatch(text) else text
            number = float(plain) if plain else default
        except ValueError:
            number = math.nan
        if not lowest <= number < 1e15:
            raise ValueError(f"{name}={text[:40]} must be a number of {lowest:g} or more")
        return number

    def whole(self, name: str, default: float = 1, lowest: int = 1) -> int:
        """Return a whole number."""
        number = self.number(name, default, lowest)
        if number % 1:
            raise ValueError(f"{name}={number} must be whole")
        return int(number)

    def flag(self, name: str, default: bool) -> bool:
        """Return what is yes or no; as a number, too, since tables are rewritten as floats."""
        text = self.get(name, "").lower()
        if text and text.removesuffix(".0") not in FLAGS:
            raise ValueError(f"{name}={text[:40]} must be 1 or 0, true or false, yes or no")
        return FLAGS[text.removesuffix(".0")] if text else default

    def word(self, name: str) -> str:
        """Return the letters and digits of a cell in lower case: Zero-Bubble is zerobubble."""
        return re.sub(r"[^a-z0-9]", "", self.get(name, "").lower())


def _run(row: Row) -> Run:
    number, whole, framework = row.number, row.whole, row.get("framework", "").lower()
    family = next((v for k, v in FAMILIES.items() if k in framework), "any")
    gated = row.flag("gated", row.word("kind") != "gpt")
    width, heads, seq = whole("hidden", 0), whole("heads", 0), whole("seq", 0)
    moe, ep = None, whole("ep")
    if whole("experts", 0, 0) > 1:
        chosen = whole("top_k", 0)
        moe = MoEConfig(
            whole("experts"), chosen, whole("moe_ffn", whole("ffn", 4 * width)),
            num_shared=whole("shared_experts", 0, 0), normalise=chosen > 1,
        )  # fmt: skip
        if moe.num_experts % ep:
            raise ValueError(f"ep={ep} must divide experts={moe.num_experts}")
    elif row.word("kind") == "moe" or ep > 1:
        raise ValueError("a mixture needs experts=, how many there are")
    config = LlamaConfig(
        whole("vocab", 50_000), width, whole("ffn", 4 * width), whole("layers", 0), heads,
        whole("kv_heads", heads), whole("head_dim", max(1, width // heads)), max_seq_len=seq,
        tie_embeddings=row.flag("tied", False), moe=moe,
    )  # fmt: skip
    tp, pp, cp = whole("tp"), whole("pp"), whole("cp")
    gpus = whole("gpus", 0)
    dp = whole("dp", max(1, gpus // (tp * pp * cp)))
    if dp * tp * pp * cp != gpus:
        raise ValueError(f"dp={dp} x tp={tp} x pp={pp} x cp={cp} are not gpus={gpus}")
    if dp * tp * cp % ep:
        raise ValueError(f"ep={ep} must divide dp x tp x cp = {dp * tp * cp}")
    if pp > config.num_layers:  # stages may be more: the ends of some are an embedding or a head
        raise ValueError(f"pp={pp} must be at most layers={config.num_layers}")
    schedule, chunks = row.word("schedule").removeprefix("schedule"), whole("virtual_stages", 0, 0)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={row['schedule']} is not known")
    schedule = SCHEDULES[schedule]
    if schedule == "1f1b" and chunks > 1:  # Megatron-LM calls both 1F1B
        schedule = "interleaved_1f1b"
    if pp * max(1, chunks) > config.num_layers + 2:
        raise ValueError(f"{chunks} stages on each of pp={pp} are more than layers + 2")
    recompute, zero = row.word("recompute") or "none", whole("zero", 0, 0)
    recompute = RECOMPUTE.get(recompute.removeprefix("selective"), recompute)
    if recompute not in ("none", "selective", "full") or zero > 3:
        raise ValueError(f"recompute={recompute}, zero={zero}: none, selective or full, and 0 to 3")
    dtype = row.get("dtype", "bf16").lower()
    dtype = hardware.type_name(next((t for word, t in DTYPES.items() if word in dtype), dtype))
    machine = _machine(row.get("device", ""), family, number("inter_gbps_per_gpu", 0),
                       whole("gpus_per_node", 0, 0), row.get("intra", "").lower())  # fmt: skip
    if "fp8" in machine.device.peak and "deepspeed" not in framework:
        family = LATER.get(family, family)
    if dtype in ("fp8", "fp4") and family == "any":
        family = "compiled"  # as torchao's products of few bits have to be
    if "torchtitan" in framework and pp > 1 and zero == 3:
        zero = 1  # its default in a pipeline: weights stay gathered, and gradients go once a step
    plan = Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, schedule=schedule, checkpointing=recompute,
        sequence_parallel=row.flag("sp", True) and tp > 1, stages_per_rank=chunks,
        # Experts over ranks of tp, too, are whole.
        expert_tensor_parallel=moe is not None and tp > 1 and dp * cp % ep == 0,
        dispatch="paired" if ep > 1 and schedule in schedules.PAIRED else "all_to_all",
    )  # fmt: skip
    flash = row.flag("flash", dtype != "fp16")
    job = cost.Job(
        config, plan, machine, hardware.software(family), seq, 1, dtype, gated, flash, ep
    )
    job, seconds = _with_batch(row, job), number("step_seconds", 0)
    if not seconds and (rate := number("tokens_per_s_per_gpu", 0)):
        seconds = job.tokens_of_step / gpus / rate
    if not seconds and "step_seconds" in row and row.get("status", "ok").lower() == "ok":
        raise ValueError("step_seconds=0 must be above 0")
    name, source, split = row.get("row_id", "?"), row["source"], row.get("split", "")
    unit = 1e9
    if source.startswith("torchtitan"):  # which prints GiB, and what its allocator has reserved
        unit = 2**30 * (1 - machine.device.fragmentation)
    memory, status = number("memory_gb", 0) * unit, row.get("status", "ok").lower()
    return Run(name, source, split, job, gpus, seconds, memory, status)


def _with_batch(row: Row, job: cost.Job) -> cost.Job:
    """Return the job with its microbatches; what is unknown of them is chosen as users do."""
    dp, micro, count = job.plan.dp, row.whole("microbatch", 0, 0), row.whole("microbatches", 0, 0)
    whole = row.whole("global_batch", dp * (micro or 1) * (count or 1))
    mine = whole // dp
    if not micro and count:
        micro = mine // count
    tried = [m for m in ([micro] if micro else (1, 2, 4, 8, 16)) if mine % m == 0 and m <= mine]
    if not tried or whole % dp or (count and tried[0] * count != mine):
        counts = f"microbatch={micro}, microbatches={count or mine / max(1, micro):g}, dp={dp}"
        raise ValueError(f"global_batch={whole} is not {counts}")
    jobs = [
        replace(job, microbatch=m, plan=replace(job.plan, microbatches=mine // m)) for m in tried
    ]
    room = footprint.room(job.machine.device)
    fit = [j for j in jobs if sum(footprint.memory(j).values()) < room] or jobs[:1]
    return min(fit, key=lambda j: sum(cost.seconds(j).values()))


@cache
def _machine(device: str, family: str, gbits: float, gpus: int, inside: str) -> hardware.Machine:
    """Return the machine of a device as tables name it: h100-sxm, NVIDIA A100-SXM4-40GB.

    `inside` is its network inside of a node; the device's own, if it is none that we know.
    """
    words = re.split(r"[\s_-]+", re.sub(r"rtx[\s_-]+", "rtx", device.lower()))
    drop = r"nvidia|tesla|geforce|[dh]gx|sxm\d?|\d+w|hbm\w*|nvl72"
    words = [w.removesuffix("gb") for w in words if not re.fullmatch(drop, w)]
    name, known = "-".join(words), hardware.names()
    if name not in known:  # without its memory, if it is that device's
        sizes = [int(w) for w in words if w.isdecimal()]
        name = "-".join(w for w in words if not w.isdecimal())
        memory = hardware.load(name).device.memory if name in known else 1.0
        if any(abs(1e9 * size / memory - 1) > 0.1 for size in sizes):
            name = device
    machine = hardware.load(name if name in known else device)
    if f"{name}{NETWORKS.get(family, '')}" in hardware.names():
        machine = hardware.load(name + NETWORKS.get(family, ""))
    machine = replace(machine, inside=hardware.networks().get(inside, machine.inside))
    if gbits:
        machine = replace(machine, between=machine.between.with_ports(gbits * 1e9 / 8))
    return replace(machine, gpus=gpus or machine.gpus)


# ---------------------------------------------------------------------- errors
def errors(predicted: Iterable[float], measured: Iterable[float]) -> np.ndarray:
    """Return |predicted / measured - 1| of each."""
    return np.abs(np.array(list(predicted)) / np.array(list(measured)) - 1)


def constant(runs: Sequence[Run]) -> np.ndarray:
    """Return what one utilisation of the peak, the median of these runs, would predict of each."""
    ideal = np.array([run.ideal for run in runs])
    return ideal / np.median(ideal / [run.seconds for run in runs])


def choices(runs: Sequence[Run]) -> list[tuple[float, float, float]]:
    """Return of each cell of 3 runs or more: share of the best measured throughput that the
    prediction's choice and the rule of thumb's have; rank correlation of predicted and measured."""
    found = []
    for _, group in groupby(sorted(runs, key=lambda r: r.cell), key=lambda r: r.cell):
        cell = list(group)
        if len(cell) < 3:
            continue
        best = min(run.seconds for run in cell)
        fit = [r for r in cell if r.held < footprint.room(r.job.machine.device)] or cell
        ours = min(fit, key=lambda run: run.predicted)
        thumb = min(fit, key=lambda r: (r.job.plan.tp * r.job.plan.pp, -r.job.microbatch))
        ranks = [
            np.argsort(np.argsort(x))
            for x in zip(*((r.predicted, r.seconds) for r in cell), strict=True)
        ]
        found.append((best / ours.seconds, best / thumb.seconds, float(np.corrcoef(*ranks)[0, 1])))
    return found


def report(runs: Sequence[Run], failed: Sequence[Run] = ()) -> str:
    """Return the table of errors by source and split, the aims, and the worst rows."""
    counts = Counter((run.source, run.name) for run in runs if run.name != "?")
    twice = [name for (_, name), count in counts.items() if count > 1]
    more = f" and {len(twice) - 3} more" * (len(twice) > 3)
    lines = [f"rows with the same row_id, each counted: {', '.join(twice[:3])}{more}"][: len(twice)]
    for (source, split), group in groupby(sorted((*runs, *failed), key=_set_of), key=_set_of):
        every = list(group)
        some = [r for r in every if r.status == "ok"]
        timed, sized = [r for r in some if r.seconds], [r for r in some if r.memory]
        lines.append(f"{source}, {split}: {len(some)} rows")
        if timed:
            measured = [r.seconds for r in timed]
            found = errors((r.predicted for r in timed), measured)
            flat = errors(constant(timed), measured)
            aim = f"mean below {flat.mean() / 2:.1%}, half of a constant's"
            lines.append(f"  step time   {_spread(found)}   aim: {aim}")
            lines.append(f"  a constant  {_spread(flat)}")
            for at in np.argsort(-found)[:3]:
                run = timed[at]
                shown = f"{run.predicted:.2f} s predicted, {run.seconds:.2f} s measured"
                lines.append(f"    {run.name}: {shown}; mostly {_largest(run)}")
        if sized:
            found = errors((r.held for r in sized), [r.memory for r in sized])
            lines.append(f"  memory      {_spread(found)}   aim: median 8%")
        fit = [
            f"{np.mean([r.fits for r in every if r.status == status]):.0%} of {count} {status}"
            for status, count in Counter(r.status for r in every).items()
        ]
        lines.append(f"  predicted to fit: {', '.join(fit)}")
        if cells := choices(timed):
            (ours, thumb, rank), (worst, _, lowest) = np.mean(cells, axis=0), np.min(cells, axis=0)
            lines.append(
                f"  choice of {len(cells)} cells: {ours:.1%} of the best throughput, worst "
                f"{worst:.1%}; rule of thumb {thumb:.1%}; aim: 95%, and never below that; rank "
                f"correlation {rank:.2f}, lowest {lowest:.2f}"
            )
    for name, few, aim in (("up to 64 devices", True, 8), ("on more", False, 15)):
        some = [r for r in runs if r.seconds and (r.gpus <= 64) == few]
        if some:
            found = errors((r.predicted for r in some), [r.seconds for r in some])
            lines.append(f"all {len(some)} rows {name}: {_spread(found)}   aim: median {aim}%")
    return "\n".join(lines)


def _set_of(run: Run) -> tuple[str, str]:
    return run.source, run.split


def _spread(found: np.ndarray) -> str:
    numbers = (found.mean(), np.median(found), np.quantile(found, 0.9), found.max())
    return "mean {:6.1%}   median {:6.1%}   90 % {:6.1%}   worst {:6.1%}".format(*numbers)


def _largest(run: Run) -> str:
    parts = cost.seconds(run.job)
    return max(parts, key=parts.__getitem__)


# ---------------------------------------------------------------------- fitting
def best_software(runs: Sequence[Run], keys: Sequence[str] = FITTED) -> dict[str, float]:
    """Return the numbers of `Software` that fit the runs best, each source of the same weight."""
    sources = [run.source for run in runs]
    weights = np.array([sources.count(source) ** -0.5 for source in sources])
    weights /= weights.max()

    def off(logs: np.ndarray) -> np.ndarray:
        tried = dict(zip(keys, np.exp(logs).tolist(), strict=True))
        jobs = (replace(r.job, software=replace(r.job.software, **tried)) for r in runs)
        predicted = [sum(cost.seconds(job).values()) for job in jobs]
        return np.log(predicted) - np.log([run.seconds for run in runs])

    found = fit.solve(off, [START[key] for key in keys], weights, prior=0.3)
    return dict(zip(keys, found, strict=True))


def fitted(runs: Sequence[Run]) -> str:
    """Return what fits each family of software best, and all of them together."""
    runs = [run for run in runs if run.split == "tune" and run.seconds]
    if not runs:
        raise ValueError("--fit: no row has split=tune and a time to fit to")
    by_family = {run.job.software.name for run in runs}
    lines = []
    for family in sorted(by_family):
        own = [run for run in runs if run.job.software.name == family]
        lines.append(f"{family}: {_shown(best_software(own))}")
    keys = [key for key in FITTED if key not in ("host_across", "passes")]  # as each alone says
    everywhere = [replace(r, job=replace(r.job, software=hardware.software("any"))) for r in runs]
    return "\n".join([*lines, f"any: {_shown(best_software(everywhere, keys))}"])


def _shown(numbers: dict[str, float]) -> str:
    return ", ".join(f"{key} = {value:.3g}" for key, value in numbers.items())


def main(arguments: Sequence[str]) -> None:
    """Print the report of the tables, or what fits them."""
    names = [name for name in arguments if name != "--fit"]
    if not names:
        raise SystemExit(f"usage: {__doc__.splitlines()[2].strip()}")
    left_out: Counter[str] = Counter()
    failed: list[Run] = []
    try:
        runs = [run for name in names for run in read(name, left_out, failed)]
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(str(error)) from None
    for why, count in left_out.most_common():
        print(f"rows left out: {count}: {why}")
    if not runs:
        raise SystemExit(f"no run that can be predicted in {', '.join(names)}")
    try:
        print(fitted(runs) if "--fit" in arguments else report(runs, failed))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
