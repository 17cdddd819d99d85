"""Compare predictions with runs that others have published, and with simple rules.

    python -m minipar.sim.validate TABLE.csv ...

prints, for each source in the tables, the errors of the step time that `cost.py` predicts, and of
the memory. Predictions must beat a *constant*: the one utilisation of the peak that fits all rows
of the source best. Then it prints how many of the runs that went well, ran out of memory or failed
are predicted to fit into what a device has for tensors. Last, how good are the predicted choices?
In each cell (runs of one model on as many devices) the chosen plan stands beside the choice of the
rule of thumb "least tp x pp, largest microbatch". Aims stand beside.

A table has a row per run, with the columns and words of tests/sim/data, and step_seconds or
tokens_per_s_per_gpu; `microbatch` and `global_batch` count sequences. An empty cell takes the value
that is usual for the software; unknown microbatches are the fastest that fit. Rows that are not
understood are left out; their number and the reason are printed.
"""

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from minipar.model.llama import LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.pipeline import schedules
from minipar.parallel.plan import Plan
from minipar.sim import cost, footprint, hardware
from minipar.sim.job import Job

FAMILIES = {"nanotron": "nanotron", "llm-foundry": "llm-foundry", "fms-fsdp": "compiled"}
FAMILIES |= dict.fromkeys(("megatron", "nemo", "mcore"), "megatron")
"""By a word in a table's `framework`, the first that occurs; "any" for others."""
DEVICES = {"a100-80-sxm": "a100", "a100-40-sxm": "a100-40", "h100-sxm": "h100"}
DEVICES |= {"h100-96-500w": "h100-96"}
"""Names of devices in tables, where they are not ours."""
SCHEDULES = {"": "1f1b", "none": "1f1b", "afab": "gpipe", "interleaved": "interleaved_1f1b"}
SCHEDULES |= {"zb-1p": "zb_h1", "zb-2p": "zb_h2", "zb-v": "zb_v", "dualpipev": "dualpipe_v"}

ERROR = 0.15
"""Relative error of the step time that 90 % of published runs, and more, stay within."""
RUNS_ON = ("a100", "a100-40", "h100")
RUNS_OF = ("any", "nanotron", "llm-foundry", "compiled", "megatron")
RUNS_IN = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")
RUNS_OVER = ("ib-ndr", "ib-hdr", "efa-busy")
RUNS_UP_TO = 64
"""Devices, software, pipelines, networks between nodes, and number of devices of the published runs
that were checked."""


@dataclass(frozen=True)
class Run:
    """A row: a run, and its measured numbers; 0 where a number was not measured."""

    source: str
    split: str
    job: Job
    seconds: float
    memory: float
    status: str = "ok"

    @property
    def gpus(self) -> int:
        """Devices of the run."""
        return self.job.plan.num_ranks

    @property
    def fits(self) -> bool:
        """True if it is predicted to fit."""
        return self.held < self.job.machine.device.usable_memory()

    @cached_property
    def predicted(self) -> float:
        """Seconds of a step."""
        return sum(cost.seconds(self.job).values())

    @cached_property
    def held(self) -> float:
        """Bytes of the fullest device."""
        return sum(footprint.memory(self.job).values())


# ---------------------------------------------------------------------- tables
def read(path: str | Path) -> list[Run]:
    """Return the runs of a table that went well."""
    return [run for run in read_all(path)[0] if run.status == "ok"]


def read_all(path: str | Path) -> tuple[list[Run], Counter[str]]:
    """Return the runs of a table that are understood, and the number of other rows by reason."""
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # Excel's mark, too
    rows = csv.DictReader(line for line in lines if line and line[0] != "#")
    runs, left_out = [], Counter()
    for cells in rows:
        try:
            if None in cells:
                raise ValueError("more cells than columns: is a number with commas not quoted?")
            runs.append(_run(Row({name: (cell or "").strip() for name, cell in cells.items()})))
        except (KeyError, ValueError, ZeroDivisionError) as error:
            left_out[" ".join(str(error).split())] += 1
    return runs, left_out


