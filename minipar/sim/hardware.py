"""Devices, networks and software as data, and formulas for the seconds that work takes on them.

Idea.   A simulator asks four things of hardware: the seconds of a matrix product, of attention, of
        moving bytes through memory, and of a collective. Each answer is a formula of a few
        constants; the constants are in `machines/*.toml`, each beside its source.
Math.   For a product of [m, k] and [k, n], at a ceiling of C FLOP/s that the best shapes reach:

            launch + max(2 m n k / (0.95 C fill) + result / speed, bytes / speed)

        at the `speed` of memory: a processor does not multiply while it writes. `fill` is the share
        of its waves that a product fills: outputs are cut into whole tiles, and a wave is one tile
        per processor of the device. A collective takes

            launch + steps * latency + bytes / (bandwidth * share)

        with the steps and bytes of a ring; a short all-reduce, of a tree. Messages of a ring cross
        between nodes once per node.
Units.  Seconds, bytes, FLOP/s, bytes/s in one direction; a tensor's bytes are the whole tensor's.
Source. Williams et al. 2009 (the roofline); NVIDIA, "Matrix Multiplication Background" (tiles and
        waves); nccl-tests, PERFORMANCE.md (bus bandwidth).

Limits: collectives do not slow each other or the products beside them down; a network has no
distance and no other users, and no switches that reduce; no law knows a device's clock.
"""

import difflib
import math
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from minipar.comm.collectives import wire_bytes
from minipar.text import one_line

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}
"""Bytes of an element, by the name that peaks and ceilings have in the files."""
OF_CEILING = 0.95
"""Share of the best shape's rate (the ceiling) that large products of other shapes reach."""
_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


