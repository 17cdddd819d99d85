"""Measure the machine that this runs on, and write it down as a file that `hardware.load` reads.

Every rank measures at the same time, since ranks share cores, memory and links: products in each
type, attention, an operation that moves bytes and one that does nothing; then collectives of all
ranks by size, to which the constants of the network are fitted (`fit.py`). The slowest rank counts.
What launches an operation on a processor computes nothing meanwhile: there, Python's and autograd's
time is an operation's too, and a training step too small to compute anything tells how much. A
larger step tells, on processors and GPUs, how much longer products and moving bytes take among
other operations.
Of networks between nodes one machine can tell nothing: `between` is a name in the file, to be
edited, and a pasted output of nccl-tests can take the place of our own collectives.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from minipar.comm import collectives
from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import Axis, Mesh
from minipar.comm.threads import keep_to_a_core
from minipar.emulate import link
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel.base import masters
from minipar.parallel.plan import Plan
from minipar.ranks import backends
from minipar.ranks.launch import Ranks
from minipar.sim import fit, hardware
from minipar.sim.replay import replay
from minipar.sim.trace import trace
from minipar.sim.tracer import Compute
from minipar.train.optim import make_optimizer
from minipar.train.peak import synchronise
from minipar.train.step import train_step

TINY = LlamaConfig(16, 16, 16, num_layers=4, num_heads=2, num_kv_heads=1)
TOKENS = 16
"""A model, and a sequence, whose training step is all launching and no computing."""
SMALL = LlamaConfig(512, 192, 512, num_layers=3, num_heads=6, num_kv_heads=3, max_seq_len=192)
LARGE = LlamaConfig(32768, 2048, 8192, num_layers=4, num_heads=32, num_kv_heads=8, max_seq_len=4096)
"""Models, of a processor and of a GPU, whose step tells how much longer operations take among
others, where caches are cold and a GPU is as warm as training makes it."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDS = 8  # of a step, and of all sizes of messages
CPU = dict(cube=768, bytes=2**23, length=512, short=128, heads=8, most=24)
GPU = dict(cube=8192, bytes=2**30, length=4096, short=2048, heads=32, most=28)
"""Sizes: of products, tensors that an operation reads, long and short sequences and their heads, of
which a GPU needs many, and the largest message as a power of 2."""


@dataclass(frozen=True)
class CalibrateConfig:
    """Measure this machine, in less than three minutes, for `minipar plan --hardware FILE`."""

    out: str = "machine.toml"
    """Where to write it."""
    ranks: int = 0
    """Ranks that measure at the same time; 0: one per GPU, or per core without."""
    nccl_tests: str = ""
    """A text file with the output of one of nccl-tests' programs, on one node, instead of our
    own collectives."""


def run(config: CalibrateConfig, backend: str = "") -> hardware.Machine:
    """Measure, write the file, print what was found, and return the machine.

    Collectives are those of `backend`; by default NCCL's where each rank has a GPU, else gloo's.
    Raises `ValueError` for a place to write to, or a pasted output, that is none.
    """
    path = Path(config.out)
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise ValueError(f"--out {config.out}: name a .toml file in a folder that exists")
    pasted = parse_nccl(Path(config.nccl_tests), str(path)) if config.nccl_tests else []
    cores = min(8, psutil.cpu_count(logical=False) or 1)
    size = config.ranks or torch.cuda.device_count() or cores
    events = trace(TINY, Plan(), seq_len=TOKENS, on_cpu=True).ranks[0].events()
    launches = sum(type(event) is Compute for event in events)
    backend = backend or backends.pick_backend(size)
    with Ranks(size, backend=backend, sink=None, timeout=120) as ranks:
        if backend == "link":  # as it carries by itself
            ranks.run(link.use, "none")
            ranks.run(link.check_calls, False)
        found = ranks.run(measure, size, launches)
    measured = set.intersection(*(set(rank[0]) for rank in found))  # a step may fit on some alone
    slowest = {key: max(rank[0][key] for rank in found) for key in found[0][0] if key in measured}
    points = [fit.Point("", str(path), *row) for row in found[0][1]]
    machine = write(path, slowest, pasted or points, size)
    if "step" in slowest:
        model, plan = (LARGE, Plan(precision="bf16")) if is_gpu(slowest) else (SMALL, Plan())
        traces = trace(model, plan, seq_len=model.max_seq_len, on_cpu=not is_gpu(slowest))
        predicted = replay(traces, machine).seconds
        slower = slowest["step"] / predicted
        print(f"a training step takes {slower:.2f} times as long as its operations by themselves")
        slowest |= {key: slowest[key] * slower for key in (*DTYPES, "byte") if key in slowest}
        machine = write(path, slowest, pasted or points, size)
    device = machine.device
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {t}" for t, rate in device.peak.items())
    print(f"{rates}; {device.memory_bandwidth / 1e9:,.1f} GB/s of memory; {size} ranks")
    print(f"written into {path}; what connects it to others, `between`, is yours to name there")
    return machine


