"""`make gpu-check`: what a machine without a GPU cannot prove, measured on one that has some.

Three checks, each a few rows of ``notebooks/assets/measured/gpu.json``:

- parity: every strategy, in float32 and bfloat16, on CUDA tensors, against one process;
- utilisation: single-GPU training of a real Llama, in FLOP/s and as a share of what a large matrix
  product reaches on the same device;
- timeline: one recorded step, whose spans come from the profiler, drawn beside the numbers.

``--rehearse`` goes through all of it on the CPU with a tiny model: to test this file, not a GPU.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from minipar.comm import backends, timeline
from minipar.comm.launch import Ranks
from minipar.comm.mesh import Mesh
from minipar.lab import draw
from minipar.model.llama import PRESETS, Llama, token_loss
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import ddp
from minipar.train.data import share
from minipar.train.peak import matmul_rate, synchronise
from minipar.train.step import train_step

NUM_TARGETS = 128  # of the whole batch in the parity check: 4 sequences of 32
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference of a gradient, relative to its largest element: rounding, not an error."""


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
    with Ranks(2, backend=backend, timeout=120, sink=None) as ranks:
        rows = ranks.run(parity)[0]
    with Ranks(1, timeout=120, sink=None) as one:
        measured, recorded = one.run(utilisation, check)[0]
    rows.append(measured)
    folder = Path(check.out)
    folder.mkdir(parents=True, exist_ok=True)
    draw.save(draw.timeline(recorded), folder / "gpu_timeline.png")
    rows.append(
        {
            "check": "timeline",
            "milliseconds": 1e3 * recorded.duration,
            "spans": {kind: len(recorded.select(kind=kind)) for kind in sorted(kinds(recorded))},
        }
    )
    (folder / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        print(row)
    print(f"written into {folder}/: gpu.json, gpu_timeline.png")
    return int(any(row.get("ok") is False for row in rows))


def kinds(recorded: timeline.Timeline) -> set[str]:
    """Return the kinds of work that occur."""
    return {span.kind for span in recorded}


# ---------------------------------------------------------------------- on the ranks
def parity() -> list[dict[str, Any]]:
    """Compare the gradients of every version of ddp with those of one process, in both dtypes."""
    mesh = Mesh(dp=2)
    device = backends.compute_device()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (4, 33), generator=generator).to(device)
    mine = share(torch.arange(4), mesh.rank, mesh.size).to(device)
    rows = []
    for dtype, tolerance in TOLERANCE.items():
        serial = gradients(dtype, tokens, device, lambda model: None)
        for version in ddp.VERSIONS:

            def attach(model: Llama, version=version) -> ddp.Strategy:
                return ddp.apply(model, mesh.dp, version=version, average=False)

            parallel = gradients(dtype, tokens[mine], device, attach)
            pairs = [(ours.float(), parallel[name].float()) for name, ours in serial.items()]
            error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
            rows.append(
                {
                    "check": "parity",
                    "strategy": f"ddp, {version}",
                    "device": device.type,
                    "dtype": dtype,
                    "error": error,
                    "tolerance": tolerance,
                    "ok": error <= tolerance,
                }
            )
    return rows


def gradients(
    dtype: str, tokens: torch.Tensor, device: torch.device, attach: Callable
) -> dict[str, torch.Tensor]:
    """Return the gradients of a tiny Llama for the summed loss over `tokens` [B, T+1]."""
    model = Llama(PRESETS["tiny"]).to(device, getattr(torch, dtype))
    strategy = attach(model)
    for _ in range(2):  # the first step of the overlapped version is a rehearsal
        model.zero_grad()
        (token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / NUM_TARGETS).backward()
        if strategy is not None:
            strategy.finish_backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def utilisation(check: GpuCheck) -> tuple[dict[str, Any], timeline.Timeline]:
    """Train on one device; return FLOP/s by the model's own count, and one recorded step."""
    mesh, device = Mesh(), backends.compute_device()
    shape = PRESETS[check.preset]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Llama(shape).to(device, dtype)
    checkpoint_activations(model, "selective")
    tokens = torch.randint(shape.vocab_size, (check.batch_size, check.seq_len + 1), device=device)
    batch = [(tokens[:, :-1], tokens[:, 1:].contiguous())]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    for _ in range(3 + check.steps):
        synchronise(device)
        start = time.perf_counter()
        train_step(model, [], optimizer, batch, mesh.dp, max_norm=1.0)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    with timeline.record(model) as recorded:
        train_step(model, [], optimizer, batch, mesh.dp, max_norm=1.0)
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