# ---------------------------------------------------------------------- devices
@dataclass(frozen=True)
class Device:
    """One GPU, or whatever a rank computes on, with the keys of `devices.toml`."""

    name: str
    processors: float
    tile: float  # a product is cut into tiles of `tile` x `tile` outputs, one per processor
    memory: float  # bytes that a process sees
    taken: float  # bytes that CUDA itself and a process group take
    fragmentation: float  # share of the rest that the allocator cannot use
    memory_bandwidth: float
    memory_efficiency: float  # share of the bandwidth that elementwise operations reach
    launch: float  # seconds of an operation that does nothing
    peak: dict[str, float]  # FLOP/s by type, as sold
    ceiling: dict[str, float] = field(default_factory=dict)  # FLOP/s of the best product
    attention_forward: float = 0.0  # share of the peak that long sequences reach; 0: no kernel
    attention_backward: float = 0.0
    attention_half: float = 0.0  # tokens at which half of that share is reached

    def usable_memory(self) -> float:
        """Return the bytes left for tensors beside a process group."""
        return max(0.0, (self.memory - self.taken) * (1 - self.fragmentation))

    def ceiling_of(self, dtype: str) -> float:
        """Return the FLOP/s of the best product: measured, or the peak at the share of bf16.

        Raises `ValueError` for a type that the device does not have.
        """
        dtype = type_name(dtype)
        if dtype in self.ceiling:
            return self.ceiling[dtype]
        known = [t for t in ("bf16", "fp16", "fp32") if t in self.ceiling and t in self.peak]
        share = self.ceiling[known[0]] / self.peak[known[0]] if known else 1
        return self._peak(dtype) * share

    def seconds_of_bytes(self, num_bytes: float) -> float:
        """Return the seconds of an elementwise operation that reads and writes `num_bytes`."""
        return self.launch + num_bytes / (self.memory_bandwidth * self.memory_efficiency)

    def seconds_of_matmul(
        self, m: float, n: float, k: float, dtype: str = "bf16", *, batch: float = 1
    ) -> float:
        """Return the seconds of `batch` products [m, k] @ [k, n] of one launch."""
        dtype = type_name(dtype)
        if not m * n * k * batch:
            return self.launch
        tiles = batch * math.ceil(m / self.tile) * math.ceil(n / self.tile)
        waves = math.ceil(tiles / self.processors)
        flops = waves * self.processors * self.tile**2 * 2 * k
        speed = self.memory_bandwidth * self.memory_efficiency / BYTES[dtype]
        through_memory = batch * (m * k + k * n + m * n) / speed
        # A processor multiplies nothing while it writes its tile.
        multiplied = flops / (OF_CEILING * self.ceiling_of(dtype)) + batch * m * n / speed
        return self.launch + max(multiplied, through_memory)

    def seconds_of_attention(
        self, batch: float, heads: float, queries: float, keys: float, head_dim: float,
        dtype: str = "bf16", *, causal: bool = True, backward: bool = False, fused: bool = True,
    ) -> float:  # fmt: skip
        """Return the seconds of softmax(Q Kᵀ) V for Q [batch, heads, queries, head_dim].

        A causal mask halves the FLOPs, and a backward needs 2.5 times a forward's (both as
        in the FlashAttention papers). Attention that is not `fused`, and any on a device without
        such a kernel, writes the scores to memory.
        """
        dtype, passes = type_name(dtype), 2 if backward else 1
        if not (fused and self.attention_forward):
            scores = self.seconds_of_matmul(queries, keys, head_dim, dtype, batch=batch * heads)
            values = self.seconds_of_matmul(queries, head_dim, keys, dtype, batch=batch * heads)
            # Mask and softmax read and write the scores once each; in backward, softmax reads two.
            between = (3 + passes) * batch * heads * queries * keys * BYTES[dtype]
            return passes * (scores + values) + self.seconds_of_bytes(between)
        flops = 4 * batch * heads * queries * keys * head_dim * (0.5 if causal else 1)
        # The rate is share * peak * keys / (keys + half).
        flops *= (2.5 if backward else 1) * (1 + self.attention_half / max(keys, 1))
        share = self.attention_backward if backward else self.attention_forward
        num_bytes = 2 * batch * heads * (queries + keys) * head_dim * BYTES[dtype] * passes
        compute = self.launch + flops / (share * self._peak(dtype))
        return max(compute, self.seconds_of_bytes(num_bytes))

    def _peak(self, dtype: str) -> float:
        if dtype not in self.peak:
            raise ValueError(f"{self.name} has no {dtype}; it has {', '.join(self.peak)}")
        return self.peak[dtype]


# ---------------------------------------------------------------------- networks
@dataclass(frozen=True)
class Network:
    """The links between the devices of a node, or between nodes, with the keys of `networks.toml`.

    The network "none" stands for links that nobody has measured or named: its use is an error.
    """

    name: str
    bandwidth: float  # of one port, as sold
    share: float  # of the bandwidth that long messages reach
    launch: float  # seconds to start a collective
    latency: float  # seconds of one step of a collective
    shared: float = 0.0  # 1: all devices of a node use one port (Ethernet); 0: each has its own


