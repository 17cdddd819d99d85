"""An emulated link: gloo moves the data, a clock decides when the data have arrived.

On a laptop all ranks share one memory: communication takes compute time, and cannot be hidden.
The backend ``link`` (`link_group.py`) lets gloo do the work and then *sleeps* until a real link
would have been done. So overlap is real, and the processor is free to compute meanwhile:

    link_group.register()
    dist.init_process_group("link", ...)            # or dist.new_group(backend="link")
    use("1gbe")                                     # on every rank; changes all link groups at once
    use(Topology(2, 2, LINKS["nvlink4"], LINKS["ib-ndr"]).scaled(2000))

Model (alpha-beta; Hockney 1994; Thakur, Rabenseifner & Gropp 2005, section 3; Chan et al. 2007):
an operation starts when the last rank has called it and the link is free. It takes
``steps * latency + wire_bytes / bandwidth`` seconds (`seconds`). Links work in both directions at
once. Each process group has a link of its own, on which its collectives queue, as on a CUDA stream.
Messages have a lane per peer and direction: a message may leave before the last one has arrived.

Limits: one machine, CPU tensors. In torch: the backends ``gloo`` and ``nccl``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from minipar.comm import clock
from minipar.comm.collectives import wire_bytes


# ---------------------------------------------------------------------- links
@dataclass(frozen=True)
class Link:
    """One direction of a link: `latency` in seconds per step, `bandwidth` in bytes per second."""

    name: str
    latency: float
    bandwidth: float
    source: str = ""
    slowdown: float = 1.0

    def scaled(self, factor: float) -> "Link":
        """Return this link slowed by `factor`, to match a processor slower by the same factor."""
        if not 0 < factor <= 1e9:
            raise ValueError(f"cannot slow a link {factor} times; use a factor above 0, up to 1e9")
        return replace(
            self,
            latency=self.latency * factor,
            bandwidth=self.bandwidth / factor,
            slowdown=self.slowdown * factor,
        )

    def between(self, ranks: Sequence[int]) -> "Link":
        """Return this link, for any ranks. On a `Topology`, the link depends on the ranks."""
        return self

    @property
    def label(self) -> str:
        """Return the words for a figure: "emulated NVLink 4, slowed 2000x"."""
        return "no emulated link" if self.bandwidth == math.inf else f"emulated {self}"

    def __str__(self) -> str:
        return self.name + (f", slowed {self.slowdown:g}x" if self.slowdown != 1 else "")


_TCP = "; latency: of the order of a TCP message through a switch, rounded"
_NCCL = "; latency: a ring step in the cost model of NCCL 2.17 (tuning.cc, hwLat, Simple)"
LINKS = {
    "none": Link("none", 0.0, math.inf, "as fast as this machine goes"),
    "1gbe": Link("1 GbE", 50e-6, 125e6, "IEEE 802.3ab, 1 Gb/s" + _TCP),
    "10gbe": Link("10 GbE", 30e-6, 1.25e9, "IEEE 802.3ae, 10 Gb/s" + _TCP),
    "25gbe": Link("25 GbE", 20e-6, 3.125e9, "IEEE 802.3by, 25 Gb/s" + _TCP),
    "100gbe": Link("100 GbE", 20e-6, 12.5e9, "IEEE 802.3ba, 100 Gb/s" + _TCP),
    "ib-ndr": Link("InfiniBand NDR", 9.6e-6, 50e9, "IBTA NDR 4x, 400 Gb/s" + _NCCL),
    "pcie5": Link("PCIe 5", 5.7e-6, 63e9, "PCI-SIG, 16 lanes of 32 GT/s" + _NCCL),
    "nvlink4": Link("NVLink 4", 3.4e-6, 450e9, "NVIDIA H100, 18 links of 25 GB/s" + _NCCL),
    "nvlink5": Link("NVLink 5", 3.4e-6, 900e9, "NVIDIA B200, 18 links of 50 GB/s" + _NCCL),
}
"""Peak rates in one direction, by data sheet; latencies of a collective's step, with software."""


