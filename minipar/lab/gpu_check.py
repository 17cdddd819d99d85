"""`make gpu-check`: what a machine without a GPU cannot prove, measured on one that has some.

Each check is a few rows of ``notebooks/assets/measured/gpu.json``:

- parity: training by plans of every kind, in float32 and mixed with bf16 or fp16, on CUDA tensors,
  against one process: losses and gradient norms of all steps; and all ranks of a group launch the
  same collectives in the same order. In float32 alone: every schedule of a pipeline, every dispatch
  of experts, compiled blocks, offload, local SGD, compressors (`minipar.lab.gpu_parts`);
- checkpoint: a run that was saved by one plan goes on by another, as if nothing had happened;
- calibrate: what `minipar calibrate` finds, in ``gpu_machine.toml``;
- utilisation: single-GPU training of a real Llama in several settings, one of which is fastest, in
  FLOP/s and as a share of what a large matrix product reaches on the same device; the first of them
  beside tokens/s of `transformers` in the same loop; seconds and highest memory beside what the
  simulator says, of the machine that was measured and of the one that it knows by this name;
- overlap: runs of several ranks by plans of each kind: tokens/s, and how much of communication is
  hidden; the timeline of one step, whose spans come from the profiler, is drawn;
- scaling, on several GPUs: tokens/s of the same run on all of them, with the batch of one and with
  as many times that, as a share of so many times one.

The file is written after every row. A check that was stopped goes on where it was, on the same
device with the same settings; rows that failed are tried again. The last lines say what is proved,
and what is not.

``--rehearse`` goes through all of it on the CPU with a tiny model: to test this file, not a GPU.
"""

import json
import math
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from minipar.comm import calls
from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.threads import usable_cores
from minipar.lab import draw
from minipar.lab.gpu_parts import GROUPED, PARTS, steps_of
from minipar.lab.gpu_speed import Setting, name_of, ours, settings, sheet_of, theirs, trace_of
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.plan import Plan
from minipar.ranks import backends
from minipar.ranks.launch import RankError, Ranks
from minipar.sim import calibrate, hardware
from minipar.sim.replay import replay
from minipar.train import trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read

