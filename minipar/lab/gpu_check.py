"""`make gpu-check`: what a machine without a GPU cannot prove, measured on one that has some.

Each check is a few rows of ``notebooks/assets/measured/gpu.json``:

- parity: training by plans of every kind, in float32 and mixed with bf16, on CUDA tensors, against
  one process: losses and gradient norms of all steps; and all ranks of a group launch the same
  collectives in the same order;
- checkpoint: a run that was saved by one plan goes on by another, as if nothing had happened;
- utilisation: single-GPU training of a real Llama, in FLOP/s and as a share of what a large matrix
  product reaches on the same device, beside tokens/s of `transformers` in the same loop; and the
  highest memory beside the closed form;
- timeline: one recorded step, whose spans come from the profiler, drawn beside the numbers.

The file is written after every row. A check that was stopped goes on where it was, on the same
device with the same settings; rows that failed are tried again. The last lines say what is proved,
and what is not.

``--rehearse`` goes through all of it on the CPU with a tiny model: to test this file, not a GPU.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn

from minipar.comm import backends, calls, timeline
from minipar.comm.collectives import all_gather_object
from minipar.comm.launch import RankError, Ranks
from minipar.comm.mesh import Axis, Mesh
from minipar.lab import draw
from minipar.model.hf_config import config_json
from minipar.model.llama import PRESETS, Llama, LlamaConfig, token_loss
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import masters
from minipar.parallel.plan import Plan
from minipar.sim import memory
from minipar.train import trainer
from minipar.train.compiled import compile_blocks
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.peak import matmul_rate, synchronise
from minipar.train.report import peak_memory
from minipar.train.step import train_step

PLANS = (
    *("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"),
    *("tp=2", "tp=2,sequence_parallel", "tp=2,sequence_parallel,tp_overlap"),
    *("cp=2", "cp=2,context=gather", "cp=2,context=ulysses", "pp=2,microbatches=2"),
    *("ep=2", "ep=2,dispatch=gather", "ep=2,zero=3"),
    *("dp=2,tp=2,zero=3", "dp=2,cp=2,zero=1,context=ulysses", "pp=2,tp=2,microbatches=2"),
)
RESUMED = (("dp=2,zero=3", "tp=2"), ("tp=2,sequence_parallel", "dp=2,zero=1"))
"""Plans by which a run begins, and goes on."""
TOLERANCE = {"float32": 1e-4, "bf16": 2e-2}
"""Largest difference of a loss or a gradient norm, relative: rounding, not an error."""
SMALL = TrainConfig(
    data=trainer.__file__,  # any text will do
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
    loss_chunk: int = 0
    """Tokens whose logits are there at a time, as of `minipar train`; 0: all."""
    compile: bool = False
    """Compile each block of ours, as `minipar train --compile inductor` does."""
    steps: int = 10
    """Timed steps."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in backward, where they do not fit otherwise."""
    rehearse: bool = False
    """Run on the CPU with a tiny model, to test the check itself."""


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if one of them fails, 2 if there is no GPU."""
    check = tyro.cli(GpuCheck, args=argv)
    if check.rehearse:
        check = replace(check, preset="tiny", batch_size=2, seq_len=64, steps=2)
    elif not torch.cuda.is_available():
        print("minipar: error: there is no GPU here; --rehearse runs on the CPU", file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folder = Path(check.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder / "gpu.json", check, gpus)
    with tempfile.TemporaryDirectory() as runs, Ranks(1, timeout=120, sink=None) as one:
        with noted(rows, "parity"):
            parity(rows, one, gpus, runs, PLANS[::8] if check.rehearse else PLANS)
        with noted(rows, "checkpoint"):
            checkpoints(rows, one, gpus, runs, RESUMED[:1] if check.rehearse else RESUMED)
        if rows.lacks("utilisation"):
            with noted(rows, "utilisation"):
                measured, recorded = one.run(utilisation, check)[0]
                draw.save(draw.timeline(recorded), folder / "gpu_timeline.png")
                spans = dict(sorted(Counter(span.kind for span in recorded).items()))
                milliseconds = 1e3 * recorded.duration
                rows.add({"check": "timeline", "milliseconds": milliseconds, "spans": spans})
                rows.add(measured)
        if rows.lacks("transformers"):
            with noted(rows, "transformers"):
                rows.add(one.run(theirs, check)[0])
    for row in rows:
        print(row)
    print("written:", *sorted(map(str, folder.glob("gpu*"))))
    print(verdict(rows, gpus))
    return int(any(row.get("ok") is False for row in rows))


class Rows(list):
    """What came out, kept in a file: what is there of the same machine and settings stays."""

    def __init__(self, path: Path, check: GpuCheck, gpus: int) -> None:
        head = {"check": "machine", "torch": torch.__version__, "gpus": gpus, **asdict(check)}
        head["device"] = name_of(backends.compute_device())
        head.pop("out")
        self.path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        super().__init__(found if found[:1] == [head] else [head])
        self[:] = [row for row in self if row.get("ok") is not False]

    def lacks(self, *values: str) -> bool:
        """Whether no row has all of these values."""
        return not any(set(values) <= set(map(str, row.values())) for row in self)

    def add(self, row: dict[str, Any]) -> None:
        """Append, and write all."""
        self.append(row)
        self.path.write_text(json.dumps(self, indent=2) + "\n", encoding="utf-8")


@contextmanager
def noted(rows: Rows, check: str) -> Iterator[None]:
    """Note as a row what ends this part of the check, out of memory for one; the rest goes on."""
    try:
        yield
    except Exception as failed:
        rows.add({"check": check, "ok": False, "message": str(failed)})


def verdict(rows: Sequence[dict[str, Any]], gpus: int) -> str:
    """Say what is proved by `rows`, and what is not."""
    told = {True: [], False: []}
    for row in rows:
        if "ok" in row:
            what = f" {row['plan']} ({row['precision']})" if "plan" in row else ""
            told[row["ok"]].append(row["check"] + what)
    good, bad = told[True], told[False]
    where = f"{gpus} GPUs" if gpus else "the CPU: nothing of a GPU"
    lines = [f"proved on {where}: {'; '.join(good) or 'nothing'}"]
    if bad:
        lines.append(f"FAILED: {'; '.join(bad)}")
    if gpus < 2:
        lines.append("not proved: NCCL, overlap and scaling, which take several GPUs")
    return "\n".join(lines)


# ---------------------------------------------------------------------- several ranks
def group(plan: Plan, gpus: int) -> Ranks:
    """The ranks of `plan`: each with a GPU of its own over NCCL, if there are as many."""
    backend = "nccl" if gpus >= plan.num_ranks else "gloo"
    return Ranks(plan.num_ranks, backend=backend, timeout=120, sink=None)


def configure(plan: str, precision: str) -> TrainConfig:
    """A small run by `plan`: of a mixture where it spreads experts."""
    preset = "tiny-moe" if "ep=" in plan else "tiny"
    return replace(SMALL, plan=f"{plan},precision={precision}", preset=preset)


def compare(
    rows: Rows, check: str, plan: str, precision: str, expected: Any, run: Callable[[], Any]
) -> None:
    """Add a row: do the last steps of `run` equal those `expected`, and was their order alike?"""
    tolerance = TOLERANCE[precision]
    row = {"check": check, "plan": plan, "precision": precision, "tolerance": tolerance}
    try:
        found, problem = run()
        error = max(map(difference, expected[-len(found) :], found))
        row |= {"error": error, "ok": error <= tolerance and not problem}
        row |= {"message": problem} if problem else {}
    except RankError as failed:
        row |= {"error": None, "ok": False, "message": str(failed)}
    rows.add(row)


def parity(rows: Rows, one: Ranks, gpus: int, folder: str, plans: Sequence[str]) -> None:
    """Train by each plan, and compare every step with that of `one` process."""
    alone: dict[Any, Any] = {}
    for text in plans:
        todo = [precision for precision in TOLERANCE if rows.lacks("parity", text, precision)]
        if not todo:
            continue
        with group(Plan.parse(text), gpus) as ranks:
            for precision in todo:
                config = configure(text, precision)
                serial = configure("dp=1", precision)
                serial = replace(serial, preset=config.preset, microbatches=1)
                if serial not in alone:
                    alone[serial] = one.run(train, serial, f"{folder}/{len(alone)}")[0][0]
                place = f"{folder}/{precision}-{text}"
                run = partial(ranks.run, train, config, place)
                compare(rows, "parity", text, precision, alone[serial], lambda r=run: r()[0])


def checkpoints(
    rows: Rows, one: Ranks, gpus: int, folder: str, pairs: Sequence[tuple[str, str]]
) -> None:
    """Train by one plan, go on by another; compare with one process that never stopped."""
    precision = "float32"
    for begins, ends in pairs:
        name = f"{begins} then {ends}"
        if not rows.lacks("checkpoint", name):
            continue
        serial = configure("dp=1", precision)
        expected = one.run(train, serial, f"{folder}/alone {name}")[0][0]
        saved, last = f"{folder}/{name}", f"checkpoints/step_{SMALL.steps - 1:06d}"
        with group(Plan.parse(begins), gpus) as ranks:
            first = replace(configure(begins, precision), save_every=SMALL.steps - 1)
            ranks.run(train, first, saved)
        with group(Plan.parse(ends), gpus) as ranks:
            more = configure(ends, precision), f"{saved} rest", f"{saved}/{last}"
            run = partial(ranks.run, train, *more)
            compare(rows, "checkpoint", name, precision, expected, lambda r=run: r()[0])


def train(
    config: TrainConfig, folder: str, start: str | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Train as `minipar train` does; return the metrics of all steps, and what is out of order.

    Called on every rank.
    """
    order = Order()
    calls.observers.append(order)
    try:
        trainer.train(config, folder, start)
    finally:
        calls.observers.remove(order)
    world = Mesh(**config.mesh_sizes()).world
    return read(Path(folder) / "metrics.jsonl"), order.problem(world)