class Row(dict[str, str]):
    """A row of a table: a missing or empty cell is unknown."""

    def number(self, name: str, default: float = 1, lowest: float = 0) -> float:
        """Return a number; raise `ValueError` for a cell without one, or out of bounds."""
        try:
            number = float(self.get(name) or default)
        except ValueError:
            number = np.nan
        if not lowest <= number < np.inf:
            raise ValueError(f"{name}={self.get(name, '')[:40]} must be {lowest:g} or more")
        return number

    def whole(self, name: str, default: float = 1, lowest: int = 1) -> int:
        """Return a whole number."""
        return int(self.number(name, default, lowest))


def _run(row: Row) -> Run:
    framework, dtype = row.get("framework", "").lower(), row.get("dtype") or "bf16"
    family = next((v for k, v in FAMILIES.items() if k in framework), "any")
    gbits, gpus = row.number("inter_gbps_per_gpu", 0), row.whole("gpus_per_node", 0, 0)
    machine = _machine(row.get("device", ""), family, gbits, gpus, row.get("intra", ""))
    if "fp8" in machine.device.peak and family == "megatron" and "deepspeed" not in framework:
        family = "megatron-core"  # its successor, on devices that have 8 bits
    if dtype in ("fp8", "fp4") and family == "any":
        family = "compiled"  # as torchao's products of few bits have to be
    plan, ep = _plan(row)
    if "torchtitan" in framework and plan.pp > 1 and plan.zero == 3:
        # Its default in a pipeline: weights stay gathered, and gradients go once a step.
        plan = replace(plan, zero=1)
    job = Job(
        _config(row), plan, machine, hardware.software(family), row.whole("seq", 0), 1,
        hardware.type_name(dtype), gated=bool(row.whole("gated", row.get("kind") != "gpt", 0)),
        flash=bool(row.whole("flash", dtype != "fp16", 0)), ep=ep,
    )  # fmt: skip
    job, seconds = _with_batch(row, job), row.number("step_seconds", 0)
    if not seconds and (rate := row.number("tokens_per_s_per_gpu", 0)):
        seconds = job.tokens_of_step / plan.num_ranks / rate
    status, source = (row.get("status") or "ok").lower(), row.get("source", "")
    if not seconds and status == "ok":
        raise ValueError("no step_seconds above 0, and no tokens_per_s_per_gpu; TFLOP/s alone are "
                         "not scored, as their definitions differ")  # fmt: skip
    unit = 1e9
    if source.startswith("torchtitan"):  # it prints the GiB that its allocator has reserved
        unit = 2**30 * (1 - machine.device.fragmentation)
    memory = unit * row.number("memory_gb", 0)
    return Run(source, row.get("split", ""), job, seconds, memory, status)


