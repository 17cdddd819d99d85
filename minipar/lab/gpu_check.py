"""`make gpu-check`: what only a machine with GPUs can show.

First `make` runs the law of parity (tests/law) on CUDA tensors. Then this file calibrates the
machine, as `minipar calibrate` does, and trains a real Llama: on one GPU, then by a plan of every
kind on all GPUs (or on two ranks that share one). It writes rows to
``notebooks/assets/measured/gpu.json``. A row says tokens/s, FLOP/s, peak memory, and how much of
the communication that NCCL reports is hidden. A step of each plan is drawn. Notebook 13 simulates
the steps of one GPU.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minipar.comm.clock import synchronise
from minipar.comm.mesh import Mesh
from minipar.lab import draw
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.observe import timeline
from minipar.observe.timeline import Timeline
from minipar.parallel import compose
from minipar.parallel.plan import Plan
from minipar.ranks import backends
from minipar.ranks.launch import RankError, Ranks
from minipar.sim import calibrate
from minipar.train.optim import make_optimizer
from minipar.train.precision import Precision
from minipar.train.step import train_step

TALKING = (
    *("dp={0}", "dp={0},zero=1", "dp={0},zero=3", "tp={0},sequence_parallel", "cp={0}"),
    *("tp={0},sequence_parallel,tp_overlap", "pp={0},microbatches=8", "ep={0}"),
)
"""One plan of each kind, on all GPUs."""
MACHINE = "gpu_machine.toml"


ALONE = (("none", "llama-3.2-1b", 4, 2048), ("full", "llama-3.2-1b", 2, 2048))
"""Runs of one GPU: all that fits, and then half of it with everything recomputed."""
KEYS = "recompute", "preset", "batch_size", "seq_len"


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default="notebooks/assets/measured", help="a folder")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    asked = parser.parse_args(argv)
    gpus, folder = torch.cuda.device_count(), asked.out
    if not gpus and not asked.rehearse:
        parser.error("there is no GPU here; --rehearse runs on the CPU")
    folder.mkdir(parents=True, exist_ok=True)
    runs = [("dp=1", *how) for how in ALONE]
    for form in TALKING:
        plan = Plan.parse(text := form.format(max(gpus, 2)))
        model = "tiny-moe" if plan.ep > 1 else "medium"
        runs.append((text, "none", model, 8 * plan.dp * plan.ep, 1024))
    if asked.rehearse:
        runs = [(text, recompute, "tiny", size, 64) for text, recompute, _, size, _ in runs[:3]]
    name = name_of(backends.compute_device())
    rows = [dict(check="machine", torch=torch.__version__, gpus=gpus, device=name)]

    def add(known: dict[str, Any], measure: Callable[..., dict[str, Any]], *given: Any) -> None:
        try:
            rows.append(known | measure(*given))
        except (RankError, ValueError, RuntimeError) as failed:  # too little memory, for example
            rows.append(known | {"message": str(failed), "ok": False})
        (folder / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        print(rows[-1], flush=True)

    add({"check": "calibrate"}, calibrated, folder)
    for text, *how in runs:
        known = {"check": "train", "plan": text, **dict(zip(KEYS, how, strict=True))}
        add(known, measure, text, *how, folder)
    failed = [row.get("plan", row["check"]) for row in rows if row.get("ok") is False]
    where = f"{gpus} GPUs" if gpus else "the CPU: nothing of a GPU"
    print(f"checked on {where}; failed: {'; '.join(failed) or 'nothing'}")
    return int(bool(failed))


def calibrated(folder: Path) -> dict[str, Any]:
    """Measure this machine as `minipar calibrate` does, on one device."""
    (folder / MACHINE).unlink(missing_ok=True)
    config = calibrate.CalibrateConfig(str(folder / MACHINE), ranks=1)
    device = calibrate.run(config).device
    return {"peak": device.peak, "memory_bandwidth": device.memory_bandwidth}


def measure(
    text: str, recompute: str, preset: str, batch_size: int, seq_len: int, folder: Path
) -> dict[str, Any]:
    """Train by a plan in fresh processes; return how fast, and how much is hidden. Draw a step."""
    gpus, shape = torch.cuda.device_count(), PRESETS[preset]
    precision = "bf16" if gpus else "float32"  # bf16 has float32 masters
    plan = Plan.parse(f"{text},precision={precision},checkpointing={recompute}")
    n = plan.num_ranks
    backend = "nccl" if gpus >= n else "gloo"  # each rank a GPU, if there are as many
    with Ranks(n, backend=backend, timeout=300, sink=None) as ranks:
        row, step = ranks.run(train, plan, shape, batch_size, seq_len)[0]
    flops = shape.flops_per_token(seq_len)  # the model's own count
    row["tflops_per_device"] = flops * row["tokens_per_second"] / 1e12 / max(1, min(gpus, n))
    row["communication_ms"] = 1e3 * sum(o.total for o in step.overlap()) / n
    row["hidden_fraction"] = step.hidden_fraction if n > 1 else None
    kinds = {span.kind for span in step}
    row["ok"] = {"forward", "backward"} <= kinds and (n == 1 or "comm" in kinds)
    if n == 1:
        return row
    step.label = f"measured, {name_of(backends.compute_device())}, {preset}, {text}"
    if 0 < gpus < n:
        step.label += "; ranks share a GPU and talk through the host"
    name = f"gpu_timeline_{text.replace(',', '_').replace('=', '')}.png"
    draw.save(draw.timeline(step), folder / name)
    return row


def train(
    plan: Plan, shape: LlamaConfig, batch_size: int, seq_len: int
) -> tuple[dict[str, Any], Timeline]:
    """Train on random tokens; return how fast, and a step. Called on every rank."""
    mesh, device = Mesh(**plan.mesh_sizes()), backends.compute_device()
    model = Llama(shape, seed=0).to(device)
    optimizer = partial(make_optimizer, lr=1e-3, weight_decay=0.1)
    strategy = compose.apply(model, mesh, plan, optimizer)
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (batch_size, seq_len + 1), generator=stream)
    rows = mesh.joint("dp", "ep")  # its ranks have different sequences
    parts = tokens.to(device).tensor_split(rows.size)[rows.rank].tensor_split(plan.microbatches)
    batch = [strategy.shard((t[:, :-1], t[:, 1:].contiguous())) for t in parts]
    precision = Precision(plan.autocast, device.type)

    def step() -> float:
        start = time.perf_counter()
        parts = (model, [strategy], strategy.optimizer, batch, strategy.axis)
        train_step(*parts, max_norm=1.0, precision=precision)
        synchronise(device)
        return time.perf_counter() - start

    seconds = statistics.median([step() for _ in range(11)][3:])  # the first three warm up
    row = {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": batch_size * seq_len / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }
    with timeline.record(model) as found:
        step()
    return row, found.gather(mesh.world).shifted()


def name_of(device: torch.device) -> str:
    """Return the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    from minipar.lab import gpu_check  # by its name, which the ranks can import, too

    sys.exit(gpu_check.main())
