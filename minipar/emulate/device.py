"""An emulated device: work takes as long as on a declared GPU, and most of that time is slept.

    from minipar.sim.emulate import device
    ranks.run(use, device("h100/50", magnify=64))      # or, in a notebook, Ranks(device="h100/50")

Idea.   On a laptop all ranks share a few cores, so timelines show how busy the cores are.
        Here each rank has a clock instead. The CPU computes all tensors as usual. Every operation
        moves the clock on by the seconds that the declared device needs. A rank sleeps until its
        clock's time where another rank could notice: where a collective or a message begins, and
        where a call or a recording ends. So 16 ranks on two cores have the timelines of 16 GPUs.
Law.    Seconds of an operation follow from its shapes (`operations.py`) and the device's data sheet
        (`sim/hardware.py`). A rank sleeps until a point of its clock. If the rank comes late, it
        sleeps less. So the times of a Timeline are exact.
Slow.   Devices and links are `slowdown` times slower than declared, because the laptop must do the
        real work in this time. A Timeline shows seconds of the declared device.
Format. A tensor of float32 here stands for a bf16 tensor of a GPU: a matmul runs at the rate of
        bf16, and all bytes count half, on the link too. The optimizer's step keeps its 28 bytes per
        parameter: float32 masters and moments, and bf16 weights. Other dtypes count all bytes.
Larger. With `magnify` k every side of every matrix counts k times: widths and sequence lengths,
        while heads, layers and microbatches stay. Products and attention then have k^3 times their
        FLOPs, and messages, copies and states k^2 times their bytes. (A norm's weights count k
        times too much, which is negligible. Divide `bucket_mb` by k^2: 25 / k^2 for 25 MB.)

Limits: collectives on the emulated link alone; copies between device and host take real time;
compute in other threads of a rank takes no time.
"""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from minipar.comm import calls, clock
from minipar.comm.clock import paused as paused
from minipar.emulate import operations


@dataclass(frozen=True)
class Device:
    """The declared device of a rank. Raises `ValueError` for a factor below 1."""

    sheet: Any  # an object that gives seconds, like `minipar.sim.hardware.Device`
    slowdown: float = 1.0
    magnify: float = 1.0

    def __post_init__(self) -> None:
        for name in ("slowdown", "magnify"):
            if not 1 <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 up, to 1e9 at most")

    def played(self, work: operations.Work) -> operations.Work:
        """Return the work of the declared model: in bf16, with sides `magnify` times ours."""
        fixed = {"product": 1, "attention": 2, "bytes": 0}[work.work]  # batch and heads stay
        sides = (side * self.magnify for side in work.shape[fixed : fixed + 3])
        shape = (*work.shape[:fixed], *sides, *work.shape[fixed + 3 :])
        dtype = "bfloat16" if work.dtype == "float32" else work.dtype
        num_bytes = self.counted(work.num_bytes, work.dtype)
        return work._replace(shape=shape, dtype=dtype, num_bytes=num_bytes)

    def counted(self, num_bytes: float, dtype: str = "") -> int:
        """Return the bytes of the declared model for `num_bytes` of ours, in tensors of `dtype`."""
        share = 0.5 if dtype == "float32" else 1
        return round(num_bytes * share * self.magnify**2)

    def __str__(self) -> str:
        wider = f", a model {self.magnify:g}x wider" if self.magnify > 1 else ""
        return f"{self.sheet.name.upper()} in bf16{wider}"


# ---------------------------------------------------------------------- of this process
def use(device: Device | None) -> None:
    """Compute on `device` from now on, inside of `running`; None: on the real device."""
    if clock.device is not None:
        calls.taps.remove(clock.device)
    clock.device = None if device is None else _Player(device)


def current() -> Device | None:
    """Return the device that is emulated here."""
    return None if clock.device is None else clock.device.device


def label(link: str) -> str:
    """Return the label of a figure for the device and a link with the label `link`."""
    return link if current() is None else f"Emulated {current()}; {link}. Times are the GPU's."


def counted(num_bytes: int, dtype: str = "") -> int:
    """Return the bytes of the declared model for bytes of ours, in tensors of `dtype`."""
    device = None if clock.is_paused else current()
    return num_bytes if device is None else device.counted(num_bytes, dtype)


@contextmanager
def running() -> Iterator[None]:
    """Make each operation of the body take its time; wait for the device at the end."""
    if clock.device is None:
        yield
        return
    player = clock.device
    player.num_steps = 0  # an earlier call may have failed inside of a step
    before = register_optimizer_step_pre_hook(player.enter_step)
    after = register_optimizer_step_post_hook(player.leave_step)
    with before, after, clock.recording(), operations.fused_norms(), player:
        yield


class _Player(TorchDispatchMode, calls.Tap):
    """Moves the clock of a rank with every operation that torch dispatches."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.slowdown = device, device.slowdown
        self.at, self.beside = time.monotonic(), threading.local()  # as `clock.device` has to
        self.num_steps = 0  # open optimizer steps, which may be nested
        self.stepping = 0.0  # seconds of an optimizer step, until its first operation
        self.known: dict[Any, float] = {}
        gc.freeze()  # a garbage collection over all imported modules would delay the rank
        calls.taps.insert(0, self)  # first: later taps see the bytes of the declared model

    def begin(self, call: calls.Call) -> None:
        call.num_bytes = counted(call.num_bytes, call.dtype)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if clock.is_paused or op.namespace == "c10d" or operations.is_view(op):
            return result
        if torch.is_inference_mode_enabled():  # torch then dispatches a linear layer as one op
            raise RuntimeError("an emulated device needs torch.no_grad(), not inference_mode()")
        if self.num_steps:  # charge the optimizer's whole step at its first operation
            self.at += self.stepping * self.slowdown
            self.stepping = 0.0
            return result
        key = op, operations.key_of(args), operations.key_of(tuple(kwargs.items()))
        if key not in self.known:
            given, made = operations.tensors((args, kwargs)), operations.tensors(result)
            work = operations.work_of(op, given, made, args)
            idle = work is None or not work.num_bytes
            self.known[key] = 0.0 if idle else operations.seconds_of(work, self.device)
        self.at += self.known[key] * self.slowdown
        return result

    def enter_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.num_steps += 1
        if self.num_steps == 1 and not clock.is_paused:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            step = operations.step_of(stepped, list(optimizer.state.values()))
            self.stepping = operations.seconds_of(step, self.device)

    def leave_step(self, *_: Any) -> None:
        self.num_steps -= 1
