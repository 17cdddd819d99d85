"""How true is it? Predictions beside runs that others have published, and beside simple rules.

    python -m minipar.sim.validate [--fit] TABLE.csv ...

prints, for each source in the tables, the errors of the step time that `cost.py` predicts; those of
a *constant*, the source's own best utilisation of the peak for all of its rows, which a predictor
must beat to have shown anything; the errors of the memory; and how good a plan the prediction would
have chosen in each cell (runs of one model on as many devices), beside the rule of thumb "least tp
x pp, largest microbatch". `--fit` prints the numbers of `software.toml` that fit best instead: to
rows whose column `split` says ``tune``, and to no others.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from minipar.comm.spans import bounded_text
from minipar.model.llama import LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.pipeline import schedules
from minipar.parallel.plan import Plan
from minipar.sim import cost, fit, hardware

FAMILIES = {"nanotron": "nanotron", "llm-foundry": "llm-foundry", "megatron": "megatron"}
FAMILIES |= {"nemo": "megatron", "mcore": "megatron", "fms-fsdp": "compiled"}
"""By the beginning of a table's `framework`; "any" for others."""
NETWORKS = {"nanotron": "-efa-busy"}
"""Where a table of the same cluster tells more of its network than its bandwidth."""
SCHEDULES = {"": "1f1b", "none": "1f1b", "interleaved": "interleaved_1f1b"}
DTYPES = {"mxfp8": "fp8", "nvfp4": "fp4"}
NEEDED = ("layers", "hidden", "heads", "seq", "device", "gpus")
SCHEDULES |= {"zb-1p": "zb_h1", "zb-2p": "zb_h2", "zb-v": "zb_v"}
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

    @property
    def cell(self) -> tuple:
        """What runs have in common that a planner could choose between."""
        job = self.job
        batch = job.plan.dp * job.plan.microbatches * job.microbatch
        return self.source, str(job.config), job.machine.device.name, self.gpus, job.seq_len, batch

    @cached_property
    def predicted(self) -> float:
        """Seconds of a step."""
        return sum(cost.seconds(self.job).values())

    @cached_property
    def held(self) -> float:
        """Bytes of the fullest device."""
        return sum(cost.memory(self.job).values())

    @property
    def ideal(self) -> float:
        """Seconds of a step at the device's peak."""
        job, c = self.job, self.job.config
        flops = c.flops_per_token(job.seq_len, causal=True)
        if not job.gated:
            flops -= 6 * c.num_layers * c.hidden_size * c.intermediate_size
        return flops * job.tokens_of_step / self.gpus / job.machine.device.peak[job.dtype]


def read(path: str | Path, left_out: Counter[str] | None = None) -> list[Run]:
    """Return the runs of a table that went well and that are understood.

    Why rows are left out is counted in `left_out`. Raises `ValueError` for what is no table.
    """
    try:
        text = bounded_text(Path(path), "utf-8-sig", "replace").splitlines()
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
        if row.get("status", "ok").lower() not in ("", "ok"):
            skipped[f"not timed, but {row['status']}"] += 1
            continue
        try:
            run = _run(row)
            if not math.isfinite(run.predicted * run.held):
                raise ValueError("what is predicted is beyond numbers")
            runs.append(run)
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
            number = float(text.replace(",", "")) if text else default
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