def _config(row: Row) -> LlamaConfig:
    whole, moe = row.whole, None
    width, heads = whole("hidden", 0), whole("heads", 0)
    ffn = whole("ffn", 4 * width)
    if whole("experts", 0, 0) > 1:
        chosen, shared = whole("top_k", 0), whole("shared_experts", 0, 0)
        moe = MoEConfig(whole("experts"), chosen, whole("moe_ffn", ffn), num_shared=shared,
                        normalise=chosen > 1)  # fmt: skip
    elif row.get("kind") == "moe" or whole("ep") > 1:
        raise ValueError("a mixture needs experts=, how many there are")
    head_dim = whole("head_dim", max(1, width // heads))
    config = LlamaConfig(
        whole("vocab", 50_000), width, ffn, whole("layers", 0), heads, whole("kv_heads", heads),
        head_dim + head_dim % 2, max_seq_len=whole("seq", 0),
        tie_embeddings=bool(whole("tied", 0, 0)), moe=moe,
    )  # fmt: skip
    if head_dim % 2 and row.get("kind") == "gpt":  # it has no RoPE, which needs an even width
        object.__setattr__(config, "head_dim", head_dim)
    return config


def _plan(row: Row) -> tuple[Plan, int]:
    """Return the plan of a row, and how many ranks of dp, cp and tp share the experts."""
    whole = row.whole
    tp, pp, cp, ep, gpus = whole("tp"), whole("pp"), whole("cp"), whole("ep"), whole("gpus", 0)
    dp, layers = whole("dp", max(1, gpus // (tp * pp * cp))), whole("layers", 0)
    if dp * tp * pp * cp != gpus:
        raise ValueError(f"dp={dp} x tp={tp} x pp={pp} x cp={cp} are not gpus={gpus}")
    if dp * tp * cp % ep or whole("experts", ep, 0) % ep:
        raise ValueError(f"ep={ep} must divide experts, and dp x tp x cp = {dp * tp * cp}")
    schedule, chunks = row.get("schedule", ""), whole("virtual_stages", 0, 0)
    schedule = SCHEDULES.get(schedule, schedule)
    if schedule == "1f1b" and chunks > 1:  # Megatron-LM calls both 1F1B
        schedule = "interleaved_1f1b"
    if schedule not in schedules.SCHEDULES:
        raise ValueError(f"schedule={schedule} is not known")
    # Stages may be two more than layers: the ends of some are an embedding or a head.
    if pp > layers or pp * max(1, chunks) > layers + 2:
        raise ValueError(f"pp={pp} x {max(1, chunks)} stages are more than layers={layers}")
    plan = Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=whole("zero", 0, 0), schedule=schedule,
        checkpointing=row.get("recompute") or "none", stages_per_rank=chunks,
        sequence_parallel=tp > 1 and bool(whole("sp", 1, 0)),
        # Experts over ranks of tp, too, are whole.
        expert_tensor_parallel=whole("experts", 0, 0) > 1 and tp > 1 and dp * cp % ep == 0,
        dispatch="paired" if ep > 1 and schedule in schedules.PAIRED else "all_to_all",
    )  # fmt: skip
    return plan, ep


def _with_batch(row: Row, job: Job) -> Job:
    """Return the job with its microbatches; unknown ones are the fastest that fit."""
    dp, micro, count = job.plan.dp, row.whole("microbatch", 0, 0), row.whole("microbatches", 0, 0)
    whole = row.whole("global_batch", dp * (micro or 1) * (count or 1))
    mine = whole // dp
    micro = micro or (mine // count if count else 0)
    tried = [m for m in ([micro] if micro else (1, 2, 4, 8, 16)) if mine % m == 0 and m <= mine]
    if not tried or whole != dp * tried[0] * (count or mine // tried[0]):
        raise ValueError(
            f"global_batch={whole} is not microbatch={micro}, microbatches={count}, dp={dp}"
        )
    jobs = [
        replace(job, microbatch=m, plan=replace(job.plan, microbatches=mine // m)) for m in tried
    ]
    room = footprint.room(job.machine.device)
    fit = [j for j in jobs if sum(footprint.memory(j).values()) < room] or jobs[:1]
    return min(fit, key=lambda j: sum(cost.seconds(j).values()))


@cache
def _machine(device: str, family: str, gbits: float, gpus: int, inside: str) -> hardware.Machine:
    """Return the machine of a device, as it is usual but for what a table says."""
    name = DEVICES.get(device, device)
    if family == "nanotron" and f"{name}-efa-busy" in hardware.machines():
        name = f"{name}-efa-busy"  # a table of the same cluster tells more than its bandwidth
    machine = hardware.load(name)
    machine = replace(machine, inside=hardware.networks().get(inside, machine.inside))
    if gbits:
        ports = replace(machine.between, bandwidth=gbits * 1e9 / 8, shared=0.0)
        machine = replace(machine, between=ports)
    return replace(machine, gpus=gpus or machine.gpus)


# ---------------------------------------------------------------------- errors
def unchecked(*jobs: Job) -> str:
    """Return a sentence on features that no published run has; "" if `ERROR` holds."""
    kinds = dict.fromkeys(kind for job in jobs for kind, is_so in _kinds(job).items() if is_so)
    return f"no published run of this kind was checked: {', '.join(kinds)}" if kinds else ""


def _kinds(job: Job) -> dict[str, bool]:
    plan, device, between = job.plan, job.machine.device.name, job.machine.between.name
    is_apart = plan.num_ranks > job.machine.gpus
    return {
        f"on {device}": device not in RUNS_ON,
        f"software={job.software.name}": job.software.name not in RUNS_OF,
        job.dtype: job.dtype not in ("bf16", "fp16"),
        f"nodes over {between}": is_apart and between not in RUNS_OVER,
        f"more than {RUNS_UP_TO} devices": plan.num_ranks > RUNS_UP_TO,
        "experts": job.config.moe is not None,
        "cp": plan.cp > 1,
        "zero=2": plan.zero == 2,
        "zero=3 with pp": plan.zero == 3 and plan.pp > 1,
        "tp over nodes": job.spread(1, plan.tp) > 1,
        "tp_overlap": plan.tp_overlap,
        f"schedule={plan.schedule}": plan.schedule not in RUNS_IN,
        "fewer microbatches than ranks of pp": plan.microbatches < plan.pp,
    }


def errors(predicted: Iterable[float], measured: Iterable[float]) -> np.ndarray:
    """Return |predicted / measured - 1| of each."""
    return np.abs(np.array(list(predicted)) / np.array(list(measured)) - 1)


def constant(runs: Sequence[Run]) -> np.ndarray:
    """Return the seconds of each run by one utilisation of the peak, the best for all runs."""
    ideal = np.array([run.job.ideal(causal=True) for run in runs])
    measured = np.array([run.seconds for run in runs])
    # The mean error is a sum of lines in 1 / utilisation, so the best one makes some row exact.
    return min((ideal * m / i for i, m in zip(ideal, measured, strict=True)),
               key=lambda predicted: errors(predicted, measured).mean())  # fmt: skip


def choices(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Return, for each cell of 3 runs or more, the shares of the best throughput that the predicted
    choice and the rule of thumb reach."""
    found, cells = [], defaultdict(list)
    for run in runs:
        job = run.job
        same = job.config, job.machine, job.software, job.dtype, job.seq_len, job.tokens_of_step
        cells[run.source, run.gpus, str(same)].append(run)
    for cell in cells.values():
        if len(cell) < 3:
            continue
        best = min(run.seconds for run in cell)
        fit = [r for r in cell if r.held < footprint.room(r.job.machine.device)] or cell
        ours = min(fit, key=lambda run: run.predicted)
        thumb = min(fit, key=lambda r: (r.job.plan.tp * r.job.plan.pp, -r.job.microbatch))
        found.append((best / ours.seconds, best / thumb.seconds))
    return found


def report(runs: Sequence[Run]) -> str:
    """Return the table of errors by source and split."""
    lines = []
    runs, name = sorted(runs, key=lambda run: run.status != "ok"), attrgetter("source", "split")
    for (source, split), group in groupby(sorted(runs, key=name), key=name):
        every = list(group)
        some = [r for r in every if r.status == "ok"]
        lines.append(f"{source}, {split}: {len(some)} rows")
        if some:
            found, flat = _errors(some), errors(constant(some), [r.seconds for r in some])
            lines.append(f"  step time   {_spread(found)}")
            lines.append(f"  a constant  {_spread(flat)}")
        if sized := [r for r in some if r.memory]:
            found = errors((r.held for r in sized), [r.memory for r in sized])
            lines.append(f"  memory      {_spread(found)}")
        fit = [
            f"{np.mean([r.fits for r in every if r.status == status]):.0%} of {count} {status}"
            for status, count in Counter(r.status for r in every).items()
        ]
        lines.append(f"  predicted to fit: {', '.join(fit)}")
        if cells := choices(some):
            (ours, thumb), (worst, _) = np.mean(cells, axis=0), np.min(cells, axis=0)
            lines.append(
                f"  choice of {len(cells)} cells: {ours:.1%} of the best throughput, worst "
                f"{worst:.1%}; rule of thumb {thumb:.1%}"
            )
    for name, few in ("up to 64 devices", True), ("on more", False):
        if some := [r for r in runs if r.status == "ok" and (r.gpus <= 64) == few]:
            lines.append(f"all {len(some)} rows {name}: {_spread(_errors(some))}")
    return "\n".join(lines)


def _errors(runs: Sequence[Run]) -> np.ndarray:
    return errors((r.predicted for r in runs), [r.seconds for r in runs])


def _spread(found: np.ndarray) -> str:
    numbers = (found.mean(), np.median(found), np.quantile(found, 0.9), found.max())
    return "mean {:6.1%}   median {:6.1%}   90 % {:6.1%}   worst {:6.1%}".format(*numbers)


def main(names: Sequence[str]) -> None:
    """Print the report of the tables, and how many of their rows are left out, and why."""
    tables = [read_all(name) for name in names]
    runs = [run for found, _ in tables for run in found]
    left_out = sum((why for _, why in tables), Counter())
    left_out += Counter(f"not timed, but {run.status}" for run in runs if run.status != "ok")
    for why, count in left_out.most_common():
        print(f"rows left out: {count}: {why}")
    print(report(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
