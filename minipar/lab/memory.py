"""Live bytes: what tensors hold at every moment of a computation, counted and not estimated.

    with LiveBytes() as live:
        loss = model(x).sum()                # live.now: what backward will need
        loss.backward()
    live.peak, live.samples                  # in bytes

A dispatch mode sees every operation. It adds the bytes of a new storage, and subtracts them when
the storage is freed. The counts depend on the program alone, not on the allocator, and are the same
on every run. On the meta device nothing is allocated, but the bytes are counted all the same.

`MemoryLedger` also knows what each byte is for, and in which phase of a step it came and went. It
enforces the budget of a rank:

    with MemoryLedger(model) as ledger:
        ...                                  # a training step
    ledger.history().at_peak                 # {"parameters": ..., "gradients": ..., ...}

In torch: `torch.cuda.max_memory_allocated`, `torch.cuda.memory._record_memory_history`, and
`torch.profiler` with `profile_memory=True`.
"""

import gc
import math
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipar.observe import memory

_aten = torch.ops.aten
RANKING = ("activations", "gradients", "optimizer", "buffers", "parameters")
"""A storage of several categories counts as the last of them. A tag (`observe.memory`) wins."""


@dataclass(eq=False, slots=True)
class Holding:
    """One storage, for as long as it lives."""

    num_bytes: int
    on_host: bool
    category: str = RANKING[0]
    tagged: bool = False


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in its body, for as long as they live.

    Temporary tensors inside of an operation are not seen, nor tensors that existed before.
    `largest` is the size of the largest single storage that was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.largest = 0
        self.samples: list[int] = [0]  # after every allocation and release
        self._held: WeakKeyDictionary[torch.UntypedStorage, Holding] = WeakKeyDictionary()
        self._undo = ExitStack()

    @property
    def peak(self) -> int:
        """Return bytes at the highest point."""
        return max(self.samples)

    def __enter__(self) -> "LiveBytes":
        self._undo.callback(memory.watch_resize(self._on_resize))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(storage) for storage in _storages((args, kwargs))}
        if op is _aten.lift_fresh.default:
            given = set()  # what torch.tensor has made of a list is seen here first
        result = op(*args, **kwargs)
        for storage in _storages(result):
            # A view or an in-place result has the storage of an input. copy.deepcopy calls this
            # set_ only to look into both storages; it makes its tensor with another set_.
            is_new = id(storage) not in given and op is not _aten.set_.source_Storage
            if is_new or storage in self._held:
                self._see(storage)
        return result

    def _on_resize(self, storage: torch.UntypedStorage, before: int) -> None:
        if storage in self._held or before == 0:  # made earlier, given memory only now
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage, was_there: bool = False) -> Holding:
        """Count a storage that is new, or the bytes by which it has grown."""
        holding = self._held.get(storage)
        if holding is None:
            on_host = memory.tags.get(storage, memory.is_on_host())
            holding = self._held[storage] = Holding(0, on_host)
            weakref.finalize(storage, lambda: self._change(holding, -holding.num_bytes))
        if more := storage.nbytes() - holding.num_bytes:
            holding.num_bytes += more
            self._change(holding, more, was_there)
        return holding

    def _change(self, holding: Holding, num_bytes: int, was_there: bool = False) -> None:
        self.now += num_bytes
        self.largest = max(self.largest, holding.num_bytes)
        self.samples.append(self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# ---------------------------------------------------------------------- who holds what
@dataclass
class MemoryHistory:
    """The memory of a rank: bytes of each category at the start, and after each change.

    `phases` says of each moment whether the rank was in forward, backward or the optimizer. The
    inside of operations and of libraries is not seen.
    """

    device: dict[str, list[int]]
    host: dict[str, list[int]] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)

    @property
    def totals(self) -> list[int]:
        """Return bytes on the device at each moment."""
        return [sum(column) for column in zip(*self.device.values(), strict=True)]

    @property
    def peak(self) -> int:
        """Return bytes on the device at the highest point."""
        return max(self.totals, default=0)

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes at the highest point by category, the largest first."""
        totals = self.totals or [0]
        i = totals.index(max(totals))
        held = {category: values[i] for category, values in self.device.items() if values[i]}
        return dict(sorted(held.items(), key=lambda item: -item[1]))

    def peak_of(self, *categories: str, host: bool = False) -> int:
        """Return the most bytes that these categories held together at one moment."""
        place = self.host if host else self.device
        chosen = [place[category] for category in categories if category in place]
        return max((sum(column) for column in zip(*chosen, strict=True)), default=0)


class OverBudget(MemoryError, ValueError):
    """A rank holds more than its budget allows."""


class MemoryLedger(LiveBytes):
    """Counts what a rank holds by category, change by change; enforces a budget.

    Categories: "parameters", "buffers" and "gradients" of `model` and of whatever an optimizer
    steps on; "optimizer", its state; what a strategy tagged (`observe.memory.tag`), as "gathered";
    all else is "activations". The history shows a storage in its final category from its birth
    on. Bytes on the host, of an offloading strategy, are counted apart.

    `budget` in bytes is for the device: the allocation that exceeds it raises `OverBudget`, a
    `MemoryError` and `ValueError` that says what holds how much. Opening a ledger on a model that
    is too large already raises as well.
    """

    def __init__(self, model: nn.Module | None = None, *, budget: float | None = None) -> None:
        super().__init__()
        self.model, self.budget = model, math.inf if budget is None else budget
        self._at_start: list[tuple[Holding, int]] = []  # bytes of what was there
        self._changes: list[tuple[Holding, int, str]] = []  # in this phase
        self._phase = "forward"
        self._parameters: dict[nn.Parameter, None] = {}
        self._is_closed = False

    def __enter__(self) -> "MemoryLedger":
        gc.collect()  # hooks make cycles: a model out of use may still be there
        with self._undo as undo:  # all of it, if this raises
            if self.model is not None:
                for parameter in self.model.parameters():
                    self._watch_parameter(parameter)
                self._label("buffers", *self.model.buffers())
                hook = self.model.register_forward_pre_hook(self._before_forward)
                undo.callback(hook.remove)
            self._check_budget()
            memory.watchers.append(self._tag)
            undo.callback(memory.watchers.remove, self._tag)
            undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._on_step).remove)
            self._undo = undo.pop_all()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._is_closed = True
        super().__exit__(*error)

    def history(self) -> MemoryHistory:
        """Return all that was seen so far; the first sample is what there was at the start."""
        places: tuple[dict[str, list[int]], ...] = ({}, {})  # on the device, on the host
        for holding, *_ in [*self._at_start, *self._changes]:
            places[holding.on_host].setdefault(holding.category, [0])
        for holding, num_bytes in self._at_start:
            places[holding.on_host][holding.category][0] += num_bytes
        columns = [column for place in places for column in place.values()]
        for holding, num_bytes, _ in self._changes:
            for column in columns:
                column.append(column[-1])
            places[holding.on_host][holding.category][-1] += num_bytes
        phases = [phase for *_, phase in self._changes]
        return MemoryHistory(*places, [*phases[:1], *phases])

    # ------------------------------------------------------------------ categories
    def _watch_parameter(self, parameter: nn.Parameter) -> None:
        if parameter not in self._parameters:
            self._parameters[parameter] = None
            if parameter.requires_grad:
                # Twice: as it arrives from backward, and where it has then been added up.
                arrives = parameter.register_hook(lambda grad: self._label("gradients", grad))
                added = parameter.register_post_accumulate_grad_hook(self._look_at)
                self._undo.callback(arrives.remove)
                self._undo.callback(added.remove)
        self._look_at(parameter)

    def _look_at(self, parameter: Tensor) -> None:
        self._label("parameters", parameter.data)
        if parameter.grad is not None:
            with torch._C.DisableTorchFunctionSubclass():  # ZeRO's stands in for a gradient
                self._label("gradients", parameter.grad)

    def _before_forward(self, *_: Any) -> None:
        self._phase = "forward"

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._phase = "optimizer"
        self._on_step(optimizer)

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._watch_parameter(parameter)
        for state in optimizer.state.values():
            self._label("optimizer", *(v for v in state.values() if isinstance(v, Tensor)))

    def _label(self, category: str, *tensors: Tensor) -> None:
        for storage in _storages(tensors):
            holding = self._see(storage, was_there=True)
            if not holding.tagged and RANKING.index(category) > RANKING.index(holding.category):
                holding.category = category

    def _tag(self, storage: torch.UntypedStorage, category: str, on_host: bool) -> None:
        holding = self._see(storage, was_there=True)
        if holding.on_host != on_host:
            self.now += holding.num_bytes * (1 if holding.on_host else -1)
        holding.category, holding.on_host, holding.tagged = category, on_host, True

    # ------------------------------------------------------------------ how much
    def _change(self, holding: Holding, num_bytes: int, was_there: bool = False) -> None:
        if self._is_closed:
            return
        if torch._C._current_graph_task_id() != -1:  # autograd is running
            self._phase = "backward"
        if was_there:  # no operation has made it: an optimizer's state from before the start
            self._at_start.append((holding, num_bytes))
        else:
            self._changes.append((holding, num_bytes, self._phase))
        if not holding.on_host:
            super()._change(holding, num_bytes)
            if num_bytes > 0 and not was_there:  # what was there is judged as a whole
                self._check_budget()

    def _check_budget(self) -> None:
        if self.now <= self.budget:
            return
        for parameter in self._parameters:
            self._look_at(parameter)
        held: Counter[str] = Counter()
        for holding in self._held.values():
            if not holding.on_host:
                held[holding.category] += holding.num_bytes
        listed = ", ".join(f"{category} {_megabytes(n)}" for category, n in held.most_common())
        raise OverBudget(
            f"a rank would hold {_megabytes(self.now)}, more than its budget of "
            f"{_megabytes(self.budget)}: {listed}. Shard the largest part over more ranks (zero, "
            f"fsdp), offload it to the host, recompute activations, or make the batch smaller"
        )


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.4g} MB"