class Order:
    """Which collectives this rank launched, in order, by the group that it launched them in."""

    def __init__(self) -> None:
        self.verbs: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)

    def launched(
        self, number: int, verb: str, axis: Axis, num_bytes: int, peers: Any, result: Any
    ) -> None:
        """Note it; messages of two ranks are not launched by all."""
        if not peers and axis.size > 1:
            self.verbs[axis.name, tuple(axis.ranks)].append(verb)

    def waited(self, number: int) -> None:
        """Waits may be in any order."""

    def problem(self, world: Axis) -> str:
        """Return which group differs, and where; nothing if none does. A collective."""
        seen: dict[Any, tuple[int, list[str]]] = {}
        for rank, verbs in enumerate(all_gather_object(dict(self.verbs), world)):
            for group, own in verbs.items():
                other, theirs = seen.setdefault(group, (rank, own))
                if own != theirs:
                    pairs = enumerate(zip_longest(own, theirs))
                    at, (mine, its) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
                    return f"launch {at} along {group[0]}: rank {rank} {mine}, rank {other} {its}"
        return ""


def difference(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return by how much a step differs from what is expected of it, relative."""
    pairs = [(expected[key], found[key]) for key in ("loss", "grad_norm")]
    return max(abs(a - b) / abs(a) for a, b in pairs)


# ---------------------------------------------------------------------- on one device
def learner(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Return what steps `model`, which computes in `dtype`; in bf16 its masters learn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if dtype != torch.float32:
        masters.keep(model, optimizer, dtype)
    return optimizer


def timed(check: GpuCheck, shape: LlamaConfig, step: Callable) -> float:
    """Return the median seconds of ``step(batch)`` on random tokens."""
    device = backends.compute_device()
    tokens = torch.randint(shape.vocab_size, (check.batch_size, check.seq_len + 1), device=device)
    batch = [(tokens[:, :-1], tokens[:, 1:].contiguous())]
    seconds = []
    for _ in range(3 + check.steps):
        synchronise(device)
        start = time.perf_counter()
        step(batch)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def utilisation(check: GpuCheck) -> tuple[dict[str, Any], timeline.Timeline]:
    """Train on one device; return FLOP/s by the model's own count, and one recorded step."""
    mesh, device = Mesh(), backends.compute_device()
    shape, dtype = PRESETS[check.preset], computing_dtype(device)
    model = Llama(shape).to(device)
    optimizer = learner(model, dtype)
    model.loss_chunk = check.loss_chunk
    checkpoint_activations(model, check.recompute)
    if check.compile:
        compile_blocks(model)
    recorded = timeline.Timeline()

    def step(batch: Any) -> None:
        train_step(model, [], optimizer, batch, mesh.dp, max_norm=1.0)

    def record(batch: Any) -> None:
        nonlocal recorded
        with timeline.record(model) as recorded:
            step(batch)
            synchronise(device)

    seconds = timed(check, shape, step)
    peak_bytes = peak_memory(device) if device.type == "cuda" else None
    timed(replace(check, steps=1), shape, record)
    recorded = recorded.shifted()
    num_tokens = check.batch_size * check.seq_len
    recorded.label = f"measured, {name_of(device)}, {check.preset}, {dtype}"
    rate = shape.flops_per_token(check.seq_len) * num_tokens / seconds
    peak = matmul_rate(device, dtype, size=8192 if device.type == "cuda" else 512)
    recipe = memory.FP32_ADAM if dtype == torch.float32 else memory.MASTER_ADAM
    state = memory.model_state(shape.num_parameters, recipe=recipe).device_bytes
    layer = sum(memory.llama_activations(shape, num_tokens).values())
    row = {
        "check": "utilisation",
        "device": name_of(device),
        "preset": check.preset,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens_per_step": num_tokens,
        "step_ms": 1e3 * seconds,
        "tokens_per_second": num_tokens / seconds,
        "tflops": rate / 1e12,
        "matmul_tflops": peak / 1e12,
        "share_of_matmul": rate / peak,
        "peak_bytes": peak_bytes,  # of a GPU; a process on the CPU holds much else
        "state_bytes_closed_form": state,
        "activation_bytes_closed_form": layer * shape.num_layers,  # without the logits
    }
    return row, recorded


def theirs(check: GpuCheck) -> dict[str, Any]:
    """The same loop with the Llama of `transformers`, where it is installed: tokens per second."""
    row = {"check": "transformers", "preset": check.preset}
    shape, device = PRESETS[check.preset], backends.compute_device()
    try:
        from transformers import LlamaConfig as Config
        from transformers import LlamaForCausalLM
    except ImportError as error:
        return row | {"tokens_per_second": None, "message": str(error)}
    config = Config.from_dict(config_json(shape, torch.float32) | {"use_cache": False})
    model = LlamaForCausalLM(config).to(device)
    optimizer = learner(model, computing_dtype(device))

    def step(batch: Any) -> None:
        [(inputs, targets)] = batch
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(model(inputs).logits, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = timed(check, shape, step)
    return row | {"tokens_per_second": check.batch_size * check.seq_len / seconds}


def computing_dtype(device: torch.device) -> torch.dtype:
    """Return what a model computes in: bf16 on a GPU, as of `minipar train --precision bf16`."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def name_of(device: torch.device) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    from minipar.lab import gpu_check  # by its name, which the ranks can import, too

    sys.exit(gpu_check.main())