PLANS = (
    *("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"),
    *("tp=2", "tp=2,sequence_parallel", "tp=2,sequence_parallel,tp_overlap"),
    *("cp=2", "cp=2,context=gather", "cp=2,context=ulysses", "pp=2,microbatches=2"),
    *("ep=2", "ep=2,dispatch=gather", "ep=2,zero=3"),
    *("dp=2,tp=2,zero=3", "dp=2,cp=2,zero=1,context=ulysses", "pp=2,tp=2,microbatches=2"),
)
ONCE = (
    *(f"pp=2,microbatches=4,schedule={name}" for name in SCHEDULES),
    *("ep=2,dispatch=overlapped", "ep=2,dispatch=halves"),
    *("ep=2,dispatch=hierarchical,expert_nodes=2", "ep=2,dispatch=padded; expert_capacity=2"),
    "ep=2,pp=2,microbatches=4,schedule=dualpipe_v,dispatch=paired; batch_size=8",
    *(f"{plan}; compile=inductor" for plan in ("dp=2", "dp=2,zero=3", "tp=2")),
    *(part for part in PARTS if part != GROUPED),
)
"""In float32: plans, some with flags behind them; and parts of a run that are no plans."""
RESUMED = (("dp=2,zero=3", "tp=2"), ("tp=2,sequence_parallel", "dp=2,zero=1"))
"""Plans by which a run begins, and goes on."""
TALKING = (
    *("dp={0}", "dp={0},zero=3", "tp={0},sequence_parallel", "cp={0}"),
    *("tp={0},sequence_parallel,tp_overlap", "pp={0},microbatches=8"),
)
"""Plans of one kind each, whose overlap is told."""
TOLERANCE = {"float32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest difference of a loss or a gradient norm, relative: rounding, not an error."""
SMALL = TrainConfig(  # on a text of which there is enough anywhere
    data=trainer.__file__, steps=3, batch_size=4, seq_len=32, eval_batches=1, sample_tokens=0
)


@dataclass(frozen=True)
class GpuCheck:
    """Check parity, speed, overlap and scaling on this machine's GPUs; write what came out."""

    out: str = "notebooks/assets/measured"
    """Folder for gpu.json, gpu_machine.toml and gpu_timeline.png."""
    preset: str = "llama-3.2-1b"
    """The model whose training is timed."""
    rehearse: bool = False
    """Run on the CPU with a tiny model, to test the check itself."""

    def settings(self) -> list[Setting]:
        """How one device trains."""
        tried = settings(self.preset)
        if self.rehearse:
            plain = replace(tried[0], batch_size=2, seq_len=64, steps=2)
            return [plain, replace(plain, recompute="full")]
        return tried

    def run(self, gpus: int) -> TrainConfig:
        """What several ranks train: the model that is timed, if each has a GPU of its own."""
        if self.rehearse:
            return replace(SMALL, steps=6, record_every=2)
        big = dict(preset=self.preset if gpus > 1 else "medium", seq_len=1024, batch_size=8)
        return replace(SMALL, steps=20, record_every=5, precision="bf16", **big)


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if one of them fails, 2 if there is no GPU."""
    check = tyro.cli(GpuCheck, args=argv)
    if check.rehearse:
        check = replace(check, preset="tiny")
    elif not torch.cuda.is_available():
        print("minipar: error: there is no GPU here; --rehearse runs on the CPU", file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    step = 8 if check.rehearse else 1
    hands = max(1, min(4, usable_cores() // 4)) if gpus < 2 else 1  # who share a GPU anyway
    folder = Path(check.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder / "gpu.json", check, gpus)
    with tempfile.TemporaryDirectory() as runs, Ranks(1, timeout=120, sink=None) as one:
        for texts, *precisions in ((PLANS, *TOLERANCE), (ONCE, "float32"), ((GROUPED,), "bf16")):
            with noted(rows, "parity"):
                parity(rows, one, gpus, runs, texts[::step], precisions, hands)
        with noted(rows, "checkpoint"):
            checkpoints(rows, one, gpus, runs, RESUMED[::step])
        with noted(rows, "calibrate"):
            calibrated(rows, folder / "gpu_machine.toml")
        with noted(rows, "utilisation"):
            speed(rows, check.settings())
        with noted(rows, "simulated"):
            simulated(rows, check.settings(), folder / "gpu_machine.toml")
        with noted(rows, "overlap"):
            config, size = check.run(gpus), max(gpus, 2)
            plans = [plan.format(size) for plan in (TALKING[1:2] if check.rehearse else TALKING)]
            overlap(rows, config, gpus, runs, plans, folder / "gpu_timeline.png")
            if gpus > 1:
                scaling(rows, config, gpus, runs, plans)
    print(*rows, sep="\n")
    print("written:", *sorted(map(str, folder.glob("gpu*"))))
    print(verdict(rows, gpus))
    return int(any(row.get("ok") is False for row in rows))


class Rows(list):
    """What came out, kept in a file: what is there of the same machine and settings stays."""

    def __init__(self, path: Path, check: GpuCheck, gpus: int) -> None:
        head = {"check": "machine", "torch": torch.__version__, "gpus": gpus, **asdict(check)}
        head["device"] = name_of(backends.compute_device())
        head.pop("out")
        self.path, self.lock = path, threading.Lock()
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        super().__init__(found if found[:1] == [head] else [head])
        self[:] = [row for row in self if row.get("ok") is not False]

    def have(self, **known: Any) -> bool:
        """Whether a row says all of this."""
        return any(known.items() <= row.items() for row in self)

    def add(self, row: dict[str, Any]) -> None:
        """Append, and write all; any thread may."""
        with self.lock:
            self.append(row)
            self.write()

    def write(self) -> None:
        """Write all."""
        self.path.write_text(json.dumps(self, indent=2) + "\n", encoding="utf-8")


@contextmanager
def noted(rows: Rows, check: str) -> Iterator[None]:
    """Enter the error that ends this part of the check as a row; the other parts still run."""
    try:
        yield
    except Exception as failed:
        rows.add({"check": check, "ok": False, "message": str(failed)})


def verdict(rows: Sequence[dict[str, Any]], gpus: int) -> str:
    """Say what is proved by `rows`, and what is not."""
    good, bad = [], []
    for row in rows:
        if "ok" in row:
            words = [row[key] for key in ("check", "plan") if key in row]
            words += [f"({row['precision']})"] if "precision" in row else []
            (good if row["ok"] else bad).append(" ".join(words))
    where = f"{gpus} GPUs" if gpus else "the CPU: nothing of a GPU"
    lines = [f"proved on {where}: {'; '.join(good) or 'nothing'}"]
    if bad:
        lines.append(f"FAILED: {'; '.join(bad)}")
    fast = [row for row in rows if row["check"] == "utilisation" and "step_ms" in row]
    if fast:
        best = max(fast, key=lambda row: row["tokens_per_second"])
        words = ("batch_size", "seq_len", "compile", "recompute")
        how = ", ".join(f"{name}={best[name]}" for name in words)
        share = f"{best['share_of_matmul']:.0%} of a large matrix product"
        lines.append(f"fastest: {best['tokens_per_second']:,.0f} tokens/s with {how}: {share}")
        for name in ("simulated_ms", "data_sheet_ms"):
            found = [f"{row[name] / row['step_ms'] - 1:+.0%}" for row in fast if name in row]
            if found:
                lines.append(f"{name}: {', '.join(found)} of the measured step")
    if gpus < 2:
        rest = "NCCL, overlap over its links, and scaling: these take several GPUs"
        lines.append(f"not proved: {rest}")
    return "\n".join(lines)


# ---------------------------------------------------------------------- several ranks
def group(size: int, gpus: int) -> Ranks:
    """So many ranks: each with a GPU of its own over NCCL, if there are as many."""
    backend = "nccl" if gpus >= size else "gloo"
    return Ranks(size, backend=backend, timeout=120, sink=None)


def configure(text: str, precision: str) -> TrainConfig:
    """A small run by a plan and the flags behind it; of a mixture where it spreads experts."""
    plan, *flags = text.split("; ")
    words = dict(flag.split("=") for flag in flags)
    values = {name: type(getattr(SMALL, name))(word) for name, word in words.items()}
    if "ep=" in plan:
        # Balanced over what no plan cuts.
        values |= {"preset": "tiny-moe", "expert_balance": "sequence"}
    return replace(SMALL, plan=f"{plan},precision={precision}", **values)


def alone(config: TrainConfig) -> TrainConfig:
    """The same run on one device."""
    return replace(config, plan=f"dp=1,precision={config.precision}", compile="none")


def compare(
    rows: Rows, check: str, plan: str, precision: str, expected: Any, run: Callable[[], Any]
) -> None:
    """Add a row: are the last steps of `run` those `expected`, launched in one order?"""
    tolerance = TOLERANCE[precision]
    row = {"check": check, "plan": plan, "precision": precision, "tolerance": tolerance}
    try:
        found, problem = run()
        error = worst(map(difference, expected[-len(found) :], found))
        row |= {"error": error, "ok": error <= tolerance and not problem}
        row |= {"message": problem} if problem else {}
    except RankError as failed:
        row |= {"error": None, "ok": False, "message": str(failed)}
    rows.add(row)


def parity(
    rows: Rows,
    one: Ranks,
    gpus: int,
    folder: str,
    texts: Sequence[str],
    precisions: Sequence[str] = (),
    hands: int = 1,
) -> None:
    """Do what each text says, a plan or one of `PARTS`; compare every step with `one` process.

    In all `precisions`, if none is named. So many `hands` take their share of texts at a time, each
    with ranks of its own.
    """
    lock = threading.Lock()
    serial: dict[TrainConfig, list[dict[str, Any]]] = {}  # metrics of runs on one device

    def num_ranks(text: str) -> int:
        return 2 if text in PARTS else Plan.parse(text.split("; ")[0]).num_ranks

    def missing(text: str) -> list[str]:
        wanted = precisions or TOLERANCE
        return [p for p in wanted if not rows.have(check="parity", plan=text, precision=p)]

    def expected(text: str, precision: str) -> list[dict[str, Any]]:
        if text in PARTS:
            return one.run(steps_of, text, 1)[0]
        config = alone(configure(text, precision))
        with lock:
            if config not in serial:
                serial[config] = one.run(train, config, f"{folder}/alone {precision} {text}")[0][0]
        return serial[config]

    def found(ranks: Ranks, text: str, precision: str) -> tuple[list[dict[str, Any]], str]:
        if text in PARTS:
            return ranks.run(steps_of, text, ranks.size)[0], ""
        return ranks.run(train, configure(text, precision), f"{folder}/{precision}-{text}")[0]

    def do(some: Sequence[str]) -> None:
        for size, group_of in groupby(some, num_ranks):
            with group(size, gpus) as ranks:
                for text in group_of:
                    for precision in missing(text):
                        run = partial(found, ranks, text, precision)
                        compare(rows, "parity", text, precision, expected(text, precision), run)
                    if "compile=" in text:  # what was compiled for one plan is not for the next
                        ranks.restart()
                    else:  # without the process groups of runs before
                        ranks.run(dist.destroy_process_group)

    todo = [*filter(missing, sorted(texts, key=num_ranks))]
    with ThreadPoolExecutor(hands) as pool:
        list(pool.map(do, (todo[k::hands] for k in range(hands))))


def checkpoints(
    rows: Rows, one: Ranks, gpus: int, folder: str, pairs: Sequence[tuple[str, str]]
) -> None:
    """Train by one plan, go on by another; compare with one process that never stopped."""
    precision = "float32"
    for begins, ends in pairs:
        name = f"{begins} then {ends}"
        if rows.have(check="checkpoint", plan=name):
            continue
        serial = configure("dp=1", precision)
        expected = one.run(train, serial, f"{folder}/alone {name}")[0][0]
        saved, middle = f"{folder}/{name}", SMALL.steps - 1
        with group(Plan.parse(begins).num_ranks, gpus) as ranks:
            ranks.run(train, replace(configure(begins, precision), save_every=middle), saved)
        with group(Plan.parse(ends).num_ranks, gpus) as ranks:
            start = f"{saved}/checkpoints/step_{middle:06d}"
            run = partial(ranks.run, train, configure(ends, precision), f"{saved} rest", start)
            compare(rows, "checkpoint", name, precision, expected, lambda run=run: run()[0])


def train(
    config: TrainConfig, folder: str, start: str | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Train as `minipar train` does; return the metrics of all steps, and what is out of order.

    Called on every rank.
    """
    order = Order()
    calls.taps.append(order)
    try:
        trainer.train(config, folder, start)
    finally:
        calls.taps.remove(order)
    world = Mesh(**config.mesh_sizes()).world
    return read(Path(folder) / "metrics.jsonl"), order.problem(world)


class Order(calls.Tap):
    """Which collectives this rank launched, in order, by the group that it launched them in."""

    def __init__(self) -> None:
        self.verbs: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)

    def begin(self, call: calls.Call) -> None:
        """Note a call; messages of two ranks are not launched by all."""
        if not call.peers and call.axis is not None and call.axis.size > 1:
            self.verbs[call.axis.name, tuple(call.axis.ranks)].append(call.verb)

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
    pairs = [(expected[key], found[key]) for key in ("loss", "grad_norm") if key in found]
    return worst(abs(a - b) / abs(a) for a, b in pairs)