def _run(row: Row) -> Run:
    number, whole, framework = row.number, row.whole, row.get("framework", "").lower()
    family = next((v for k, v in FAMILIES.items() if framework.startswith(k)), "any")
    gated = row.get("gated", "0" if row.get("kind") == "gpt" else "1") != "0"
    width, heads, seq = whole("hidden", 0), whole("heads", 0), whole("seq", 0)
    moe = None
    if whole("experts", 0, 0) > 1:
        moe = MoEConfig(
            whole("experts"), whole("top_k"), whole("moe_ffn", whole("ffn", 4 * width)),
            num_shared=whole("shared_experts", 0, 0),
        )  # fmt: skip
    config = LlamaConfig(
        whole("vocab", 50_000), width, whole("ffn", 4 * width), whole("layers", 0), heads,
        whole("kv_heads", heads), whole("head_dim", max(1, width // heads)), max_seq_len=seq,
        tie_embeddings=row.get("tied") == "1", moe=moe,
    )  # fmt: skip
    tp, pp, cp = whole("tp"), whole("pp"), whole("cp")
    gpus = whole("gpus", 0)
    dp = whole("dp", max(1, gpus // (tp * pp * cp)))
    if dp * tp * pp * cp != gpus:
        raise ValueError(f"dp={dp} x tp={tp} x pp={pp} x cp={cp} are not gpus={gpus}")
    if pp > config.num_layers:  # stages may be more: the ends of some are an embedding or a head
        raise ValueError(f"pp={pp} must be at most layers={config.num_layers}")
    schedule = row.get("schedule", "none").lower()
    schedule = SCHEDULES.get(schedule, schedule.replace("-", "_"))
    if schedule not in (*schedules.SCHEDULES, "dualpipe"):
        raise ValueError(f"schedule={schedule} is not known")
    recompute, zero = row.get("recompute", "none").lower(), whole("zero", 0, 0)
    if recompute not in ("none", "selective", "full") or zero > 3:
        raise ValueError(f"recompute={recompute}, zero={zero}: none, selective or full, and 0 to 3")
    dtype = row.get("dtype", "bf16").lower()
    dtype = hardware.type_name(DTYPES.get(dtype, dtype))
    machine = _machine(row.get("device", ""), family, number("inter_gbps_per_gpu", 0),
                       whole("gpus_per_node", 0, 0))  # fmt: skip
    plan = Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, schedule=schedule, checkpointing=recompute,
        sequence_parallel=row.get("sp") != "0" and tp > 1, stages_per_rank=whole("virtual_stages"),
        expert_tensor_parallel=moe is not None and tp > 1,
    )  # fmt: skip
    flash = row.get("flash", str(int(dtype != "fp16"))) == "1"
    ep = whole("ep")
    if dp * cp % ep:  # over ranks of tp, too, which then leave each expert whole: as many of each
        ep = max(1, ep // tp)
    job = cost.Job(
        config, plan, machine, hardware.software(family), seq, 1, dtype, gated, flash, ep
    )
    job, seconds = _with_batch(row, job), number("step_seconds", 0)
    if not seconds and (rate := number("tokens_per_s_per_gpu", 0)):
        seconds = job.tokens_of_step / gpus / rate
    if not seconds and "step_seconds" in row:
        raise ValueError("step_seconds=0 must be above 0")
    name, source, split = row.get("row_id", "?"), row["source"], row.get("split", "")
    return Run(name, source, split, job, gpus, seconds, number("memory_gb", 0) * 1e9)


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
    room = cost.room(job.machine.device)
    fit = [j for j in jobs if sum(cost.memory(j).values()) < room] or jobs[:1]
    return min(fit, key=lambda j: sum(cost.seconds(j).values()))


@cache
def _machine(device: str, family: str, gbits: float, gpus: int) -> hardware.Machine:
    """Return the machine of a device as tables name it: h100-sxm, NVIDIA A100-SXM4-40GB."""
    words = re.sub(r"[\s_-]+", "-", device.lower()).split("-")
    drop = r"nvidia|tesla|sxm\d?|80|80gb|\d+w|hbm\w*"
    words = [w.removesuffix("gb") for w in words if not re.fullmatch(drop, w)]
    known = ["-".join(words[:n]) for n in range(len(words), 0, -1)]
    name = next((n for n in known if n in hardware.names()), device)
    machine = hardware.load(name)
    if f"{name}{NETWORKS.get(family, '')}" in hardware.names():
        machine = hardware.load(name + NETWORKS.get(family, ""))
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
        fit = [r for r in cell if r.held < cost.room(r.job.machine.device)] or cell
        ours = min(fit, key=lambda run: run.predicted)
        thumb = min(fit, key=lambda r: (r.job.plan.tp * r.job.plan.pp, -r.job.microbatch))
        ranks = [
            np.argsort(np.argsort(x))
            for x in zip(*((r.predicted, r.seconds) for r in cell), strict=True)
        ]
        found.append((best / ours.seconds, best / thumb.seconds, float(np.corrcoef(*ranks)[0, 1])))
    return found


def report(runs: Sequence[Run]) -> str:
    """Return the table of errors by source and split, and the worst rows."""
    lines = ["source, split: rows", ""]
    for (source, split), group in groupby(
        sorted(runs, key=lambda r: (r.source, r.split)), key=lambda r: (r.source, r.split)
    ):
        some = list(group)
        timed, sized = [r for r in some if r.seconds], [r for r in some if r.memory]
        lines.append(f"{source}, {split}: {len(some)} rows")
        if timed:
            measured = [r.seconds for r in timed]
            found = errors((r.predicted for r in timed), measured)
            lines.append(f"  step time   {_spread(found)}")
            lines.append(f"  a constant  {_spread(errors(constant(timed), measured))}")
            for at in np.argsort(-found)[:3]:
                run = timed[at]
                shown = f"{run.predicted:.2f} s predicted, {run.seconds:.2f} s measured"
                lines.append(f"    {run.name}: {shown}; mostly {_largest(run)}")
        if sized:
            found = errors((r.held for r in sized), [r.memory for r in sized])
            lines.append(f"  memory      {_spread(found)}")
        if cells := choices(timed):
            ours, thumb, rank = np.mean(cells, axis=0)
            lines.append(
                f"  choice of {len(cells)} cells: {ours:.1%} of the best throughput, rule of thumb "
                f"{thumb:.1%}; rank correlation {rank:.2f}"
            )
    for name, few in (("up to 64 devices", True), ("on more", False)):
        some = [r for r in runs if r.seconds and (r.gpus <= 64) == few]
        if some:
            found = errors((r.predicted for r in some), [r.seconds for r in some])
            lines.append(f"all {len(some)} rows {name}: {_spread(found)}")
    return "\n".join(lines[2:])


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
    try:
        runs = [run for name in names for run in read(name, left_out)]
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(str(error)) from None
    for why, count in left_out.most_common():
        print(f"rows left out: {count}: {why}")
    if not runs:
        raise SystemExit(f"no run that can be predicted in {', '.join(names)}")
    show: Callable[[list[Run]], str] = fitted if "--fit" in arguments else report
    try:
        print(show(runs))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
