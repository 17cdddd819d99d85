"""`make gpu-check`: what a machine without a GPU cannot prove, measured on one that has some.

Three checks, each a few rows of ``notebooks/assets/measured/gpu.json``:

- parity: training by plans of every kind, in float32 and mixed with bf16, on CUDA tensors, against
  one process: losses and gradient norms of all steps;
- utilisation: single-GPU training of a real Llama, in FLOP/s and as a share of what a large matrix
  product reaches on the same device;
- timeline: one recorded step, whose spans come from the profiler, drawn beside the numbers.

``--rehearse`` goes through all of it on the CPU with a tiny model: to test this file, not a GPU.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import minipar
from minipar.comm import backends, timeline
from minipar.comm.launch import RankError, Ranks
from minipar.comm.mesh import Mesh
from minipar.lab import draw
from minipar.model.llama import PRESETS, Llama
from minipar.model.recompute import checkpoint_activations
from minipar.train import trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.peak import matmul_rate, synchronise
from minipar.train.precision import Precision
from minipar.train.step import train_step

PLANS = (
    *("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"),
    *("tp=2", "tp=2,sequence_parallel", "tp=2,sequence_parallel,tp_overlap"),
    *("cp=2", "cp=2,context=gather", "cp=2,context=ulysses", "pp=2,microbatches=2"),
)
TALKS_IN_PAIRS = ("tp=2,sequence_parallel,tp_overlap", "cp=2", "pp=2,microbatches=2")
"""Plans that send from rank to rank, which gloo does not do between tensors on a GPU."""
TOLERANCE = {"float32": 1e-4, "bf16": 2e-2}
"""Largest difference of a loss or a gradient norm, relative: rounding, not an error."""
SMALL = TrainConfig(
    data=str(Path(minipar.__file__).parent),
    steps=3,
    batch_size=4,
    seq_len=32,
    eval_batches=1,
    sample_tokens=0,
)


@dataclass(frozen=True)
class GpuCheck:
    """Check parity, utilisation and the timeline on this machine's GPU, and write what came out."""

    out: str = "notebooks/assets/measured"
    """Folder for gpu.json and gpu_timeline.png."""
    preset: str = "llama-3.2-1b"
    """The model whose training is timed."""
    batch_size: int = 4
    """Sequences per step."""
    seq_len: int = 2048
    """Tokens per sequence."""
    steps: int = 10
    """Timed steps."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in backward, where they do not fit otherwise."""
    rehearse: bool = False
    """Run on the CPU with a tiny model, to test the check itself."""


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if parity fails, 2 if there is no GPU."""
    check = tyro.cli(GpuCheck, args=argv)
    if check.rehearse:
        check = replace(check, preset="tiny", batch_size=2, seq_len=64, steps=2)
    elif not torch.cuda.is_available():
        print("minipar: error: there is no GPU here; --rehearse runs on the CPU", file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = "nccl" if gpus >= 2 else "gloo"
    plans = [plan for plan in PLANS if gpus != 1 or plan not in TALKS_IN_PAIRS]
    plans = plans[::5] if check.rehearse else plans
    with Ranks(1, timeout=120, sink=None) as one, tempfile.TemporaryDirectory() as runs:
        measured, recorded = one.run(utilisation, check)[0]
        with Ranks(2, backend=backend, timeout=120, sink=None) as ranks:
            rows = parity(one, ranks, plans, runs)
    rows.append(measured)
    folder = Path(check.out)
    folder.mkdir(parents=True, exist_ok=True)
    draw.save(draw.timeline(recorded), folder / "gpu_timeline.png")
    rows.append(
        {
            "check": "timeline",
            "milliseconds": 1e3 * recorded.duration,
            "spans": dict(sorted(Counter(span.kind for span in recorded).items())),
        }
    )
    (folder / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        print(row)
    print(f"written into {folder}/: gpu.json, gpu_timeline.png")
    return int(any(row.get("ok") is False for row in rows))


# ---------------------------------------------------------------------- parity
def parity(one: Ranks, two: Ranks, plans: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """Train by each plan on `two` ranks, and compare every step with that of `one` process."""
    rows = []
    for precision, tolerance in TOLERANCE.items():
        alone = replace(SMALL, mesh="dp=1", precision=precision)
        expected = one.run(train, alone, f"{folder}/{precision}")[0]
        for plan in plans:
            config = replace(SMALL, plan=f"{plan},precision={precision}")
            row = {"check": "parity", "plan": plan, "precision": precision, "tolerance": tolerance}
            try:
                found = two.run(train, config, f"{folder}/{precision}-{plan}")[0]
                error = max(map(difference, expected, found))
                row |= {"error": error, "ok": error <= tolerance}
            except RankError as failed:
                row |= {"error": None, "ok": False, "message": str(failed)}
            rows.append(row)
    return rows


def train(config: TrainConfig, folder: str) -> list[dict[str, Any]]:
    """Train as `minipar train` does; return the metrics of all steps. Called on every rank."""
    trainer.train(config, folder)
    return read(Path(folder) / "metrics.jsonl")


def difference(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return by how much a step differs from what is expected of it, relative."""
    pairs = [(expected[key], found[key]) for key in ("loss", "grad_norm")]
    return max(abs(a - b) / abs(a) for a, b in pairs)


# ---------------------------------------------------------------------- on one device
def utilisation(check: GpuCheck) -> tuple[dict[str, Any], timeline.Timeline]:
    """Train on one device; return FLOP/s by the model's own count, and one recorded step."""
    mesh, device = Mesh(), backends.compute_device()
    shape = PRESETS[check.preset]
    precision = Precision("bf16" if device.type == "cuda" else "float32", device)
    dtype = precision.dtype or torch.float32
    model = Llama(shape).to(device)
    checkpoint_activations(model, check.recompute)
    tokens = torch.randint(shape.vocab_size, (check.batch_size, check.seq_len + 1), device=device)
    batch = [(tokens[:, :-1], tokens[:, 1:].contiguous())]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    for _ in range(3 + check.steps):
        synchronise(device)
        start = time.perf_counter()
        train_step(model, [], optimizer, batch, mesh.dp, max_norm=1.0, precision=precision)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    with timeline.record(model) as recorded:
        train_step(model, [], optimizer, batch, mesh.dp, max_norm=1.0, precision=precision)
        synchronise(device)
    recorded = recorded.shifted()
    recorded.label = f"measured, {name_of(device)}, {check.preset}, {dtype}"
    step = statistics.median(seconds[3:])
    num_tokens = check.batch_size * check.seq_len
    rate = shape.flops_per_token(check.seq_len) * num_tokens / step
    peak = matmul_rate(device, dtype, size=8192 if device.type == "cuda" else 512)
    row = {
        "check": "utilisation",
        "device": name_of(device),
        "preset": check.preset,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens_per_step": num_tokens,
        "step_ms": 1e3 * step,
        "tokens_per_second": num_tokens / step,
        "tflops": rate / 1e12,
        "matmul_tflops": peak / 1e12,
        "share_of_matmul": rate / peak,
    }
    return row, recorded


def name_of(device: torch.device) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    from minipar.lab import gpu_check  # by its name, which the ranks can import, too

    sys.exit(gpu_check.main())
