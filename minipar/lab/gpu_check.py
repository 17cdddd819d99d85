"""`make gpu-check`: what only a machine with GPUs can show.

First `make` runs the rows of tests/law/table.py on CUDA tensors. Then this file trains as `minipar
train` does: on one GPU, then by a plan of every kind on all GPUs (or on two ranks that share one).
It writes rows to ``notebooks/assets/measured/gpu.json``. A row says tokens/s, FLOP/s, peak memory,
and how much of the communication that NCCL reports is hidden. A run saves its model once, in
``runs/``, and deletes it: Llama 3.2 1B takes 20 GB of disk. Notebook 13 simulates the steps of one
GPU.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minipar.parallel.plan import Plan
from minipar.ranks.backends import pick_backend
from minipar.ranks.launch import RankError, Ranks
from minipar.train import trainer
from minipar.train.config import TrainConfig

TALKING = (
    *("dp={0}", "dp={0},zero=1", "dp={0},zero=3", "tp={0},sequence_parallel", "cp={0}"),
    *("tp={0},sequence_parallel,tp_overlap", "pp={0},microbatches=8", "ep={0}"),
)
"""One plan of each kind, on all GPUs."""
ALONE = (("none", "llama-3.2-1b", 4, 2048), ("full", "llama-3.2-1b", 2, 2048))
"""Runs of one GPU: all that fits, and then half of it with everything recomputed."""
KEYS = "recompute", "preset", "batch_size", "seq_len"
STEPS = 12


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default="notebooks/assets/measured", help="a folder")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    asked = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if not gpus and not asked.rehearse:
        parser.error("there is no GPU here; --rehearse runs on the CPU")
    runs = [("dp=1", *how) for how in ALONE]
    for form in TALKING:
        plan = Plan.parse(text := form.format(max(gpus, 2)))
        model = "tiny-moe" if plan.ep > 1 else "medium"
        runs.append((text, "none", model, 8 * plan.dp * plan.ep, 1024))
    if asked.rehearse:
        runs = [(text, recompute, "tiny", size, 64) for text, recompute, _, size, _ in runs[:3]]
    device = torch.cuda.get_device_name() if gpus else "CPU"
    rows = [dict(check="machine", torch=torch.__version__, gpus=gpus, device=device)]
    for text, *how in runs:
        known = dict(zip(KEYS, how, strict=True))
        try:
            found = measure(TrainConfig(plan=text, precision="bf16" if gpus else None, **known))
        except (RankError, ValueError) as failed:  # too little memory, for example
            found = {"message": str(failed), "ok": False}
        rows.append({"check": "train", "plan": text, **known, **found})
        (asked.out / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        print(rows[-1], flush=True)
    failed = [row["plan"] for row in rows if row.get("ok") is False]
    where = f"{gpus} GPUs" if gpus else "the CPU: nothing of a GPU"
    print(f"checked on {where}; failed: {'; '.join(failed) or 'nothing'}")
    return int(bool(failed))


def measure(config: TrainConfig) -> dict[str, Any]:
    """Train in fresh processes; return how fast, and how much is hidden."""
    config = replace(config, steps=STEPS, sample_tokens=0)
    config.check()
    n, gpus = config.num_ranks, torch.cuda.device_count()
    Path(config.out).mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=config.out) as folder,
        Ranks(n, backend=pick_backend(n), timeout=300, sink=None) as ranks,
    ):
        report = ranks.run(trainer.train, config, folder)[0]
    speed = config.batch_size * config.seq_len / report.step_seconds
    flops = config.model_config().flops_per_token(config.seq_len)  # the model's own count
    return {
        "step_ms": 1e3 * report.step_seconds,
        "tokens_per_second": speed,
        "peak_bytes": max(report.peak_memory) if gpus else None,
        "tflops_per_device": flops * speed / 1e12 / max(1, min(gpus, n)),
        "communication_ms": 1e3 * report.communication_seconds,
        "hidden_fraction": report.hidden_fraction,
        "ok": n == 1 or report.communication_seconds > 0,
    }


if __name__ == "__main__":
    sys.exit(main())
