"""How true is it? Predictions beside runs that others have published, and beside simple rules.

    python -m minipar.sim.validate [--fit] TABLE.csv ...

prints, for each source in the tables, the errors of the step time that `cost.py` predicts; those of
a *constant*, the source's own best utilisation of the peak for all of its rows, which a predictor
must beat to have shown anything; the errors of the memory; and how good a plan the prediction would
have chosen in each cell (runs of one model on as many devices), beside the rule of thumb "least tp
x pp, largest microbatch". `--fit` prints the numbers of `software.toml` that fit best instead: to
rows whose column `split` says ``tune``, and to no others.

A table has a row per run, with the columns that `read` takes; sequences are counted, not tokens, in
`microbatch` and `global_batch`. What is empty is unknown, and taken as usual for its family.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from minipar.model.llama import LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.parallel.plan import Plan
from minipar.sim import cost, fit, hardware

FAMILIES = {"nanotron": "nanotron", "llm-foundry": "llm-foundry", "megatron": "megatron"}
"""By the beginning of a table's `framework`; "any" for others."""
NETWORKS = {"nanotron": "-efa-busy"}
"""Where a table of the same cluster tells more of its network than its bandwidth."""
SCHEDULES = {"": "1f1b", "none": "1f1b", "interleaved": "interleaved_1f1b"}
SCHEDULES |= {"zb-1p": "zb_h1", "zb-2p": "zb_h2", "zb-v": "zb_v"}
FITTED = ("host", "host_tp", "host_across", "passes", "attention", "exposed", "fixed")
START = {"host": 1e-3, "host_tp": 0.3e-3, "host_across": 1e-3, "passes": 1.5, "attention": 2}
START |= {"exposed": 0.3, "fixed": 0.02}


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

    @property
    def predicted(self) -> float:
        """Seconds of a step."""
        return sum(cost.seconds(self.job).values())

    @property
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
        tokens = job.plan.dp * job.plan.microbatches * job.microbatch * job.seq_len
        return flops * tokens / self.gpus / job.machine.device.peak[job.dtype]


def read(path: str | Path) -> list[Run]:
    """Return the runs of a table that went well. Raises `ValueError` for a row that is none."""
    runs = []
    for row in fit.rows_of(path):
        try:
            if row["status"] == "ok":
                runs.append(_run(row))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            name = row.get("row_id") or len(runs) + 1
            raise ValueError(f"{path}: row {name}: {error}") from None
    return runs


def _run(row: dict[str, str]) -> Run:
    def whole(name: str, default: int = 1) -> int:
        return int(float(row[name])) if row[name] else default

    family = next((v for k, v in FAMILIES.items() if row["framework"].startswith(k)), "any")
    moe = None
    if row["experts"]:
        moe = MoEConfig(
            whole("experts"), whole("top_k"), whole("moe_ffn"), whole("shared_experts", 0)
        )
    config = LlamaConfig(
        whole("vocab"), whole("hidden"), whole("ffn"), whole("layers"), whole("heads"),
        whole("kv_heads"), whole("head_dim"), max_seq_len=whole("seq"),
        tie_embeddings=row["tied"] == "1", moe=moe,
    )  # fmt: skip
    dp, tp, micro = whole("dp"), whole("tp"), whole("microbatch")
    plan = Plan(
        dp=dp, tp=tp, pp=whole("pp"), cp=whole("cp"), zero=whole("zero", 0),
        sequence_parallel=row["sp"] != "0" and tp > 1,
        schedule=SCHEDULES.get(row["schedule"], row["schedule"]),
        stages_per_rank=whole("virtual_stages"),
        microbatches=whole("microbatches", max(1, whole("global_batch") // (dp * micro))),
        checkpointing=row["recompute"] or "none",
    )  # fmt: skip
    flash = row["flash"] == "1" or (not row["flash"] and row["dtype"] != "fp16")
    machine = _machine(row["device"], family, row["inter_gbps_per_gpu"], whole("gpus_per_node", 8))
    job = cost.Job(
        config, plan, machine, hardware.software(family), whole("seq"), micro, row["dtype"],
        row["gated"] != "0", flash, whole("ep"),
    )  # fmt: skip
    numbers = [float(row[name] or 0) for name in ("step_seconds", "memory_gb")]
    return Run(row["row_id"], row["source"], row["split"], job, whole("gpus"), numbers[0],
               numbers[1] * 1e9)  # fmt: skip


@cache
def _machine(device: str, family: str, gbits: str, gpus: int) -> hardware.Machine:
    name = device.replace("-sxm", "").replace("-80", "").replace("-500w", "")
    machine = hardware.load(name + NETWORKS.get(family, ""))
    if gbits:
        bandwidth = float(gbits) * 1e9 / 8
        machine = replace(machine, between=replace(machine.between, bandwidth=bandwidth))
    return replace(machine, gpus=gpus)


# ---------------------------------------------------------------------- errors
def errors(predicted: Iterable[float], measured: Iterable[float]) -> np.ndarray:
    """Return |predicted / measured - 1| of each."""
    return np.abs(np.array(list(predicted)) / np.array(list(measured)) - 1)


def constant(runs: Sequence[Run]) -> np.ndarray:
    """Return what one utilisation of the peak, the median of these runs, would predict of each."""
    ideal = np.array([run.ideal for run in runs])
    return ideal / np.median(ideal / [run.seconds for run in runs])


def choices(
    runs: Sequence[Run], headroom: float = cost.HEADROOM
) -> list[tuple[float, float, float]]:
    """Return of each cell of 3 runs or more: share of the best measured throughput that the
    prediction's choice and the rule of thumb's have; rank correlation of predicted and measured."""
    found = []
    for _, group in groupby(sorted(runs, key=lambda r: r.cell), key=lambda r: r.cell):
        cell = list(group)
        if len(cell) < 3:
            continue
        best = min(run.seconds for run in cell)
        fit = [r for r in cell if r.held < headroom * r.job.machine.device.memory] or cell
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
    by_family = {run.job.software.name for run in runs}
    lines = []
    for family in sorted(by_family):
        own = [run for run in runs if run.job.software.name == family]
        lines.append(f"{family}: {_shown(best_software(own))}")
    keys = [key for key in FITTED if key != "host_across"]
    everywhere = [replace(r, job=replace(r.job, software=hardware.software("any"))) for r in runs]
    return "\n".join([*lines, f"any: {_shown(best_software(everywhere, keys))}"])


def _shown(numbers: dict[str, float]) -> str:
    return ", ".join(f"{key} = {value:.3g}" for key, value in numbers.items())


def main(arguments: Sequence[str]) -> None:
    """Print the report of the tables, or what fits them."""
    names = [name for name in arguments if name != "--fit"]
    if not names:
        raise SystemExit(f"usage: {__doc__.splitlines()[2].strip()}")
    try:
        runs = [run for name in names for run in read(name)]
        show: Callable[[list[Run]], str] = fitted if "--fit" in arguments else report
        print(show(runs))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
