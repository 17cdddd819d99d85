"""A recorder of operations, collectives and memory of a rank without values.

A segment of a trace (`trace.py`) is a list of events in their order:

    Compute     a product, an attention, or an operation that moves bytes: FLOPs, bytes
    Launch      a collective or message begins: verb, axis, bytes that this rank sends
    Wait        this rank needs the result of a launch
    Memory      bytes that come (or, negative, go), by category

torch's dispatcher shows all operations: it is below autograd, so backward is seen as well.
`comm.collectives` shows collectives. Storages are noted when they are made and freed.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minipar.comm.calls import Call, Tap
from minipar.emulate import operations
from minipar.observe import memory
from minipar.observe.recorder import Recorder, hook_model, hook_optimizers, in_backward


# ---------------------------------------------------------------------- events
class Compute(NamedTuple):
    """One operation of `kind` forward, backward, weight_gradient, optimizer or compute."""

    kind: str
    name: str  # the block that it is of
    work: operations.Work


class Launch(NamedTuple):
    """A call along `axis`, on which `num_bytes` leave this rank; `peers` are ranks along it.

    A call with a `purpose` has a process group of its own along the axis. `dtype` is the type
    of the tensors, such as "float32".
    """

    verb: str
    axis: str
    num_bytes: int
    peers: tuple[int, ...] = ()
    purpose: str = ""
    dtype: str = ""


class Wait(NamedTuple):
    """Wait for the `index`-th launch of the latest segment called `family`; "": of this segment."""

    family: str
    index: int


@dataclass(eq=False, slots=True)
class Holding:
    """One storage, for as long as it lives. Its category may be known only later; "": none."""

    num_bytes: int
    category: str = "activations"


class Memory(NamedTuple):
    """Bytes that are allocated, or freed where negative."""

    holding: Holding
    num_bytes: int


Event = Compute | Launch | Wait | Memory


@dataclass(eq=False)
class Segment:
    """A stretch of a step that may be repeated, such as the forward of a microbatch."""

    family: str
    events: list[Event] = field(default_factory=list)
    num_launches: int = 0


# ---------------------------------------------------------------------- the recorder
class Tracer(TorchDispatchMode, Tap):
    """Records every operation, collective and storage, in `segment`."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()  # knows which block is at work, and in which phase
        self.segments: list[Segment] = []
        self.segment = self.begin_segment("before")
        self.launches: dict[int, tuple[Segment, int]] = {}  # by number: segment, index in it
        self.unawaited: set[int] = set()
        self.holdings = weakref.WeakKeyDictionary[torch.UntypedStorage, Holding]()
        self.known: dict[Any, _Known] = {}
        self.stepped: operations.Work | None = None  # what the optimizer has yet to do
        self.is_counting = False  # memory

    def begin_segment(self, family: str) -> Segment:
        """Begin a new segment: all that follows belongs to it."""
        self.segment = Segment(family)
        self.segments.append(self.segment)
        return self.segment

    # operations
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "c10d" or operations.is_view(op):
            return op(*args, **kwargs)
        key = op, operations.key_of(args), operations.key_of(tuple(kwargs.items()))
        if known := self.known.get(key):
            result = known.again(args, kwargs)
        else:
            result = op(*args, **kwargs)
            known = self.known[key] = _Known(op, result, args, kwargs)
        frame, work = self.recorder.running(), known.work
        outside = ("backward", "backward") if in_backward() else ("compute", "step")
        kind, where = (frame.kind or "compute", frame.name) if frame else outside
        if kind == "backward" and torch.is_grad_enabled() and in_backward():
            where += " (recompute)"
        for t in _on_meta(result) if known.is_new else ():
            holding = self.hold(t.untyped_storage())
            if kind == "optimizer":  # a fused one holds nothing in between
                holding.category = ""
        if work is not None and kind == "optimizer":
            work, self.stepped = self.stepped, None
        if work is not None and work.num_bytes:
            self.segment.events.append(Compute(kind, where, work))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each operation, which nothing here needs

    # collectives
    def begin(self, call: Call) -> None:
        axis = call.axis
        if axis is None or axis.size == 1:  # work of this rank alone
            return
        self.unawaited.add(call.number)
        self.launches[call.number] = self.segment, self.segment.num_launches
        self.segment.num_launches += 1
        sent = call.num_bytes, tuple(call.peers or ())
        self.segment.events.append(Launch(call.verb, axis.name, *sent, axis.purpose, call.dtype))

    def wait(self, call: Call) -> None:
        self.unawaited.discard(call.number)
        segment, index = self.launches.get(call.number, (None, 0))
        if segment is not None:
            family = "" if segment is self.segment else segment.family
            self.segment.events.append(Wait(family, index))

    # memory
    def hold(self, storage: torch.UntypedStorage) -> Holding:
        """Count a storage from now until its last owner lets go."""
        holding = self.holdings.get(storage)
        if holding is None:
            holding = self.holdings[storage] = Holding(0)
            weakref.finalize(storage, self._resized, holding, 0)
        self._resized(holding, storage.nbytes())
        return holding

    def _resized(self, holding: Holding, num_bytes: int) -> None:
        more, holding.num_bytes = num_bytes - holding.num_bytes, num_bytes
        if more and self.is_counting:
            self.segment.events.append(Memory(holding, more))

    def label(self, category: str, *tensors: Tensor | None) -> None:
        """Note what tensors are for; "" leaves them out."""
        for tensor in _on_meta(tensors):
            self.hold(tensor.untyped_storage()).category = category

    def tag(self, storage: torch.UntypedStorage, category: str, on_host: bool) -> None:
        """Note the category that the code itself gives to a storage."""
        self.hold(storage).category = category

    def held(self) -> dict[str, int]:
        """Return the bytes by category, now."""
        totals: dict[str, int] = defaultdict(int)
        for holding in self.holdings.values():
            totals[holding.category] += holding.num_bytes
        return dict(totals)

    @contextmanager
    def watching(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Record all of the body; `held` returns what there is at its start."""
        with ExitStack() as stack:
            hook_model(self.recorder, model, stack)
            hook_optimizers(self.recorder, stack)
            with torch._C.DisableTorchFunctionSubclass():  # of weights that are on their way
                for p in filter(lambda p: p.requires_grad, model.parameters()):
                    arrives = p.register_hook(lambda grad: self.label("gradients", grad))
                    added = p.register_post_accumulate_grad_hook(
                        lambda p: self.label("gradients", p.grad)
                    )
                    stack.enter_context(arrives)
                    stack.enter_context(added)
            stack.callback(memory.watch_resize(lambda storage, _: self.hold(storage)))
            memory.watchers.append(self.tag)
            stack.callback(memory.watchers.remove, self.tag)
            stack.enter_context(self)
            self.look_at(model, optimizer)
            self.is_counting = True
            yield
            self.is_counting = False

    def look_at(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Label weights, gradients and the state of `optimizer`."""
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        with torch._C.DisableTorchFunctionSubclass():
            for p in (*model.parameters(), *stepped):
                self.label("parameters", p)
                self.label("gradients", p.grad)
            for p in model.parameters():
                self.label("optimizer", getattr(p, "master", None))
        state = _on_meta([list(entries.values()) for entries in optimizer.state.values()])
        self.label("optimizer", *state)
        self.stepped = operations.step_of(stepped, state)


def _on_meta(tree: Any) -> list[Tensor]:
    return [leaf for leaf in operations.tensors(tree) if leaf.is_meta]


class _Known:
    """The result and the cost of an operation on tensors of given shapes.

    `again` makes a result of the same shapes without calling the operation: ten times as fast.
    """

    def __init__(self, op: Any, result: Any, args: Any, kwargs: Any) -> None:
        self.op, given, made = op, _on_meta((args, kwargs)), _on_meta(result)
        self.is_new = bool(made) and not any(t is g for t in made for g in given)
        self.is_first = bool(made) and bool(args) and result is args[0]
        self.is_one = isinstance(result, Tensor)
        self.parts = [
            (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t
            for t in ([result] if self.is_one else result if self.is_new else [])
        ]
        self.work = operations.work_of(op, given, made, args)

    def again(self, args: Any, kwargs: Any) -> Any:
        """Return a result like the first call's."""
        if self.is_first:
            return args[0]
        if not self.is_new:
            return self.op(*args, **kwargs)
        made = [
            torch.empty_strided(*part[:2], dtype=part[2], device="meta")
            if isinstance(part, tuple)
            else part
            for part in self.parts
        ]
        return made[0] if self.is_one else tuple(made)