# ---------------------------------------------------------------------- on the ranks
def measure(size: int, launches: int) -> tuple[dict[str, float], list[tuple]]:
    """Return seconds and bytes of this rank, and a row per collective; called on every rank.

    `launches`: operations of a training step of `TINY` on one rank.
    """
    mesh = Mesh(dp=size)
    device = backends.compute_device()
    sizes = GPU if device.type == "cuda" else CPU
    n = sizes["cube"]
    if device.type == "cuda":
        one, count = torch.zeros(1, device=device), 200  # in a row: the host waits for the last
        found = {"launch": _seconds(lambda: [one.neg_() for _ in range(count)], device) / count}
        found["processors"] = torch.cuda.get_device_properties(device).multi_processor_count
        with suppress(torch.OutOfMemoryError):  # of a small GPU, operations by themselves must do
            found["step"] = _seconds(_step_of(LARGE, LARGE.max_seq_len, mesh.tp, device), device, 9)
        torch.cuda.empty_cache()
    else:
        keep_to_a_core(mesh.rank, size)
        found = {"launch": _seconds(_step_of(TINY, TOKENS, mesh.tp), device) / launches}
    for name, dtype in DTYPES.items():
        if device.type == "cpu" and dtype == torch.float16:
            continue  # no processor's products
        a = torch.randn(n, n, device=device).to(dtype)
        found[name] = _seconds(lambda a=a: a @ a, device) / (2 * n**3)
    a = torch.zeros(sizes["bytes"] // 4, device=device)
    found["byte"] = _seconds(lambda: a + 1.0, device) / (2 * sizes["bytes"])
    tokens = found["length"] = sizes["length"]
    heads, short = sizes["heads"], sizes["short"]
    found["shorter"] = tokens / short
    found["forward"], found["backward"] = _attention(1, heads, tokens, device)
    # Of as many tokens on a GPU, which must have enough to do.
    batch = tokens // short if device.type == "cuda" else 1
    found["short"], _ = _attention(batch, heads, short, device)
    memory = psutil.virtual_memory().total / size
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    found["memory"] = -memory  # the smallest counts
    messages = {
        2**power: torch.zeros(2**power // 4, device=device)
        for power in (range(12, sizes["most"] + 1, 2) if size > 1 else ())
    }
    times: dict[int, list[float]] = {num_bytes: [] for num_bytes in messages}
    steps, step = [], _step_of(SMALL, SMALL.max_seq_len, mesh.tp) if device.type == "cpu" else None
    for _ in range(ROUNDS):  # what others do on this machine comes and goes, and hits them all
        if step is not None:
            steps.append(_seconds(step, device, 5))
        for num_bytes, tensor in messages.items():
            count = 3 if num_bytes > 2**18 else 10  # as many on each rank
            call = partial(collectives.all_reduce, tensor, mesh.dp)
            times[num_bytes].append(_in_a_step(call, device, count))
    if steps:
        found["step"] = statistics.median(steps)
    rows = [
        ("all_reduce", n, size, 1, wire_bytes("all_reduce", n, size) / statistics.median(seconds))
        for n, seconds in times.items()
    ]
    return found, rows


def is_gpu(found: dict[str, float]) -> bool:
    """Whether it was a GPU that `measure` has measured."""
    return "processors" in found


def _step_of(
    config: LlamaConfig, tokens: int, alone: Axis, device: torch.device | str = "cpu"
) -> Callable:
    """A training step of a model on this rank, on GPUs in bf16; `alone` is an axis of one."""
    with torch.device(device):
        model = Llama(config)
        tokens = torch.zeros(1, tokens, dtype=torch.int64)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
    if tokens.is_cuda:
        masters.keep(model, optimizer, torch.bfloat16)
    return partial(train_step, model, [], optimizer, [(tokens, tokens)], alone, max_norm=1.0)


def _attention(batch: int, heads: int, length: int, device: torch.device) -> tuple[float, float]:
    """Seconds per FLOP of causal attention over `length` tokens, forward and backward."""
    qkv = torch.randn(3, batch, heads, length, 64, device=device)
    if device.type == "cuda":
        qkv = qkv.bfloat16()
    q, k, v = qkv.requires_grad_()

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    flops = 4 * batch * heads * length**2 * 64 / 2
    forward = _seconds(attend, device) / flops
    both = _seconds(lambda: torch.autograd.grad(attend().sum(), qkv), device) / flops
    return forward, max(both - forward, forward) / 2.5


def _in_a_step(call: Callable, device: torch.device, count: int) -> float:
    """Seconds of a call as steps have them: the mean of three in a row that follow computing.

    The first finds that what moves bytes sleeps, and that the other ranks come sooner or later; a
    step has calls that follow computing, and calls that follow another. On a GPU, of one by itself.
    """
    if device.type == "cuda":
        return _seconds(call, device, count)
    a = torch.randn(256, 256)

    def layer(calls: int) -> None:
        for _ in range(6):
            a @ a
        for _ in range(calls):
            call()

    alone, both = (_seconds(partial(layer, calls), device, count) for calls in (0, 3))
    return max((both - alone) / 3, 1e-6)


def _seconds(work: Callable, device: torch.device, count: int = 0) -> float:
    """Return the median of `count` calls, or of as many as half a second holds."""
    times: list[float] = []
    work()
    while len(times) < (count or 3) or (not count and sum(times) < 0.5 and len(times) < 1000):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


# ---------------------------------------------------------------------- the file
def write(
    path: Path, slowest: dict[str, float], points: list[fit.Point], size: int
) -> hardware.Machine:
    """Write the file, fit its network to the points, and return the machine."""
    peaks = {name: 1 / slowest[name] for name in DTYPES if name in slowest}
    kind = "bf16" if is_gpu(slowest) else "fp32"
    # At L tokens attention takes 1 + x times as long per FLOP as at very many, x = half_length / L:
    # at one c-th of L, 1 + c x.
    c = slowest["shorter"]
    ratio = min(max(1.0, slowest["short"] / slowest["forward"]), 0.975 * c)
    x = (ratio - 1) / (c - ratio)
    shares = {w: min(1.0, (1 + x) / slowest[w] / peaks[kind]) for w in ("forward", "backward")}
    device = {f"peak.{name}": rate for name, rate in peaks.items()}
    device |= {"memory": -slowest["memory"], "memory_bandwidth": 1 / slowest["byte"]}
    device |= {"launch": slowest["launch"], "memory_efficiency": 1.0}
    device |= {"processors": slowest["processors"]} if is_gpu(slowest) else {}
    law = shares | {"half_length": max(1.0, x * slowest["length"])}
    device |= {f"attention.measured.{key}": value for key, value in law.items()}
    best = max((p.bus for p in points), default=1e9)
    network = {"bandwidth": 2 * best, "share": 0.5, "tree": 0.25, "nvls": 0, "launch": 1e-4}
    network |= {"latency": 0, "ramp": 0.3}
    like = "gpu" if is_gpu(slowest) else "this-cpu"
    gpus = max([size, *(p.ranks for p in points)])  # a pasted output may be of more than measured
    source = "measured here" if points else "placeholder: one rank has no network to measure"

    def table(kind: str, values: dict[str, float], *lines: str, source: str) -> str:
        numbers = [f'{key} = [{value:.6g}, "{source}"]' for key, value in values.items()]
        return "\n".join([f"[{kind}]", *lines, *numbers, ""])

    def text() -> str:
        parts = [
            table("node.here", {"gpus": gpus}, 'device = "here"', 'inside = "here"',
                  'between = "100gbe"', source="measured here"),
            table("device.here", device, f'like = "{like}"', source="measured here"),
            table("network.here", network, source=source),
        ]  # fmt: skip
        return "\n".join(parts)

    if points:
        with tempfile.TemporaryDirectory() as folder:  # only what is fitted goes where asked
            first = Path(folder) / "first.toml"
            first.write_text(text(), encoding="utf-8")
            points = [replace(p, machine=str(first)) for p in points]
            fitted = fit.fit(points, "inside", ("launch", "share", "ramp"))
        network |= fitted
        network["tree"] = network["share"] / 2
    path.write_text(text(), encoding="utf-8")
    return hardware.load(path)


def parse_nccl(path: Path, machine: str) -> list[fit.Point]:
    """Return the points in the output of nccl-tests on one node; raise `ValueError` if none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    verb = re.search(r"(all_reduce|all_gather|reduce_scatter|alltoall)_perf", text)
    ranks = len(re.findall(r"^#\s+Rank\s+\d+", text, re.MULTILINE))
    hosts = {*re.findall(r"^#\s+Rank\s+\d+\b.* on\s+(\S+)\s+device", text, re.MULTILINE)}
    if len(hosts) > 1:
        raise ValueError(
            f"{path}: nccl-tests ran on {len(hosts)} hosts ({', '.join(sorted(hosts)[:4])}), and a "
            "calibration is of one node: give the output of a run inside of one"
        )
    row = r"^\s*(\d{1,15})\s+\d+\s+\w+\s+\S+\s+(?:-?\d+\s+)?[\d.]+\s+[\d.]+\s+(\d{1,5}(?:\.\d+)?)\s"
    rows = [(int(n), float(bus)) for n, bus in re.findall(row, text, re.MULTILINE)]
    if not verb or ranks < 2 or not any(bus for _, bus in rows):
        raise ValueError(
            f"{path}: no output of nccl-tests: it names the program, lists 2 ranks or more as "
            "'# Rank 0 ...', and has rows of size, count, type, redop, root, time, algbw, busbw"
        )
    name = verb[1].replace("alltoall", "all_to_all")
    return [fit.Point("", machine, name, n, ranks, 1, bus * 1e9) for n, bus in rows if n and bus]