@dataclass(frozen=True)
class Machine:
    """Nodes of `gpus` devices each: how long anything takes there. Made by `load`."""

    name: str
    device: Device
    gpus: int
    inside: Network
    between: Network

    def seconds_of_collective(
        self, verb: str, num_bytes: float, ranks: int, nodes: int = 1
    ) -> float:
        """Return the seconds of `verb` among `ranks` devices, spread evenly over `nodes`.

        `num_bytes` is the whole tensor's. Every rank of a node does the same at the same time (as
        in a mesh), hence a port that a node's devices share is divided by all of them. Send and
        recv are between two ranks, of one node or of two. Raises `ValueError` for a network that
        nobody has named.
        """
        assert 1 <= nodes <= ranks <= nodes * self.gpus, f"{ranks} ranks on {nodes} nodes"
        if ranks == 1:
            return 0.0
        inside, between, local = self.inside, self.between, ranks / nodes
        for where, is_used in (("inside", local > 1), ("between", nodes > 1)):
            if is_used and getattr(self, where).name == "none":
                raise ValueError(
                    f"{self.name} has no network {where} its nodes, as nobody has measured one; "
                    f'name one in its file, such as {where} = "nvlink4" or "ib-ndr"'
                )
        near = inside.bandwidth * inside.share
        port = between.bandwidth * between.share / (self.gpus if between.shared else 1)
        outer, busiest = (inside, near) if nodes == 1 else (between, port)
        if nodes > 1 and local > 1:  # a ring uses the ports of all its ranks in a node
            busiest = min(near, local * port)
        across = math.ceil(math.log2(nodes))
        depth = math.ceil(math.log2(ranks)) - across

        def law(inner_steps: float, outer_steps: float, on_wire: float) -> float:
            waits = inner_steps * inside.latency + outer_steps * between.latency
            return outer.launch + waits + on_wire

        if verb in ("send", "recv"):
            return law(nodes == 1, nodes > 1, num_bytes / (near if nodes == 1 else port))
        if verb == "all_to_all":  # all pairs at once: what leaves the node waits for the ports
            own, other = num_bytes * (local - 1) / ranks, num_bytes * (ranks - local) / ranks
            return law(depth, across, max(own / near, other / port if nodes > 1 else 0))
        on_wire = wire_bytes(verb, int(num_bytes), ranks) / busiest
        rounds = 2 if verb == "all_reduce" else 1
        ring = law(rounds * (ranks - nodes), rounds * (nodes - 1), on_wire)
        if verb != "all_reduce":
            return ring
        # Short messages among many ranks go up and down a tree: its ranks send twice.
        return min(ring, law(2 * depth, 2 * across, 4 * num_bytes / busiest))


@dataclass(frozen=True)
class Software:
    """The costs of a family of training software, with the keys of `software.toml`."""

    name: str
    # Time.
    host: float  # seconds that the host needs to launch a layer, in one direction
    host_tp: float  # more seconds per doubling of tp
    host_across: float  # more per doubling of tp where a pipeline runs over several nodes, too
    passes: float  # bytes that a layer's elementwise operations move, as a multiple of the least
    attention: float  # seconds of attention, as a multiple of the kernel's
    beside: float  # 1: inside a node, collectives of tp run beside the products they belong to
    biases: float  # 1: a GPT has biases and dropout; 0: neither
    exposed: float  # share of data parallelism's collectives that is never hidden
    waited: float  # 1: forward waits for weights that ZeRO 1 and 2 gather; 0: they travel beside it
    bucket: float  # capacity of a bucket of data parallelism, in gradients,
    bucket_dp: float  # or this times the ranks of dp, if larger; ZeRO 3 sends layer by layer
    copies: float  # bytes per parameter that ZeRO 3 moves through memory, each microbatch
    added: float  # bytes that ZeRO 0 to 2 move to add a gradient to the sum of microbatches,
    first: float  # and for a gradient of the first microbatch
    fixed: float  # seconds of a step that are the same for every plan
    selective: float  # share of a forward that selective recomputation repeats, but for scores
    # Memory.
    kept: float  # share of activations that selective recomputation keeps, but for scores
    buffered: float  # 1: gradients stay whole until the step; 0: ZeRO frees them once reduced
    fused: float  # 1: a norm is one kernel, and keeps its input alone; 2: so does a gate
    gathered: float  # share of norms' results that sequence parallelism keeps whole
    logits: float  # bytes that the loss keeps of a logit
    greedy: float  # 1: a stage takes layers until it exceeds its share of the cost; 0: balanced


def type_name(dtype: str) -> str:
    """Return our name of a type; torch's names, and torch's types themselves, are known too."""
    name = str(dtype).removeprefix("torch.")
    name = _NAMES.get(name, "fp8" if name.startswith("float8") else name)
    if name not in BYTES:
        raise ValueError(f"no type {dtype!r}; use one of {list(BYTES)}")
    return name


