"""A step emulated: real ranks and real collectives, on devices and links by declaration.

Beside the simulated step (`replay.py`) of the same plan on the same devices and links: both ask the
same data sheet how long an operation takes, and the same link how long a call. Everything else is
found out twice: which operations and calls there are, who waits for whom, what is hidden. One
replays a trace of a rank without values; the other lets all ranks run.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from minipar.comm import clock
from minipar.comm.collectives import all_gather_object, barrier
from minipar.comm.mesh import Axis, Mesh
from minipar.emulate import device as devices
from minipar.emulate import link as links
from minipar.emulate import strict
from minipar.model.llama import LlamaConfig
from minipar.observe import timeline
from minipar.observe.spans import clipped
from minipar.observe.timeline import Timeline
from minipar.parallel.plan import Plan
from minipar.ranks.launch import Ranks
from minipar.sim import hardware
from minipar.sim.trace import Actor


def device(text: str, magnify: float = 1.0) -> devices.Device:
    """Return the device of a machine that `hardware.load` knows: "h100/100" is slowed 100 times.

    The device plays bf16; "h100:fp32/100" plays float32. `magnify`: as in `minipar.emulate.device`.
    Raises `ValueError` for an unknown name or format, and for factors below 1.
    """
    name, slowdown = str(text), 1.0
    if "/" in name:
        head, _, last = name.rpartition("/")
        with suppress(ValueError):  # the last part of a path is no number
            name, slowdown = head, float(last)
    name, _, chosen = name.partition(":")
    sheet = hardware.load(name).device
    return devices.Device(sheet, slowdown, magnify, chosen or "bf16")


@dataclass(frozen=True)
class Emulated:
    """An emulated device and an emulated link as the machine of `replay`."""

    device: devices.Device
    link: links.Link | links.Topology
    has_lanes = True  # where messages do not queue behind collectives

    @property
    def gpus(self) -> int:
        """Ranks of a node."""
        return getattr(self.link, "ranks_per_node", 1 << 30)

    def seconds_of_collective(
        self, verb: str, num_bytes: float, ranks: int, nodes: int = 1
    ) -> float:
        """Return the seconds of `verb`; `num_bytes` is the whole tensor's, in the large model."""
        wire = self.link
        if isinstance(wire, links.Topology):
            wire = wire.inter if nodes > 1 else wire.intra
        return links.seconds(verb, num_bytes, ranks, wire)


class Ran(NamedTuple):
    """A training step that did happen, in declared seconds: from the end of the one before."""

    seconds: float
    timeline: Timeline  # of the step, all ranks
    late: float  # seconds that a rank was late at most, for want of processors here


def step(ranks: Ranks, config: LlamaConfig, plan: Plan, *, sequences: int = 1, seq_len: int) -> Ran:
    """Run training steps of a Llama under `plan` on `ranks`, and tell the second.

    As in `trace`: `sequences` of a microbatch, `seq_len` tokens each. Without an emulated device,
    seconds are measured. A step before them, on the device as it is, warms up.
    """
    found = ranks.run(_step, config, plan, sequences, seq_len)
    begins, ends = ({r: own[i] for r, own in enumerate(found)} for i in (0, 1))
    every = found[0][3]
    timeline = Timeline(clipped(every.spans, begins, ends), every.label).shifted()
    seconds = max(ends.values()) - max(begins.values())
    return Ran(seconds, timeline, max(own[2] for own in found))


def _step(config: LlamaConfig, plan: Plan, sequences: int, seq_len: int) -> tuple:
    """Return begin and end of the step, how late the rank was, and all spans."""
    mesh = Mesh(**plan.mesh_sizes())
    with devices.paused():
        actor = Actor(config, plan, mesh, sequences, seq_len, "cpu")
        actor.step()
    barrier(mesh.world)
    label = devices.label(f"{links.current().label}, {plan}")
    with timeline.record(actor.model, label) as recorded:
        ends = []
        for _ in range(2):
            actor.step()
            ends.append(devices.now())
        late = devices.late()
        with devices.paused():
            actor.step()  # what the second has left in flight arrives, and is recorded
    return *ends, late, recorded.gather(mesh.world)


def film(
    work: Callable[[], Any],
    model: nn.Module,
    axis: Axis,
    *,
    device: devices.Device | None = None,
    wire: Any = None,
) -> Timeline:
    """Return the timeline of `work`, say a step of `model`, on all ranks of `axis`; all call this.

    `device`, `wire`: what to compute on and to talk over; None: as it is. No warning is given of
    a machine too busy for its device: the clocks, and with them the timeline, are reckoned as ever.
    Races are not looked for meanwhile (`emulate/strict.py`), as that takes time.
    """
    before = devices.current(), links.current()
    if device is not None:
        devices.use(device)
    links.use(links.current() if wire is None else wire)
    try:
        with strict.paused(), devices.running(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = max(all_gather_object(time.monotonic(), axis)) + 0.5
            with timeline.record(model, devices.label(links.current().label)) as recorded:
                with timeline.active().blocked():  # all ranks begin at one moment of their clocks
                    clock.reach(start)
                work()
            return recorded.gather(axis)
    finally:
        if device is not None:
            devices.use(before[0])
        links.use(before[1])