def worst(errors: Iterable[float]) -> float:
    """Return the largest; nan if one of them is, which is no number to compare."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


# ---------------------------------------------------------------------- how fast
def calibrated(rows: Rows, path: Path) -> None:
    """Measure this machine as `minipar calibrate` does, on one device."""
    if not (path.is_file() and rows.have(check="calibrate")):
        device = calibrate.run(calibrate.CalibrateConfig(str(path), ranks=1)).device
        found = {"peak": device.peak, "memory_bandwidth": device.memory_bandwidth}
        rows.add({"check": "calibrate", **found, "launch": device.launch})


def speed(rows: Rows, tried: Sequence[Setting]) -> None:
    """Time each setting in a fresh process; where one does not fit, its row says so."""
    todo = [("utilisation", setting, ours) for setting in tried]
    for check, setting, measure in [*todo, ("transformers", tried[0], theirs)]:
        known = {"check": check, **asdict(setting)}
        if not rows.have(**known):
            with Ranks(1, timeout=300, sink=None) as fresh:
                try:
                    row = fresh.run(measure, setting)[0]
                except RankError as failed:
                    if not all("OutOfMemory" in f.kind for f in failed.failures.values()):
                        raise
                    row = known | {"message": "does not fit into memory"}
            rows.add(row)


def simulated(rows: Rows, tried: Sequence[Setting], measured: Path) -> None:
    """Put beside each setting that is not compiled what the simulator says of its step.

    On the machine of the file `measured`, and on the one that it knows by this device's name.
    """
    machines = {"simulated_ms": hardware.load(measured)}
    if (sheet := sheet_of(backends.compute_device())) is not None:
        machines["data_sheet_ms"] = sheet
    for setting in tried:
        for row in rows:
            if not setting.compile and asdict(setting).items() <= row.items() and "step_ms" in row:
                traces = trace_of(setting)
                row["simulated_bytes"] = sum(traces.at_peak().values())
                row |= {name: 1e3 * replay(traces, m).seconds for name, m in machines.items()}
    rows.write()


def overlap(
    rows: Rows, config: TrainConfig, gpus: int, folder: str, plans: Sequence[str], figure: Path
) -> None:
    """Train by each plan; note how fast, and how much is hidden. Draw a step of ZeRO 3."""
    for text in plans:
        row = {"check": "overlap", "plan": text, "preset": config.preset}
        if (found := told(rows, row, replace(config, plan=text), gpus, folder)) is None:
            continue
        report, step = found
        kinds = row["spans"] = dict(sorted(Counter(span.kind for span in step).items()))
        row |= {key: report[key] for key in ("tokens_per_second", "mfu", "hidden_fraction")}
        row["communication_ms"] = 1e3 * report["communication_seconds"] / config.steps
        rows.add(row | {"ok": {"comm", "forward", "backward"} <= kinds.keys()})
        if "zero=3" in text:
            device = name_of(backends.compute_device())
            step.label = f"measured, {device}, {config.preset}, {text}"
            if 0 < gpus < config.num_ranks:
                step.label += "; ranks share a GPU and talk through the host"
            draw.save(draw.timeline(step), figure)


def scaling(rows: Rows, config: TrainConfig, gpus: int, folder: str, plans: Sequence[str]) -> None:
    """Tokens/s on all GPUs beside those of one: of the same batch, and of one as much larger."""
    laws = [("strong", 1), ("weak", gpus)]
    for text, (law, factor) in [("dp=1", ("alone", 1)), *product(plans, laws)]:
        row = {"check": "scaling", "plan": text, "law": law}
        more = replace(config, plan=text, batch_size=factor * config.batch_size)
        if (found := told(rows, row, more, gpus, folder)) is not None:
            rows.add(row | {"tokens_per_second": found[0]["tokens_per_second"]})
    done = [row for row in rows if row["check"] == "scaling" and "tokens_per_second" in row]
    one = next((row["tokens_per_second"] for row in done if row["law"] == "alone"), math.nan)
    for row in done:
        row["efficiency"] = row["tokens_per_second"] / one / (1 if row["law"] == "alone" else gpus)
    rows.write()


def told(
    rows: Rows, row: dict[str, Any], config: TrainConfig, gpus: int, folder: str
) -> tuple[dict[str, Any], Timeline] | None:
    """Train as `minipar train` does; return its report, and a typical step of all ranks.

    None if `rows` have this `row` already, or have it now with the reason why it cannot be.
    """
    if rows.have(**row):
        return None
    place = Path(folder) / " ".join(map(str, row.values()))
    try:
        config.check()
        with group(config.num_ranks, gpus) as ranks:
            ranks.run(trainer.train, config, str(place))
    except ValueError as refused:  # 3 GPUs and 4 heads
        rows.add(row | {"message": str(refused)})
        return None
    except RankError as failed:
        rows.add(row | {"ok": False, "message": str(failed)})
        return None
    path = place / "timeline.json"
    step = Timeline.load(path) if path.exists() else Timeline()
    return json.loads((place / "report.json").read_text(encoding="utf-8")), step


if __name__ == "__main__":
    from minipar.lab import gpu_check  # by its name, which the ranks can import, too

    sys.exit(gpu_check.main())
