"""CPU offload: the optimizer's state, gradients and the weights it updates live on the host.

Idea.   Adam keeps 8 bytes per parameter that are touched once a step, by simple arithmetic: the
        host has room for them and is fast enough. So the device keeps what forward and backward
        need, its copy of the weights; gradients leave for the host while backward goes on, the
        optimizer runs there, and the new weights come back while the next forward goes on.
Math.   That of the optimizer, which does not know: a parameter has two homes, and wherever the
        optimizer, or clipping, looks at one, `param.data` and `param.grad` *are* those of the host.
Shapes. Those of the parameters; where they are shards (zero, fsdp), of the shards.
Comms.  Nothing between ranks. Over PCIe, per step and rank that holds P bytes of parameters:
        P of gradients down and P of weights up, in the dtype that the device computes in; gradients
        of `shards_on_host` in that of the host.
Memory. Device: P bytes of weights, and of gradients three buckets at most (`apply`), or P
        (`step_on_host`); only blocks in use (`shards_on_host`). Host: with fp32 Adam 4 P of
        weights, gradients and moments; of each weight and gradient, pinned, what torch rounds up to
        the next power of two.
Costs you. 2 P bytes over PCIe, and a step of the optimizer at the speed of the host: under torchrun
        that is one thread, unless OMP_NUM_THREADS says more.
Source. Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), sections 4 and 5.1, without its one-step
        delayed update, which computes something else; Rajbhandari et al. 2021, "ZeRO-Infinity"
        (arXiv 2104.07857).
In torch: `fully_shard(..., offload_policy=CPUOffloadPolicy())`.
Proved by tests/parallel/test_offload.py and tests/parity/test_offload.py.

Three versions: `step_on_host` moves everything when the optimizer steps, and so fits around any
other strategy; `apply` spreads the copies over backward and forward; `shards_on_host` does so for
the shards of fsdp, and leaves no weights on the device either.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minipar.comm.hostcopy import Copy, HostCopy
from minipar.comm.mesh import Axis
from minipar.observe import memory
from minipar.parallel.base.strategy import Strategy, stepped_by
from minipar.parallel.host_weights import OffloadedParameter, cast, state_to_host


# ---------------------------------------------------------------------- 1. around the step
def step_on_host(optimizer: torch.optim.Optimizer, copies: HostCopy | None = None) -> None:
    """From now on, `optimizer` keeps its state on the host, and computes there.

    Around each step, gradients are copied to the host and weights back; nothing is hidden. It needs
    nothing but the optimizer, so its parameters may be shards of any strategy. Raises `ValueError`
    for two parameters in the same memory.
    """
    parameters = stepped_by(optimizer)
    copies = copies or HostCopy(parameters[0].device)
    homes = {p: OffloadedParameter(p, copies) for p in parameters}
    gradients: dict[nn.Parameter, Tensor] = {}  # of the device, during a step
    region = ExitStack()

    def before(*_: Any) -> None:
        gradients.update({p: p.grad for p in stepped_by(optimizer) if p.grad is not None})
        arriving = copies.to_host(gradients.values())
        for p, gradient in zip(gradients, arriving.wait(), strict=True):
            memory.tag("gradients", gradient, on_host=True)
            if p not in homes:  # of a group that was added later
                homes[p] = OffloadedParameter(p, copies)
            homes[p].go_to_host()
            p.grad = gradient
        state_to_host(optimizer, copies)
        region.enter_context(memory.on_host())

    def after(*_: Any) -> None:
        state_to_host(optimizer, copies)
        region.close()
        copies.to_device([homes[p].news() for p in gradients]).wait()
        for p, gradient in gradients.items():
            p.grad = None
            homes[p].go_to_device()
            p.grad = gradient
        gradients.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


# Two hooks for good: one that was removed when its owner is collected could be so while torch goes
# through its hooks.
_owners: "weakref.WeakSet[Offloaded | HostShards]" = weakref.WeakSet()


def _around_steps(owner: "Offloaded | HostShards") -> None:
    """Call its `_before_step` and `_after_step` around all steps, as long as `owner` lives."""
    _listen()
    _owners.add(owner)


@cache
def _listen() -> None:
    def call(method: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for owner in list(_owners):
            getattr(owner, method)(optimizer)

    register_optimizer_step_pre_hook(partial(call, "_before_step"))
    register_optimizer_step_post_hook(partial(call, "_after_step"))


# ---------------------------------------------------------------------- 2. while computing goes on
def apply(
    model: nn.Module,
    axis: Axis,
    *,
    inside: Strategy | None = None,
    copies: HostCopy | None = None,
    compute_dtype: torch.dtype | None = None,
    bucket_mb: float | None = None,
) -> "Offloaded":
    """Give the trainable parameters of `model` a home on the host; it comes last of the strategies.

    Args:
        inside: the strategy that reduces whole gradients over `axis`, such as ddp, if there is one:
            `finish_backward` and `no_sync` of what this returns are its as well. Then gradients
            leave for the host when it is done with them, and all weights are back before a forward
            begins. Without, gradients leave during backward, weights return during forward.
        copies: the engine; by default a `HostCopy` for the device of the parameters.
        compute_dtype: of the copy on the device, such as `torch.bfloat16`; by default unchanged.
            The host keeps weights, gradients and state in the dtype that the parameters have now.
        bucket_mb: gradients leave in packets of so many MB (10^6 bytes), at most three of which are
            on the device. By default an eighth of the gradients, at most 25 MB.

    Any optimizer over the parameters will do, made before or after. Between
    the end of backward and the next forward, parameters and gradients are those of the host: there
    they can be clipped, saved and loaded; a forward takes both to the device, and the step fetches
    them. In `no_sync`, gradients accumulate on the device. Weights that are written there
    (``with torch.no_grad(): p.clamp_(...)``) go to the device with the next forward, but not those
    that are written through ``p.data``, of which torch keeps no count.

    Reading a weight in the forward of another block than its own, before that block has run, reads
    one that may still be on its way. Raises `ValueError` for a bucket without capacity, a model
    without a trainable parameter or with sparse gradients, an `inside` that cuts gradients or is
    beside `compute_dtype`, or none along an axis of several ranks.
    """
    if bucket_mb is not None and not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} must be above 0; 1 to 25 is usual")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter: there is nothing to offload")
    if inside is None and axis.size > 1:
        raise ValueError(
            f"no rank would share gradients along {axis.name}={axis.size}: hand over what does, as "
            f"in inside=ddp.apply(model, axis)"
        )
    if inside is not None and inside.rows:
        raise ValueError(
            f"inside= must reduce whole gradients, and {type(inside).__name__} cuts them; use "
            f"step_on_host(optimizer) with zero, shards_on_host(strategy) with fsdp"
        )
    if inside is not None and compute_dtype is not None:
        raise ValueError(
            f"compute_dtype={compute_dtype} beside inside={type(inside).__name__}: it sums "
            f"gradients in the dtype in which the model was given to it; leave one of them out, or "
            f"use autocast, which leaves weights and gradients as they are"
        )
    return Offloaded(model, axis, inside, copies, compute_dtype, bucket_mb)


class Offloaded(Strategy):
    """Copies that overlap: gradients with the backward pass, weights with the next forward."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        inside: Strategy | None,
        copies: HostCopy | None,
        compute_dtype: torch.dtype | None,
        bucket_mb: float | None,
    ) -> None:
        super().__init__(model, axis)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.inside = inside
        self.copies = copies or HostCopy(parameters[0].device)
        self.homes = {p: OffloadedParameter(p, self.copies, compute_dtype) for p in parameters}
        num_bytes = sum(home.device.nbytes for home in self.homes.values())
        self.capacity = bucket_mb * 1e6 if bucket_mb else min(num_bytes / 8, 25e6)
        # Gradients on their way: waiting for a full bucket, sent, and arrived on the host.
        self.bucket: dict[nn.Parameter, Tensor] = {}
        self.sent: deque[tuple[list[nn.Parameter], Copy]] = deque()
        self.arrived: dict[nn.Parameter, Tensor] = {}
        # Weights on their way back, block by block.
        self.groups = _groups(model, parameters)
        self.returning: dict[int, Copy] = {}
        self.region = ExitStack()
        self.expects_backward = False  # of a forward: gradients will come, here on the device
        self._hook_model()
        _around_steps(self)
        self._rest()

    def _hook_model(self) -> None:
        group_of = {p: i for i, (_, group) in enumerate(self.groups) for p in group}
        # A copy of the model, such as a teacher, has these hooks, too.
        self.model.register_forward_pre_hook(lambda m, _: self._begin_forward(m), prepend=True)
        self.model.register_forward_hook(lambda m, *_: self._end_forward(m))
        for block, _ in self.groups:
            if block is not self.model:
                needs = sorted({group_of[p] for p in block.parameters() if p in group_of})
                block.register_forward_pre_hook(
                    lambda *_, needs=needs: self._await(needs), prepend=True
                )
        if self.inside is None:
            self.watch(self.homes)
            self.hook_gradients(self.homes)

    # ------------------------------------------------------------------ gradients, down
    def _on_gradient(self, p: nn.Parameter) -> None:
        """Called by autograd when ``p.grad`` (accumulated over microbatches) is complete."""
        if self.synchronises:
            self._take(p)

    def _take(self, p: nn.Parameter) -> None:
        self.bucket[p], p.grad = p.grad, None
        if sum(gradient.nbytes for gradient in self.bucket.values()) >= self.capacity:
            self._send()

    def _send(self) -> None:
        if len(self.sent) == 2:  # backward is faster than PCIe: it must not fill the device
            self._receive()
        self.sent.append(([*self.bucket], self.copies.to_host(self.bucket.values())))
        self.bucket = {}

    def _receive(self) -> None:
        parameters, copy = self.sent.popleft()
        for p, gradient in zip(parameters, copy.wait(), strict=True):
            with memory.on_host():
                gradient = gradient.to(self.homes[p].host.dtype)
            memory.tag("gradients", gradient, on_host=True)
            if p in self.arrived:  # it came in two parts, as from two re-entrant checkpoints
                self.arrived[p] += gradient
            else:
                self.arrived[p] = gradient

    def drop(self, zeroed: Set[nn.Parameter]) -> None:
        while self.sent:
            self._receive()
        for p in zeroed:
            self.bucket.pop(p, None)
            self.arrived.pop(p, None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync(), self.inside.no_sync() if self.inside else nullcontext():
            yield

    def with_gradients(self) -> Iterable[nn.Parameter]:
        if self.inside is None:
            self._leave()
        else:
            self.inside.check_finished("clip_grad_norm_()")
        return self.homes

    def finish_backward(self) -> None:
        super().finish_backward()
        if self.inside is not None:
            self.inside.finish_backward()
        self._leave()

    def _leave(self) -> None:
        """Bring all gradients to the host, and let parameters be those of the host."""
        for p, home in self.homes.items():
            if p.grad is not None and not home.on_host:
                self._take(p)  # accumulated in no_sync only, or reduced by the strategy inside
        if self.bucket:
            self._send()
        while self.sent:
            self._receive()
        self.expects_backward = False
        self._rest()
        for p, gradient in self.arrived.items():
            p.grad = gradient
        self.arrived = {}

    # ------------------------------------------------------------------ the step, on the host
    def _rest(self) -> None:
        for home in self.homes.values():
            home.go_to_host()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if any(p in self.homes for p in stepped_by(optimizer)):
            self._leave()  # nothing is left to do after `finish_backward`
            for copy in self.returning.values():
                copy.wait(block=True)  # weights that no forward has asked for
            state_to_host(optimizer, self.copies)
            self.region.enter_context(memory.on_host())

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {p for p in stepped_by(optimizer) if p in self.homes and p.grad is not None}
        if mine:
            state_to_host(optimizer, self.copies)
        self.region.close()
        if mine:
            self._return(mine)

    # ------------------------------------------------------------------ weights, up
    def _return(self, parameters: set[nn.Parameter]) -> None:
        """Start to bring `parameters` to the device, in the order of their use."""
        for i, (_, group) in enumerate(self.groups):
            news = [self.homes[p].news() for p in group if p in parameters]
            if news:
                self.returning[i] = self.copies.to_device(news)

    def _await(self, groups: Iterable[int]) -> None:
        for i in groups:
            if i in self.returning:
                self.returning.pop(i).wait()

    def _begin_forward(self, module: nn.Module) -> None:
        if module is not self.model:
            return
        # Weights that were loaded, or written by hand; fused optimizers do not count versions.
        self._return({p for p, h in self.homes.items() if h.on_host and h.is_stale()})
        for home in self.homes.values():
            home.go_to_device()
        first = [i for i, (block, _) in enumerate(self.groups) if block is self.model]
        self._await(first if self.inside is None else range(len(self.groups)))

    def _end_forward(self, module: nn.Module) -> None:
        if module is not self.model:
            return
        self.expects_backward |= torch.is_grad_enabled()
        if not self.expects_backward and not self._gradients_here():
            self._await(range(len(self.groups)))
            self._rest()

    def _gradients_here(self) -> dict[nn.Parameter, Tensor]:
        """Those on the device, with which `_rest` would do away."""
        here = ((p, p.grad) for p, home in self.homes.items() if not home.on_host)
        return {p: gradient for p, gradient in here if gradient is not None}

    def full_state_dict(self) -> dict[str, Tensor]:
        gradients = self._gradients_here()
        self._rest()
        state = super().full_state_dict() if self.inside is None else self.inside.full_state_dict()
        for p, gradient in gradients.items():
            self.homes[p].go_to_device()
            p.grad = gradient
        return state


def _groups(
    model: nn.Module, parameters: list[nn.Parameter]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Cut `parameters` by the blocks that use them: the root's own first, then from the top down.

    A block is a module in a list, or one with parameters of its own: it may read those of its
    children without calling them, as attention layers do. Lists and dicts are never called: what
    they hold of parameters is of the module around them.
    """
    left = set(parameters)
    groups: dict[nn.Module, list[nn.Parameter]] = {model: []}

    def visit(module: nn.Module, is_block: bool, around: nn.Module) -> None:
        is_called = type(module).forward is not nn.Module.forward
        is_block, user = is_block and is_called, module if is_called else around
        own = [p for p in module.parameters(recurse=is_block) if p in left]
        left.difference_update(own)
        if own or is_block:
            groups.setdefault(user, []).extend(own)
        if not is_block:
            in_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
            for child in module.children():
                has_own = any(True for _ in child.parameters(recurse=False))
                visit(child, in_list or has_own, user)

    visit(model, False, model)
    return list(groups.items())


# ---------------------------------------------------------------------- 3. shards of fsdp
def shards_on_host(strategy: Strategy, copies: HostCopy | None = None) -> "HostShards":
    """Let the shards of an fsdp strategy live on the host: weights, gradients, and what follows.

    The optimizer, made before or after, then finds parameters of the host. Each gather is preceded
    by a copy of this rank's shard to the device, P/n bytes, started while the block before is being
    gathered, in the order of the last step; each finished gradient of a shard leaves for the host
    during backward. The device keeps nothing of the model's state but the blocks in use, and at
    most four shards that come or are being gathered.

    `strategy` is what `fsdp.apply` returned, before its first step. Raises `ValueError` for one
    without shards.
    """
    if not getattr(strategy, "flats", None):
        raise ValueError(f"{type(strategy).__name__} has no flat shards; use fsdp.apply")
    return HostShards(strategy, copies)


class HostShards:
    """The home of flat shards on the host, see `flat.Home`."""

    def __init__(self, strategy: Strategy, copies: HostCopy | None = None) -> None:
        self.copies = copies or HostCopy(strategy.flats[0].shard.device)
        self.order: list[Any] = []  # of the fetches in the last step
        self.fetched: list[Any] = []  # in this one
        self.coming: dict[Any, tuple[list[int], Copy]] = {}  # weights, and their versions
        self.leaving: list[Copy] = []
        self.region = ExitStack()
        for flat in strategy.flats:
            [shard] = self.copies.to_host([flat.shard]).wait()
            memory.tag("parameters", shard, on_host=True)
            flat.move(shard)
            flat.home = self
        self.parameters = {p for flat in strategy.flats for p in flat.pieces}
        _around_steps(self)

    # ------------------------------------------------------------------ weights, up
    def fetch(self, flat: Any) -> Tensor:
        """Return the shard of `flat` on the device; start to bring the one that comes after it."""
        at = len(self.fetched)
        self.fetched.append(flat)
        versions, copy = self.coming.pop(flat, (None, None))
        if versions != _versions(flat):  # none on its way, or one of weights that have changed
            copy = self._bring(flat)
        if self.order[at : at + 1] == [flat] and at + 1 < len(self.order):
            ahead = self.order[at + 1]
            if ahead not in self.coming:
                self.coming[ahead] = _versions(ahead), self._bring(ahead)
        return copy.wait()[0]

    def _bring(self, flat: Any) -> Copy:
        with torch.inference_mode(False):  # a thread writes into it, which is in no such mode
            arriving = flat.full.new_empty(flat.shard.shape)
        memory.tag("gathered", arriving, on_host=False)
        return self.copies.to_device([(cast(flat.shard, arriving, self.copies), arriving)])

    # ------------------------------------------------------------------ gradients, down
    def store(self, flat: Any, gradient: Tensor) -> None:
        """Let `gradient` leave for the host, where it is added to those of the parameters."""
        # Cast on the device, or backward would have to wait until there are numbers to cast.
        copy = self.copies.to_host([gradient.to(flat.shard.dtype)])
        [on_host] = copy.tensors
        memory.tag("gradients", on_host, on_host=True)
        if any(p.grad is not None for p in flat.pieces):
            copy.wait()  # it is added to them now
        else:
            self.leaving.append(copy)
        with memory.on_host():
            flat.add_to_grad(on_host)

    def finish(self) -> None:
        """Wait until all gradients are on the host."""
        for copy in self.leaving:
            copy.wait()
        self.leaving = []

    # ------------------------------------------------------------------ the step, on the host
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.parameters.isdisjoint(stepped_by(optimizer)):
            state_to_host(optimizer, self.copies)
            self.region.enter_context(memory.on_host())

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.parameters.isdisjoint(stepped_by(optimizer)):
            state_to_host(optimizer, self.copies)
            self.region.close()
            self.order, self.fetched, self.coming = self.fetched, [], {}


def _versions(flat: Any) -> list[int]:
    return [p._version for p in flat.pieces]
