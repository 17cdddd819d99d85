"""Measure this machine; write a file for `minipar plan --hardware FILE`, in less than a minute.

Idea.   `hardware.py` needs a few numbers of a device and of its network. Each comes from work that
        it limits: a large product, a large tensor that is read and written, attention over a long
        sequence, many operations that do nothing, and a short and a long all-reduce.
Ranks.  All ranks measure at the same time, as they would train, and the slowest counts.

Limits: each operation is measured alone; in training, caches are cold and a GPU is warm. The
network *between* nodes is not measured: it is "none" until a person names it in the file. So is the
network inside of a node where there is one rank alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from minipar.comm import collectives
from minipar.comm.clock import synchronise
from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import Mesh
from minipar.ranks import backends
from minipar.ranks.launch import Ranks
from minipar.sim import hardware

HALF = 390  # tokens at which attention's kernel on a GPU reaches half of its rate
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CPU, GPU = (768, 2**23, 512, 8, 24), (8192, 2**30, 4096, 32, 28)
"""Sizes: of products, bytes that an operation reads, tokens of a sequence, heads, and the largest
message as a power of 2."""


@dataclass(frozen=True)
class CalibrateConfig:
    """Measure this machine, in less than a minute, for `minipar plan --hardware FILE`."""

    out: str = "machine.toml"
    """The file to write."""
    ranks: int = 0
    """Ranks that measure at the same time; 0: one per GPU; without GPUs, one per core up to 8."""


def run(config: CalibrateConfig) -> hardware.Machine:
    """Measure, write the file, print the result, and return the machine.

    Raises `ValueError` where no file can be written, and where one is already.
    """
    path = Path(config.out)
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise ValueError(f"--out {config.out}: name a .toml file in a folder that exists")
    if path.exists():  # a person may have named a network in this file
        raise ValueError(f"--out {config.out} is there already: name another file, or remove it")
    cores = min(8, psutil.cpu_count(logical=False) or 1)
    size = config.ranks or torch.cuda.device_count() or cores
    with Ranks(size, backend=backends.pick_backend(size), sink=None, timeout=120) as ranks:
        found = ranks.run(measure, size)
    slowest = {key: max(rank[key] for rank in found) for key in found[0]}
    machine = write(path, slowest, size)
    device = machine.device
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {t}" for t, rate in device.peak.items())
    print(f"{rates}; {device.memory_bandwidth / 1e9:,.1f} GB/s of memory; {size} ranks")
    print(f'written into {path}; name what connects it to other nodes there: between = "none"')
    return machine


# ---------------------------------------------------------------------- on the ranks
def measure(size: int) -> dict[str, float]:
    """Return seconds per operation, byte or FLOP, and this rank's bytes; called on all ranks.

    The key of a message is its number of bytes.
    """
    mesh, device = Mesh(dp=size), backends.compute_device()
    is_gpu = device.type == "cuda"
    n, num_bytes, tokens, heads, most = GPU if is_gpu else CPU
    one, count = torch.zeros(1, device=device), 200  # in a row: the host waits for the last
    found = {"launch": _seconds(lambda: [one.neg_() for _ in range(count)], device) / count}
    found["memory"] = -psutil.virtual_memory().total / size  # the smallest counts
    if is_gpu:
        found["processors"] = torch.cuda.get_device_properties(device).multi_processor_count
        found["memory"] = -torch.cuda.mem_get_info(device)[1]
    for name, dtype in DTYPES.items():
        if is_gpu or dtype != torch.float16:  # no CPU multiplies in fp16
            a = torch.randn(n, n, device=device).to(dtype)
            found[name] = _seconds(lambda a=a: a @ a, device) / (2 * n**3)
    a = torch.zeros(num_bytes // 4, device=device)
    found["byte"] = _seconds(lambda: a + 1.0, device) / (2 * num_bytes)

    qkv = torch.randn(3, 1, heads, tokens, 64, device=device)
    q, k, v = qkv = (qkv.bfloat16() if is_gpu else qkv).requires_grad_()

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    flops, found["length"] = 4 * heads * tokens**2 * 64 / 2, tokens
    found["forward"] = _seconds(attend, device) / flops
    both = _seconds(lambda: torch.autograd.grad(attend().sum(), qkv), device) / flops
    found["backward"] = max(both - found["forward"], found["forward"]) / 2.5
    for power in (12, most) if size > 1 else ():
        tensor = torch.zeros(2**power // 4, device=device)
        call = partial(collectives.all_reduce, tensor, mesh.dp)
        found[str(2**power)] = _seconds(call, device, 20)
    return found


def _seconds(work: Callable, device: torch.device, count: int = 0) -> float:
    """Return the median seconds of `count` calls, or of as many as fit into half a second."""
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
def write(path: Path, slowest: dict[str, float], size: int) -> hardware.Machine:
    """Write the file, and return the machine."""
    peaks = {name: 1 / slowest[name] for name in DTYPES if name in slowest}
    is_gpu, inside, network = "processors" in slowest, "none", ""
    half = HALF if is_gpu else 0.0
    device = {f"peak.{name}": rate for name, rate in peaks.items()}
    device |= {"memory": -slowest["memory"], "memory_bandwidth": 1 / slowest["byte"]}
    device |= {"launch": slowest["launch"], "memory_efficiency": 1.0, "attention_half": half}
    device |= {"processors": slowest["processors"]} if is_gpu else {}
    for way in ("forward", "backward"):
        share = (1 + half / slowest["length"]) / slowest[way]
        device[f"attention_{way}"] = min(1.0, share / peaks["bf16" if is_gpu else "fp32"])
    messages = {int(name): seconds for name, seconds in slowest.items() if name.isdecimal()}
    if messages:
        small, large = min(messages), max(messages)
        wire = wire_bytes("all_reduce", large - small, size)
        rate = wire / max(messages[large] - messages[small], 1e-9)
        its = {"bandwidth": rate, "share": 1, "launch": messages[small], "latency": 0}
        inside, network = "here", _table("network.here", its)
    node = 'device = "here"', f'inside = "{inside}"', 'between = "none"'
    like = f'like = "{"gpu" if is_gpu else "this-cpu"}"'
    tables = _table("node.here", {"gpus": size}, *node), _table("device.here", device, like)
    path.write_text("".join(tables) + network, encoding="utf-8")
    return hardware.load(path)


def _table(kind: str, values: dict[str, float], *lines: str) -> str:
    numbers = [f'{key} = [{value:.6g}, "measured here"]' for key, value in values.items()]
    return "\n".join([f"[{kind}]", *lines, *numbers, "", ""])
