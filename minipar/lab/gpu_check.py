"""`make gpu-check`: what only a machine with GPUs can show.

First `make` runs the law of parity (tests/law) on CUDA tensors, in float64. Then this file adds
rows to ``notebooks/assets/measured/gpu.json``:

- parity: training in bf16 by plans of every kind, beside one process: float64 does not run the
  kernels that real training uses;
- calibrate: the result of `minipar calibrate`, in ``gpu_machine.toml``;
- utilisation: a real Llama on one GPU, in several settings: tokens/s, FLOP/s as a share of a large
  matrix product, peak memory; and the simulator's answer for the same step;
- overlap: plans of every kind on all GPUs (or two ranks that share one): tokens/s, hidden
  communication, tokens/s per GPU beside one GPU alone. A step of each plan is saved and drawn.

The file is written after every row, and a check that was stopped goes on with the missing rows.
``--rehearse`` does all of it on the CPU with a tiny model: to test this file, not a GPU.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.lab import draw
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.observe import timeline
from minipar.observe.timeline import Timeline
from minipar.parallel import compose
from minipar.parallel.plan import Plan
from minipar.ranks import backends
from minipar.ranks.launch import RankError, Ranks
from minipar.sim import calibrate, hardware
from minipar.sim.replay import replay
from minipar.sim.trace import Traces, trace
from minipar.train.compiled import compile_blocks
from minipar.train.optim import make_optimizer
from minipar.train.peak import matmul_rate, synchronise
from minipar.train.precision import Precision
from minipar.train.step import train_step

PLANS = (
    *("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sequence_parallel"),
    *("cp=2", "cp=2,context=ulysses", "pp=2,microbatches=2", "dp=2,tp=2,zero=3"),
    *("ep=2", "ep=2,dispatch=gather", "ep=2,dispatch=halves"),
)
TALKING = (
    *("dp={0}", "dp={0},zero=1", "dp={0},zero=3", "tp={0},sequence_parallel", "cp={0}"),
    *("tp={0},sequence_parallel,tp_overlap", "pp={0},microbatches=8", "ep={0}"),
)
"""One plan of each kind, on all GPUs."""
TOLERANCE = 2e-2
"""Largest relative difference of a loss in bf16: rounding, not an error."""


@dataclass(frozen=True)
class GpuCheck:
    """Check parity, speed and overlap on this machine's GPUs; write the rows to a folder."""

    out: str = "notebooks/assets/measured"
    """Folder for gpu.json, gpu_machine.toml and the timelines."""
    preset: str = "llama-3.2-1b"
    """The model whose training is timed."""
    rehearse: bool = False
    """Run on the CPU with a tiny model, to test the check itself."""


@dataclass(frozen=True)
class Setting:
    """One way to train on one GPU."""

    preset: str
    batch_size: int  # sequences per step
    seq_len: int = 2048
    compile: bool = False  # each block, by inductor
    recompute: str = "none"  # none, selective or full

    @property
    def plan(self) -> Plan:
        """The plan on one device; a GPU trains in bf16 with float32 masters."""
        device = backends.compute_device().type
        precision = "bf16" if device == "cuda" else "float32"
        return Plan(precision=precision, checkpointing=self.recompute)


def settings(preset: str) -> list[Setting]:
    """Return the settings to try: the plain one first, then faster and smaller ones."""
    return [
        Setting(preset, 4),
        Setting(preset, 4, compile=True),
        Setting(preset, 8, compile=True),
        Setting(preset, 8),
        Setting(preset, 2, recompute="full"),
    ]


class Learner:
    """A model under a plan that takes training steps on random tokens; made on every rank."""

    def __init__(self, shape: LlamaConfig, plan: Plan, batch_size: int, seq_len: int) -> None:
        self.mesh, self.device = Mesh(**plan.mesh_sizes()), backends.compute_device()
        self.model = Llama(shape, seed=0).to(self.device)
        optimizer = partial(make_optimizer, lr=1e-3, weight_decay=0.1)
        self.strategy = compose.apply(self.model, self.mesh, plan, optimizer)
        self.precision = Precision(plan.autocast, self.device.type)
        stream = torch.Generator().manual_seed(0)
        tokens = torch.randint(shape.vocab_size, (batch_size, seq_len + 1), generator=stream)
        rows = self.mesh.joint("dp", "ep")  # whose ranks have different sequences
        tokens = tokens.to(self.device).tensor_split(rows.size)[rows.rank]
        parts = tokens.tensor_split(plan.microbatches)
        self.batch = [self.strategy.shard((t[:, :-1], t[:, 1:].contiguous())) for t in parts]
        self.num_tokens = batch_size * seq_len

    def step(self) -> Tensor:
        """Take a training step; return its loss in nats per token."""
        optimizer, axis = self.strategy.optimizer, self.strategy.axis
        done = train_step(
            self.model,
            [self.strategy],
            optimizer,
            self.batch,
            axis,
            max_norm=1.0,
            precision=self.precision,
        )
        return done.loss

    def seconds(self, steps: int) -> float:
        """Return the median seconds of a step, after three to warm up."""
        taken = []
        for _ in range(3 + steps):
            synchronise(self.device)
            start = time.perf_counter()
            self.step()
            synchronise(self.device)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[3:])


