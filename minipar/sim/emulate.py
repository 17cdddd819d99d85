"""Devices by the names of machines, and a film of steps on emulated devices and links."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from minipar.comm import clock
from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.emulate import device as devices
from minipar.emulate import link as links
from minipar.emulate import strict
from minipar.observe import timeline
from minipar.observe.timeline import Timeline
from minipar.sim import hardware


def device(text: str, magnify: float = 1.0) -> devices.Device:
    """Return the device of a machine that `hardware.load` knows: "h100/100" is slowed 100 times.

    `magnify`: as in `minipar.emulate.device`. Raises `ValueError` for an unknown name, and for
    factors below 1.
    """
    name, slowdown = str(text), 1.0
    head, _, last = name.rpartition("/")
    with suppress(ValueError):  # a name, or the last part of a path, is not a number
        name, slowdown = head, float(last)
    return devices.Device(hardware.load(name).device, slowdown, magnify)


def film(
    work: Callable[[], Any],
    model: nn.Module,
    axis: Axis,
    *,
    device: devices.Device | None = None,
    wire: Any = None,
) -> Timeline:
    """Return the timeline of `work`, say a step of `model`, on all ranks of `axis`; all call this.

    `device`, `wire`: what to compute on and to talk over; None keeps the current one. The search
    for races is off meanwhile (`emulate/strict.py`), as it takes time.
    """
    before = devices.current(), links.current()
    try:
        if device is not None:
            devices.use(device)
        links.use(links.current() if wire is None else wire)
        with strict.paused(), devices.running():
            start = max(all_gather_object(time.monotonic(), axis)) + 0.5
            with timeline.record(model, devices.label(links.current().label)) as recorded:
                with timeline.active().span(None, ""):  # all ranks begin at one moment
                    clock.reach(start)
                work()
            return recorded.gather(axis)
    finally:
        if device is not None:
            devices.use(before[0])
        links.use(before[1])