@dataclass(frozen=True)
class Topology:
    """Nodes of `ranks_per_node` ranks each: links `intra` inside of a node, `inter` between nodes.

    A node has `cards_per_node` network cards, each as fast as `inter` in both directions at once.
    None gives each rank a card. All ranks of a node run the same program: while ranks (0, 2)
    communicate, (1, 3) do so too. With one card per node, this takes twice as long. A flat ring of
    all ranks has only one hop that leaves a node, so it takes no longer.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    intra: Link = LINKS["nvlink4"]
    inter: Link = LINKS["ib-ndr"]
    cards_per_node: int | None = None

    def between(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link of these global ranks, while the ranks beside them send too."""
        nodes = [rank // self.ranks_per_node for rank in ranks]
        on_node, cards = nodes.count(nodes[0]), self.cards_per_node or self.ranks_per_node
        if on_node == len(nodes):
            return self.intra
        groups = max(1, self.ranks_per_node / cards / on_node)  # groups that share one card
        return replace(self.inter, bandwidth=self.inter.bandwidth / groups)

    def scaled(self, factor: float) -> "Topology":
        """Return this topology with both links slowed by `factor`."""
        return replace(self, intra=self.intra.scaled(factor), inter=self.inter.scaled(factor))

    @property
    def label(self) -> str:
        """Return the words for a figure."""
        return f"emulated {self}"

    def __str__(self) -> str:
        shape = f"{self.nodes} nodes x {self.ranks_per_node} ranks"
        cards = f", {self.cards_per_node} cards per node" if self.cards_per_node else ""
        return f"{shape} ({self.intra} inside, {self.inter} between{cards})"


# ---------------------------------------------------------------------- cost
_TREES = "broadcast", "reduce", "scatter", "gather", "barrier"
_STEPS: dict[str, Callable[[int], int]] = {
    # Rings, and for all_to_all a pairwise exchange.
    "all_reduce": lambda n: 2 * (n - 1),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), lambda n: n - 1),
    # Trees, pipelined: the depth once, the bytes once.
    **dict.fromkeys(_TREES, lambda n: math.ceil(math.log2(n))),
    **dict.fromkeys(("send", "recv"), lambda n: 1),
}


def seconds(verb: str, num_bytes: int, size: int, link: Link) -> float:
    """Return how long `verb` takes among `size` ranks; `num_bytes` is the whole tensor's.

    Bytes as in `collectives.wire_bytes`, except that a receive takes as long as the send. Rings as
    in Thakur et al., section 4; trees approach the bounds of Chan et al., table 1.
    """
    if size == 1:
        return 0.0
    sent = wire_bytes("send" if verb == "recv" else verb, num_bytes, size)
    return _STEPS[verb](size) * link.latency + sent / link.bandwidth


# ---------------------------------------------------------------------- settings of this process
_link: Link | Topology = LINKS["none"]
checks = True
observers: list[Callable[[Any], None]] = []
"""Functions called with every `LinkWork` that ends; for example, to record torch's DDP and FSDP."""


def parse(text: str) -> Link:
    """Return the link of that name; "1gbe*4" is one slowed 4 times. Raises `ValueError`."""
    name, times, factor = text.partition("*")
    if name not in LINKS:
        raise ValueError(f"no link {name!r}; there are {', '.join(LINKS)}")
    return LINKS[name].scaled(float(factor)) if times else LINKS[name]


def use(link: Link | Topology | str) -> Link | Topology:
    """Set the link of all link groups, for operations from now on. Call it on every rank.

    Raises `ValueError` for an unknown name, or a topology of another size than the world.
    """
    global _link
    link = parse(link) if isinstance(link, str) else link
    if isinstance(link, Topology) and dist.is_initialized():
        asked, world = link.nodes * link.ranks_per_node, dist.get_world_size()
        if asked != world:
            raise ValueError(f"{link} has {asked} ranks, but there are {world}")
    _link = link
    return link


def current() -> Link | Topology:
    """Return the link that `use` has set."""
    return _link


def check_calls(enabled: bool = True) -> None:
    """Compare the calls of all ranks before each collective (the default). Call it on every rank.

    The check costs a tiny all-gather: switch it off to measure time.
    """
    global checks
    checks = enabled


def in_use() -> Link | Topology:
    """Return the link that `use` has set, slowed by the `slowdown` of the emulated device."""
    device = None if clock.is_paused else clock.device
    return _link if device is None else _link.scaled(device.slowdown)