class Rows(list):
    """The rows of a file; rows of the same machine and settings stay."""

    def __init__(self, path: Path, **machine: Any) -> None:
        self.path, head = path, {"check": "machine", **machine}
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        kept = [row for row in found if row.get("ok") is not False]  # failed ones are tried again
        super().__init__(kept if kept[:1] == [head] else [head])

    def add(self, known: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Append the row `known`, with its result or the error that ended it, if it is new."""
        if any(known.items() <= row.items() for row in self):
            return
        try:
            row = known | measure()
        except (RankError, ValueError, RuntimeError) as failed:
            full = "OutOfMemory" in f"{failed!r}{failed}"
            row = known | {"message": "does not fit into memory" if full else str(failed)}
            row |= {} if full else {"ok": False}
        self.append(row)
        self.path.write_text(json.dumps(self, indent=2) + "\n", encoding="utf-8")
        print(row, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if one of them fails, 2 if there is no GPU."""
    check = tyro.cli(GpuCheck, args=argv)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not check.rehearse:
        print("minipar: error: there is no GPU here; --rehearse runs on the CPU", file=sys.stderr)
        return 2
    folder = Path(check.out)
    folder.mkdir(parents=True, exist_ok=True)
    preset = "tiny" if check.rehearse else check.preset
    name = name_of(backends.compute_device())
    rows = Rows(folder / "gpu.json", torch=torch.__version__, gpus=gpus, preset=preset, device=name)
    few = 6 if check.rehearse else 1  # every sixth plan
    for text in PLANS[::few]:
        known = dict(check="parity", plan=text, precision="bf16", tolerance=TOLERANCE)
        rows.add(known, partial(parity, text, gpus))
    machine = folder / "gpu_machine.toml"
    rows.add({"check": "calibrate"}, partial(calibrated, machine))
    tried = settings(preset)
    if check.rehearse:
        tried = [Setting("tiny", 2, 64), Setting("tiny", 2, 64, recompute="full")]
    for setting in tried:
        rows.add(
            {"check": "utilisation", **asdict(setting)}, partial(utilisation, setting, machine)
        )
    size = max(gpus, 2)
    for text in ["dp=1", *(plan.format(size) for plan in TALKING[::few])]:
        known = {"check": "overlap", "plan": text}
        rows.add(known, partial(overlap, text, gpus, check.rehearse, folder))
    print(verdict(rows, gpus))
    return int(any(row.get("ok") is False for row in rows))


def verdict(rows: Rows, gpus: int) -> str:
    """Return the words on what is proved, and what is not."""
    named: dict[bool, list[str]] = {True: [], False: []}
    for row in rows:
        if "ok" in row:
            named[row["ok"]].append(f"{row['check']} {row.get('plan', '')}".strip())
    where = f"{gpus} GPUs" if gpus else "the CPU: nothing of a GPU"
    lines = [f"proved on {where}: {'; '.join(named[True]) or 'nothing'}"]
    if named[False]:
        lines.append(f"FAILED: {'; '.join(named[False])}")
    if fast := [row for row in rows if row["check"] == "utilisation" and "step_ms" in row]:
        best = max(fast, key=lambda row: row["tokens_per_second"])
        how = ", ".join(f"{key}={best[key]}" for key in ("batch_size", "compile", "recompute"))
        share = f"{best['share_of_matmul']:.0%} of a large matrix product"
        lines.append(f"fastest: {best['tokens_per_second']:,.0f} tokens/s with {how}: {share}")
    if gpus < 2:
        lines.append("not proved: NCCL, overlap over its links, scaling: these take several GPUs")
    return "\n".join(lines)


# ---------------------------------------------------------------------- several ranks
def group(size: int, gpus: int) -> Ranks:
    """Open ranks: each with a GPU of its own over NCCL, if there are as many."""
    return Ranks(size, backend="nccl" if gpus >= size else "gloo", timeout=120, sink=None)


def parity(text: str, gpus: int) -> dict[str, Any]:
    """Compare the losses of four steps under a plan with one process."""
    plan = Plan.parse(f"{text},precision=bf16")
    with group(plan.num_ranks, gpus) as ranks:
        found = ranks.run(losses, plan)[0]
    with group(1, gpus) as one:
        expected = one.run(losses, Plan(precision="bf16"), plan.ep > 1)[0]
    error = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return {"error": error, "ok": error <= TOLERANCE and expected[-1] < expected[0]}


def losses(plan: Plan, experts: bool = False) -> list[float]:
    """Return the losses of four steps of a tiny Llama, with experts if a plan spreads them."""
    shape = PRESETS["tiny-moe" if experts or plan.ep > 1 else "tiny"]
    learner = Learner(shape, plan, batch_size=8, seq_len=64)
    return [learner.step().item() for _ in range(4)]


def overlap(text: str, gpus: int, rehearse: bool, folder: Path) -> dict[str, Any]:
    """Train by a plan; tell how fast, and how much is hidden. Save and draw a step."""
    plan = Plan.parse(text + (",precision=bf16" if gpus else ""))
    preset = "tiny" if rehearse else "medium"
    if plan.ep > 1:
        preset = "tiny-moe"
    with group(plan.num_ranks, gpus) as ranks:
        seconds, tokens, step = ranks.run(recorded, plan, preset, 64 if rehearse else 1024)[0]
    name = name_of(backends.compute_device())
    step.label = f"measured, {name}, {preset}, {text}"
    if 0 < gpus < plan.num_ranks:
        step.label += "; ranks share a GPU and talk through the host"
    kinds = {span.kind for span in step}
    if plan.num_ranks > 1 and not rehearse:
        stem = folder / f"gpu_timeline_{text.replace(',', '_').replace('=', '')}"
        step.save(f"{stem}.json")
        draw.save(draw.timeline(step), f"{stem}.png")
    return {
        "preset": preset,
        "tokens_per_second": tokens / seconds,
        "per_device": tokens / seconds / max(1, min(gpus, plan.num_ranks)),
        "communication_ms": 1e3 * sum(o.total for o in step.overlap()) / plan.num_ranks,
        "hidden_fraction": step.hidden_fraction,
        "ok": {"forward", "backward"} <= kinds and (plan.num_ranks == 1 or "comm" in kinds),
    }


def recorded(plan: Plan, preset: str, seq_len: int) -> tuple[float, int, Timeline]:
    """Return seconds and tokens of a step, and the timeline of one; called on every rank."""
    learner = Learner(PRESETS[preset], plan, 8 * plan.dp * plan.ep, seq_len)
    seconds = learner.seconds(5)
    with timeline.record(learner.model) as found:
        learner.step()
        synchronise(learner.device)
    return seconds, learner.num_tokens, found.gather(learner.mesh.world).shifted()


# ---------------------------------------------------------------------- one GPU
def calibrated(path: Path) -> dict[str, Any]:
    """Measure this machine as `minipar calibrate` does, on one device."""
    device = calibrate.run(calibrate.CalibrateConfig(str(path), ranks=1)).device
    return {"peak": device.peak, "memory_bandwidth": device.memory_bandwidth}


def utilisation(setting: Setting, machine: Path) -> dict[str, Any]:
    """Time a setting in a fresh process; add the simulator's answer for what is not compiled."""
    with Ranks(1, timeout=300, sink=None) as fresh:
        row = fresh.run(speed, setting)[0]
    return row if setting.compile else row | simulated(setting, machine)


def speed(setting: Setting) -> dict[str, Any]:
    """Train on one device; return tokens/s, FLOP/s by the model's own count, and memory."""
    shape, size = PRESETS[setting.preset], (setting.batch_size, setting.seq_len)
    learner = Learner(shape, setting.plan, *size)
    if setting.compile:
        compile_blocks(learner.model)
    seconds, device = learner.seconds(10), learner.device
    on_gpu = device.type == "cuda"
    rate = shape.flops_per_token(setting.seq_len) * learner.num_tokens / seconds
    dtype = torch.bfloat16 if on_gpu else torch.float32
    peak = matmul_rate(device, dtype, size=8192 if on_gpu else 512)
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": learner.num_tokens / seconds,
        "tflops": rate / 1e12,
        "share_of_matmul": rate / peak,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def simulated(setting: Setting, machine: Path) -> dict[str, Any]:
    """Return the simulated step: on the calibrated machine, and on the data sheet's."""
    traces, device = trace_of(setting), backends.compute_device()
    row = {"simulated_bytes": sum(traces.at_peak().values())}
    row["simulated_ms"] = 1e3 * replay(traces, hardware.load(machine)).seconds
    name = name_of(device).lower().replace(" ", "")
    if known := [node for node in hardware.names() if node in name]:
        sheet = hardware.load(max(known, key=len))
        row["data_sheet_ms"] = 1e3 * replay(traces, sheet).seconds
    return row


def trace_of(setting: Setting) -> Traces:
    """Trace the step of a setting."""
    return trace(
        PRESETS[setting.preset],
        setting.plan,
        sequences=setting.batch_size,
        seq_len=setting.seq_len,
        on_cpu=backends.compute_device().type == "cpu",
    )


def name_of(device: torch.device) -> str:
    """Return the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    from minipar.lab import gpu_check  # by its name, which the ranks can import, too

    sys.exit(gpu_check.main())
