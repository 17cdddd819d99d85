"""CPU offload: shards of fsdp live on the host, with their gradients and the optimizer's state.

Idea.   Adam keeps 8 bytes per parameter, and touches them once a step. The host has room for these
        bytes, and is fast enough. So the device keeps what forward and backward need. Gradients
        leave for the host, the optimizer steps there, and new weights come back.
Math.   The same as without offload. The optimizer steps parameters on the host.
Shapes. Those of the shards.
Comms.  Nothing between ranks. Over PCIe, per step and rank, for shards of P bytes: P of
        gradients down, and P of weights up for each time that fsdp gathers them.
Memory. Device: only blocks in use. Host: with fp32 Adam 4 P of weights, gradients and moments.
Costs you. The bytes over PCIe, and a step of the optimizer at the speed of the host: under torchrun
        that is one thread, unless OMP_NUM_THREADS says more.
Source. Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), sections 4 and 5.1, without its one-step
        delayed update; Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv 2104.07857).
In torch: `fully_shard(..., offload_policy=CPUOffloadPolicy())`.
Proved by tests/parallel/test_offload.py and tests/law/test_law.py.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from minipar.comm.calls import Pending
from minipar.comm.hostcopy import HostCopy
from minipar.observe import memory


class HostShards:
    """Moves the shards of an fsdp strategy to the host: weights, gradients, optimizer state.

    `optimizer` then steps parameters on the host. Before each gather, this rank's shard is copied
    to the device. That copy starts while the block before is gathered, in the order of the last
    step. Each shard's gradient is copied to the host during backward. The device keeps the blocks
    in use, and at most four arriving shards.

    Make this object before the first step, and before a state is loaded. It replaces three methods
    of each unit. Only fsdp has units.
    """

    def __init__(self, strategy: Any, optimizer: Optimizer, copies: HostCopy | None = None) -> None:
        self.copies = copies or HostCopy(strategy.device)
        self.order: list[Any] = []  # units in the order of the last step's fetches
        self.fetched: list[Any] = []  # units fetched in this step
        self.coming: dict[Any, tuple[list[int], Pending]] = {}  # weights, and their versions
        self.leaving: dict[Any, Pending] = {}  # the gradient of the last microbatch
        self.region = ExitStack()
        for unit in strategy.rows:
            shard = self.copies.to_host(unit.shard).wait()
            memory.tag("parameters", shard, on_host=True)
            unit.move(shard)
            unit.fetch, unit.store = partial(self.fetch, unit), partial(self.store, unit)
            unit.finalize_backward = partial(self.finalize, unit, unit.finalize_backward)
        optimizer.register_step_pre_hook(lambda *_: self.region.enter_context(memory.on_host()))
        optimizer.register_step_post_hook(self.after_step)

    # weights, up
    def fetch(self, unit: Any) -> Tensor:
        """Return the shard of `unit` on the device; start to copy the next unit's shard."""
        at = len(self.fetched)
        self.fetched.append(unit)
        versions, copy = self.coming.pop(unit, (None, None))
        if versions != [p._version for p in unit.pieces]:  # no copy, or weights have changed
            copy = self.bring(unit)
        match self.order[at : at + 2]:
            case [same, ahead] if same is unit and ahead not in self.coming:
                self.coming[ahead] = [p._version for p in ahead.pieces], self.bring(ahead)
        return copy.wait()

    def bring(self, unit: Any) -> Pending:
        """Start to copy the shard of `unit` to the device."""
        shard = unit.shard
        with torch.inference_mode(False):  # the copy thread is not in inference mode
            arriving = unit.full.new_empty(unit.shard.shape)
        memory.tag("gathered", arriving, on_host=False)
        if shard.dtype != arriving.dtype:  # cast into pinned memory: the copy is asynchronous
            shard = self.copies.empty_like(arriving).copy_(shard)
        return self.copies.to_device(shard, arriving)

    # gradients, down
    def store(self, unit: Any, gradient: Tensor) -> None:
        """Start to copy `gradient` to the host; first wait for the microbatch before."""
        self.add_up(unit)
        # Cast on the device: a cast on the host would have to wait for the copy.
        self.leaving[unit] = self.copies.to_host(gradient.to(unit.shard.dtype))
        memory.tag("gradients", self.leaving[unit].result, on_host=True)

    def add_up(self, unit: Any) -> None:
        """Wait for the gradient's copy; add it to the sum of the microbatches before."""
        if unit in self.leaving:
            gradient = self.leaving.pop(unit).wait()
            unit.reduced = gradient if unit.reduced is None else unit.reduced.add_(gradient)

    def finalize(self, unit: Any, complete: Callable[[], None]) -> None:
        """Complete the gradient of the step, on the host."""
        complete()
        self.add_up(unit)

    # the step, on the host
    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for value in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(value, Tensor) and value.untyped_storage() not in memory.tags:
                memory.tag("optimizer", value, on_host=True)
        self.region.close()
        self.order, self.fetched, self.coming = self.fetched, [], {}
