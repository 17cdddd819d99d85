"""How true is it? Predictions beside runs that others have published, and beside simple rules.

    python -m minipar.sim.validate TABLE.csv ...

prints, for each source in the tables, the errors of the step time that `cost.py` predicts; the
errors of a *constant*; the errors of the memory; how many of the runs are predicted to fit; and how
good a plan the prediction would have chosen in each cell. A constant is the one utilisation that
fits all rows of a source best: a predictor must beat it to have shown anything. A cell has the runs
of one model on as many devices. There the rule of thumb is "least tp x pp, largest microbatch".

A table has a row per run, with the columns of tests/sim/data: the shape of the model, and machine,
software and plan by our names. An empty cell is unknown.
"""

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from minipar.model.llama import LlamaConfig
from minipar.parallel.plan import Plan
from minipar.sim import cost, footprint, hardware


@dataclass(frozen=True)
class Run:
    """A row: what was run, and what was measured of it; no bytes where nothing was."""

    name: str
    source: str
    split: str  # "tune" if something was fitted to it
    job: cost.Job
    seconds: float
    memory: float

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.job.plan.num_ranks

    @property
    def cell(self) -> tuple[str, ...]:
        """Return the facts that runs share between which a planner could choose."""
        job = self.job
        batch = job.plan.dp * job.plan.microbatches * job.microbatch
        same = job.config, job.machine, job.software, job.dtype, self.gpus, job.seq_len, batch
        return self.source, *map(str, same)

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
            flops -= 6 * c.num_layers * c.hidden_size * c.intermediate_size
        return flops * job.tokens_of_step / self.gpus / job.machine.device.peak[job.dtype]


def read(path: str | Path) -> list[Run]:
    """Return the runs of a table. Raises `ValueError` for a row that is none."""
    text = Path(path).read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    try:
        return [_run(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error!r} in the row before line {rows.line_num + 1}") from error


def _run(row: dict[str, str]) -> Run:
    def whole(name: str) -> int:
        return int(row[name])

    config = LlamaConfig(
        whole("vocab"), whole("hidden"), whole("ffn"), whole("layers"), whole("heads"),
        whole("kv_heads"), whole("head_dim"), max_seq_len=whole("seq"),
        tie_embeddings=row["tied"] == "1",
    )  # fmt: skip
    machine = hardware.load(row["machine"])
    if row["gbps"]:
        port = float(row["gbps"]) * 1e9 / 8
        machine = replace(machine, between=machine.between.with_ports(port))
    software, is_gated, is_fused = row["software"], row["gated"] == "1", row["flash"] == "1"
    job = cost.Job(
        config, Plan.parse(row["plan"]), machine, hardware.software(software), whole("seq"),
        whole("microbatch"), row["dtype"], is_gated, is_fused,
    )  # fmt: skip
    seconds, memory = float(row["step_seconds"]), 1e9 * float(row["memory_gb"] or 0)
    return Run(row["row_id"], row["source"], row["split"], job, seconds, memory)


# ---------------------------------------------------------------------- errors
def errors(predicted: Iterable[float], measured: Iterable[float]) -> np.ndarray:
    """Return |predicted / measured - 1| of each."""
    return np.abs(np.array(list(predicted)) / np.array(list(measured)) - 1)


def constant(runs: Sequence[Run]) -> np.ndarray:
    """Return what one utilisation of the peak, the best for these runs, would predict of each."""
    ideal, measured = np.array([r.ideal for r in runs]), np.array([r.seconds for r in runs])
    # The mean error is a sum of lines in 1 / utilisation, so the best one makes some row exact.
    return min((ideal * m / i for i, m in zip(ideal, measured, strict=True)),
               key=lambda predicted: errors(predicted, measured).mean())  # fmt: skip


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


def fitting(runs: Sequence[Run]) -> float:
    """Return the share of runs, all of which did fit, that are predicted to."""
    return float(np.mean([run.held < run.job.machine.device.usable_memory() for run in runs]))


def report(runs: Sequence[Run]) -> str:
    """Return the table of errors by source and split, the aims, and the worst rows."""
    lines = []
    for (source, split), group in groupby(sorted(runs, key=_set_of), key=_set_of):
        some = list(group)
        measured = [r.seconds for r in some]
        found = errors((r.predicted for r in some), measured)
        flat = errors(constant(some), measured)
        aim = f"mean below {flat.mean() / 2:.1%}, half of a constant's"
        lines.append(f"{source}, {split}: {len(some)} rows")
        lines.append(f"  step time   {_spread(found)}   aim: {aim}")
        lines.append(f"  a constant  {_spread(flat)}")
        for at in np.argsort(-found)[:3]:
            run, parts = some[at], cost.seconds(some[at].job)
            shown = f"{run.predicted:.2f} s predicted, {run.seconds:.2f} s measured"
            lines.append(f"    {run.name}: {shown}; mostly {max(parts, key=parts.get)}")
        if sized := [r for r in some if r.memory]:
            found = errors((r.held for r in sized), [r.memory for r in sized])
            lines.append(f"  memory      {_spread(found)}   aim: median 8%")
        lines.append(f"  predicted to fit: {fitting(some):.0%}")
        if cells := choices(some):
            (ours, thumb, rank), (worst, _, lowest) = np.mean(cells, axis=0), np.min(cells, axis=0)
            lines.append(
                f"  choice of {len(cells)} cells: {ours:.1%} of the best throughput, worst "
                f"{worst:.1%}; rule of thumb {thumb:.1%}; aim: 95%, and never below that; rank "
                f"correlation {rank:.2f}, lowest {lowest:.2f}"
            )
    for name, few, aim in (("up to 64 devices", True, 8), ("on more", False, 15)):
        if some := [r for r in runs if (r.gpus <= 64) == few]:
            found = errors((r.predicted for r in some), [r.seconds for r in some])
            lines.append(f"all {len(some)} rows {name}: {_spread(found)}   aim: median {aim}%")
    return "\n".join(lines)


def _set_of(run: Run) -> tuple[str, str]:
    return run.source, run.split


def _spread(found: np.ndarray) -> str:
    numbers = (found.mean(), np.median(found), np.quantile(found, 0.9), found.max())
    return "mean {:6.1%}   median {:6.1%}   90 % {:6.1%}   worst {:6.1%}".format(*numbers)


if __name__ == "__main__":
    print(report([run for path in sys.argv[1:] for run in read(path)]))
