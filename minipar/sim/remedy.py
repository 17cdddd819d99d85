"""Out of memory: what was held, and the three cheapest changes with which it would have fitted.

The changes are plans of `planner.candidates` on as many ranks, with the same batch: first those
that change one flag, the fastest of them first, and those of another mesh last. Each is traced,
without values, until three hold no more than 90 % of what the rank had when it failed. How slow
they are is predicted for a typical GPU, or processor, and not for this one.
"""

import contextlib
import json
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from minipar.parallel.plan import MESH, Plan
from minipar.sim import cost, footprint, hardware, planner
from minipar.sim.trace import trace
from minipar.train import out_of_memory
from minipar.train.checkpoint import available
from minipar.train.config import IN_A_PLAN, TrainConfig

GB = 1e9
SHARE = 0.9
"""Of the memory that there was, what a change may take: allocators need more than tensors."""
MOST_TRACES = 10


def page_of(config: TrainConfig, folder: Path) -> str:
    """Return the page for a run in `folder`; one line where there is no room to write it."""
    try:
        noted = json.loads((folder / out_of_memory.FILE).read_text(encoding="utf-8"))
        saved = available(folder / "checkpoints")
        return f"\n{page(config, noted, str(folder) if saved else '')}\n"
    except (OSError, RuntimeError, MemoryError, KeyError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else type(error).__name__
        return f"\nwhat would fit cannot be said: {why}\n"


def page(config: TrainConfig, noted: dict[str, Any], start: str = "") -> str:
    """Return the page for a run of `config` that has failed.

    Args:
        noted: what `train.out_of_memory` has noted down: "rank", bytes "held" and "free".
        start: the run to resume, if it has a checkpoint: then changes are flags beside --resume.
    """
    held, free = noted["held"], noted["free"]
    rows = {**held, "still free": free}
    lines = [f"What {noted['rank']} held at that moment, in GB:"]
    lines += [f"  {part:12}{num_bytes / GB:7.2f}" for part, num_bytes in rows.items()]
    limit = SHARE * (sum(held.values()) + free)
    base = _job(config)
    mine = _peak(base, config)
    parts = ", ".join(f"{part} {n / GB:.2f}" for part, n in mine.items() if n >= 0.005 * GB)
    lines.append(
        f"A step needs {sum(mine.values()) / GB:.2f} GB of tensors at its peak (its code, traced): "
        f"{parts or 'next to nothing'}"
    )
    found = _changes(base, config, min(limit, SHARE * sum(mine.values())))
    if not found:
        lines.append(
            f"No plan on {config.num_ranks} ranks takes less than {limit / GB:.2f} GB: use more "
            "ranks, a shorter --seq-len, a smaller --batch-size or --preset"
        )
        return "\n".join(lines)
    lines.append(
        f"Changes that fit into {limit / GB:.2f} GB (traced, too), the cheapest first; seconds are "
        f"predicted, for {base.machine.name}:"
    )
    before = sum(cost.seconds(base).values())
    for job, num_bytes in found:
        new = _configured(config, job)
        slower = sum(cost.seconds(job).values()) / before
        changed = " ".join(_flags(new, config))
        whole = [f"--resume {shlex.quote(start)}"] if start else _flags(config, TrainConfig(), new)
        lines += [
            f"  {changed}: {num_bytes / GB:.2f} GB, {slower:.2f} times the seconds",
            f"    minipar train {' '.join([*whole, changed])}",
        ]
    return "\n".join(lines)


def _job(config: TrainConfig) -> cost.Job:
    plan = config.as_plan()
    on_gpu = torch.cuda.is_available() and config.backend != "link"
    each = -(-config.batch_size // (config.data_ranks() * plan.microbatches))
    dtype = "fp32" if plan.precision == "float32" and not on_gpu else "bf16"
    machine = hardware.load("h100" if on_gpu else "this-cpu")
    model, software = config.model_config(), hardware.software("minipar")
    return cost.Job(model, plan, machine, software, config.seq_len, each, dtype)


def _peak(job: cost.Job, config: TrainConfig) -> dict[str, int]:
    """Return the bytes of the fullest rank at its fullest, by category."""
    traces = trace(job.config, job.plan, sequences=job.microbatch, seq_len=job.seq_len)
    wide = getattr(torch, config.dtype).itemsize / 4  # a trace has weights in float32
    return {part: int(wide * num_bytes) for part, num_bytes in sorted(traces.at_peak().items())}


def _changes(base: cost.Job, config: TrainConfig, limit: float) -> list[tuple[cost.Job, float]]:
    """Return up to three plans that fit, fastest first, and their bytes: few words change."""
    jobs = []
    for job in planner.candidates(base, config.num_ranks, config.batch_size):
        words = _changed(base.plan, job.plan)
        # The closed form leaves out what is clear; what fits is for the trace to say.
        if (
            words
            and planner.problem(job) is None
            and sum(footprint.memory(job).values()) < 2 * limit
        ):
            order = bool(words & {*MESH}), len(words), sum(cost.seconds(job).values())
            jobs.append((order, words, job))
    found: dict[frozenset, tuple[cost.Job, float]] = {}
    traces = MOST_TRACES
    for _, words, job in sorted(jobs, key=lambda entry: entry[0]):
        if len(found) == 3 or not traces:
            break
        if any(less <= words for less in found):
            continue  # less of a change does, too
        with contextlib.suppress(ValueError):  # it may not be legal beside other flags
            _configured(config, job).check()
            traces -= 1
            num_bytes = sum(_peak(job, config).values())
            if num_bytes <= limit:
                found[words] = job, num_bytes
    return sorted(found.values(), key=lambda pair: sum(cost.seconds(pair[0]).values()))


def _changed(before: Plan, after: Plan) -> frozenset[str]:
    words = {*MESH, *IN_A_PLAN.values()}
    return frozenset(w for w in words if getattr(before, w) != getattr(after, w))


def _configured(config: TrainConfig, job: cost.Job) -> TrainConfig:
    """Return the configuration with the plan of `job`."""
    sizes = {axis: size for axis, size in job.plan.mesh_sizes().items() if size > 1}
    values = {flag: getattr(job.plan, word) for flag, word in IN_A_PLAN.items()}
    if sizes != {axis: size for axis, size in config.mesh_sizes().items() if size > 1}:
        values["mesh"] = ",".join(f"{axis}={size}" for axis, size in sizes.items()) or "dp=1"
    return replace(config, **values)


def _flags(config: TrainConfig, usual: TrainConfig, but: TrainConfig | None = None) -> list[str]:
    """Return the flags in which `config` differs from `usual`, where `but` does not from it."""
    flags = []
    for field in fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if value == getattr(usual, field.name) or field.name in ("resume", "plan"):
            continue
        if but is not None and getattr(but, field.name) != value:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name} {shlex.quote(str(value))}")
    return flags