# ---------------------------------------------------------------------- files
_FOLDER = resources.files("minipar.sim") / "machines"
_PARTS = {"device": Device, "network": Network, "software": Software, "node": Machine}
_REFERS = {"device": "device", "inside": "network", "between": "network"}
Known = dict[str, dict[str, dict[str, Any]]]  # tables by kind and name


def load(name: str | Path) -> Machine:
    """Return the machine of that name, or of a file.

    A name is that of a node and a network, such as "h100-ndr", or of a node alone, with its own
    network (`machines` has all names). A file ends in ``.toml``. It adds tables to those of
    ``machines/*.toml``, and one ``[node.NAME]``: the machine. Each number is written
    ``[number, "source"]``; ``like`` takes over what another table has. Raises `ValueError`.
    """
    name = str(name)
    if name in machines():
        return machines()[name]
    if not name.endswith(".toml"):
        near = difflib.get_close_matches(name.lower(), machines(), 3, 0.0)
        others = f"the nearest names are {', '.join(near)}; a .toml describes others"
        raise ValueError(f"no machine {name!r}: {others}")
    try:
        own = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        (node,) = own.get("node", {})
        return _make("node", node, {k: v | own.get(k, {}) for k, v in _built_in().items()})
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is not a machine: {one_line(error)}") from None


def software(name: str) -> Software:
    """Return a family of training software. Raises `ValueError` for an unknown one."""
    return _make("software", name, _built_in())


@cache
def networks() -> dict[str, Network]:
    """Return all networks by name."""
    return {name: _make("network", name, _built_in()) for name in _built_in()["network"]}


@cache
def machines() -> dict[str, Machine]:
    """Return the machines that have names: each node, and each with each network between nodes."""
    known, found = _built_in(), {}
    nodes = [_make("node", name, known) for name in known["node"]]
    inside = {"none", *(node.inside.name for node in nodes)}
    for node in nodes:
        found[node.name] = node
        for network in networks().values():
            if network.name not in inside:
                name = f"{node.name}-{network.name.removeprefix('ib-')}"
                found[name] = replace(node, name=name, between=network)
    return found


@cache
def _built_in() -> Known:
    files = ("devices", "networks", "nodes", "software")
    texts = ((_FOLDER / f"{name}.toml").read_text(encoding="utf-8") for name in files)
    return {k: v for text in texts for k, v in tomllib.loads(text).items() if k != "sources"}


def _make(kind: str, name: str, known: Known) -> Any:
    """Return the part of that name."""
    made: dict[str, Any] = {}
    for key, value in _table(kind, name, known).items():
        if kind == "node" and key in _REFERS:
            made[key] = _make(_REFERS[key], value, known)
        elif isinstance(value, dict):
            made[key] = {type_name(t): _number(v, f"{name}.{key}.{t}") for t, v in value.items()}
        else:
            made[key] = _number(value, f"{name}.{key}")
    if "gpus" in made:
        if made["gpus"] not in range(1, 1025):
            raise ValueError(f"{name}.gpus={made['gpus']:g} must be a whole number of 1 to 1,024")
        made["gpus"] = int(made["gpus"])
    return _PARTS[kind](name, **made)  # raises TypeError for a key that is missing or unknown


def _table(kind: str, name: str, known: Known) -> dict[str, Any]:
    """Return the table of that name, with everything that the table it is `like` has."""
    if name not in known[kind]:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(known[kind])}")
    table = dict(known[kind][name])
    if (like := table.pop("like", None)) is None:
        return table
    return _table(kind, like, _built_in() if like == name else known) | table


def _number(value: Any, where: str) -> float:
    """Return the number of ``[number, "source"]``."""
    match value:
        case [int() | float() as number, str()] if 0 <= number < math.inf:
            return float(number)
    raise ValueError(f'{where} must be [number of 0 or more, "source"], not {str(value)[:60]}')
