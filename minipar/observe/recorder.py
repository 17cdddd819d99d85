"""The recorder of one rank: which compute span is open, and the hooks that open and close them.

`minipar.observe.timeline.record` makes one. Each `hook_...` function returns the functions that
take its hooks away again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from minipar.comm import clock
from minipar.comm.calls import Call, Tap
from minipar.observe.spans import Span


@dataclass(eq=False, slots=True)
class _Frame:
    """An open compute span; `kind` None is time that is waited, which leaves no span."""

    kind: str | None
    name: str
    start: float


class Recorder(Tap):
    """Appends finished spans of this rank; keeps the stack of compute spans that are open.

    Only the innermost open span runs: opening another closes the piece so far, closing it begins
    the next piece, so compute spans never overlap. Only the thread that records has a say, and
    autograd's threads while they work for it.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.spans: list[Span] = []
        self.on = True  # until the recording ends; a graph that outlives it keeps its hooks
        self.stack: list[_Frame] = []  # what is open, the innermost last
        self._thread = threading.get_ident()
        self._travelling: dict[object, tuple[str, str, int, float]] = {}
        self.unwaited: set[Any] = set()  # works that have not been waited for

    # ------------------------------------------------------------------ a tap
    def started(self, call: Call) -> None:
        """Begin a span for `call`, which ends when the work does."""
        if call.work is None or call.axis is None:  # nothing is sent
            return
        if call.axis.group is not None and "nccl" in dist.get_backend(call.axis.group):
            # To wait here would stop the GPU; when its kernels ran, the profiler tells.
            words = call.verb, call.axis.name, call.num_bytes
            self.comm(*words, call.start, time.monotonic())
        else:
            call.work = _Noted(call, self)

    def wait(self, call: Call) -> None:
        """Pause the open compute span: who waits does not compute."""
        call.notes[self] = self.open(None, "")

    def end(self, call: Call) -> None:
        self.close(call.notes.pop(self, None))

    # ------------------------------------------------------------------ spans
    def travel(
        self, name: str, axis_name: str, num_bytes: int, start: float
    ) -> Callable[[float, float], None]:
        """Note that a communication begins; return what to call with its start and its end."""
        key = object()
        self._travelling[key] = name, axis_name, num_bytes, start

        def arrive(start: float, end: float) -> None:
            if self._travelling.pop(key, None) is not None:
                self.comm(name, axis_name, num_bytes, start, end)

        return arrive

    def land(self, patience: float) -> None:
        """Wait, for so many seconds in all, until all that travels has arrived.

        torch's profiler, ended while gloo is at work for it, ends the process by a SIGSEGV.
        """
        deadline = time.monotonic() + patience
        for work in list(self.unwaited):
            with suppress(Exception):  # who waits for the result will hear of it
                work.land(max(0.0, deadline - time.monotonic()))
        self.unwaited.clear()

    def finish(self) -> None:
        """The recording ends, and with it what still travels: no byte is left out."""
        for key in list(self._travelling):
            if (call := self._travelling.pop(key, None)) is not None:
                *words, start = call
                self.comm(*words, start, max(start, clock.now()))

    def comm(self, name: str, axis_name: str, num_bytes: int, start: float, end: float) -> None:
        """Append a finished communication; any thread may call (`list.append` is atomic)."""
        self.spans.append(Span("comm", name, self.rank, start, end, axis_name, num_bytes))

    @contextmanager
    def span(self, kind: str | None, name: str) -> Iterator[None]:
        """The body interrupts the running span by another."""
        frame = self.open(kind, name)
        try:
            yield
        finally:
            self.close(frame)

    def blocked(self) -> AbstractContextManager:
        """This thread waits for communication: the open compute span pauses and does not count."""
        return self.span(None, "")

    def open(self, kind: str | None, name: str) -> _Frame | None:
        """Interrupt the running span by another; returns what `close` wants."""
        if threading.get_ident() != self._thread and not in_backward():
            return None
        now = clock.now()
        if self.stack:
            self._piece(self.stack[-1], now)
        self.stack.append(_Frame(kind, name, now))
        return self.stack[-1]

    def close(self, frame: _Frame | None) -> None:
        """End `frame` and whatever is still open inside of it; the span around it goes on."""
        if frame not in self.stack:
            return
        now = clock.now()
        self._piece(self.stack[-1], now)
        del self.stack[self.stack.index(frame) :]
        if self.stack:
            self.stack[-1].start = now

    def go_on(self, stack: list[_Frame]) -> None:
        """From here on this thread records; `stack` holds the spans that it has open."""
        self.stack, self._thread = stack, threading.get_ident()

    def rename(self, name: str) -> None:
        """From here on the running span has another name."""
        frame, now = self.stack[-1], clock.now()
        self._piece(frame, now)
        frame.name, frame.start = name, now

    def running(self) -> _Frame | None:
        """The innermost open span."""
        return self.stack[-1] if self.stack else None

    def _piece(self, frame: _Frame, now: float) -> None:
        if frame.kind is not None and now > frame.start:
            self.spans.append(Span(frame.kind, frame.name, self.rank, frame.start, now))


class _Noted:
    """A work whose end is noted when it ends, not when it is waited for."""

    def __init__(self, call: Call, recorder: Recorder) -> None:
        self._work, self._start, self._recorder = call.work, call.start, recorder
        self._note = recorder.travel(call.verb, call.axis.name, call.num_bytes, call.start)
        recorder.unwaited.add(self)
        self._noted = threading.Event()
        self._error: BaseException | None = None
        self._thread = None
        try:
            # Where the backend tells through a future when an operation is over ...
            ended = getattr(self._work, "ended", None) or self._work.get_future()
            ended.add_done_callback(lambda _: self._over())
        except (AttributeError, RuntimeError):
            # ... else (gloo's reduce-scatter, send and recv) it tells only those who wait.
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _over(self) -> None:
        # A backend with a clock of its own (the emulated link) knows when the wire was busy.
        start, end = getattr(self._work, "times", None) or (self._start, time.monotonic())
        self._note(start, end)
        self._noted.set()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._over()

    @property
    def is_over(self) -> bool:
        """True once the work has ended and its span was noted."""
        return self._noted.is_set()

    def land(self, patience: float) -> None:
        """Wait, but no longer than that; who called still has to wait."""
        if self._noted.wait(patience) and self._thread is None:
            self._work.wait()  # gloo tells of the end before it has come to it

    def wait(self) -> None:
        if self._thread is None:
            self._work.wait()
        self._noted.wait()  # so that the ledger is complete when `wait` returns
        self._recorder.unwaited.discard(self)
        if self._error is not None:
            raise self._error


def in_backward() -> bool:
    """True if autograd is calling."""
    return torch._C._current_graph_task_id() != -1


# ---------------------------------------------------------------------- hooks


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Modules worth a span: members of lists, from the top down, and other leaves with weights."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str, member: bool) -> None:
        children = dict(module.named_children())
        if member or (not children and any(True for _ in module.parameters())):
            found[name] = module
            return
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for child_name, child in children.items():
            visit(child, f"{name}.{child_name}" if name else child_name, is_list)

    visit(model, "", False)
    return {name or type(model).__name__: module for name, module in found.items()}


def hook_optimizers(recorder: Recorder) -> list[Callable[[], None]]:
    frames: list[_Frame | None] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        frames.append(recorder.open("optimizer", type(optimizer).__name__))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if frames:
            recorder.close(frames.pop())

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    return [handle.remove for handle in handles]


def hook_model(recorder: Recorder, model: nn.Module) -> list[Callable[[], None]]:
    """Forward spans by module hooks; backward spans by hooks on the graph's nodes.

    The backward of a block lasts from the gradient of its output, about to enter the node that made
    it, to the gradient of its input, about to leave the block. Hooks on nodes only look: unlike
    `register_full_backward_hook` they forbid neither views nor in-place operations.
    """
    calls: list[tuple[nn.Module, _Frame | None]] = []

    def hook(name: str, module: nn.Module, is_block: bool) -> list[Callable[[], None]]:
        def enters(grads: Any) -> None:
            if not recorder.on:
                return
            running = recorder.running()
            if running is not None and running.kind == "backward":
                recorder.rename(name)
            else:  # a backward that did not come through torch.autograd.backward
                frame = recorder.open("backward", name)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: recorder.close(frame))

        def leaves(grads: Any) -> None:
            running = recorder.running()
            # The block before may have begun at this very node: then there is nothing to end.
            if recorder.on and running is not None and running.name == name:
                recorder.rename("backward")

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            recomputed = in_backward()  # activation checkpointing
            kind, what = ("backward", f"{name} (recompute)") if recomputed else ("forward", name)
            calls.append((module, recorder.open(kind, what)))
            if is_block:
                _hook_nodes((args, kwargs), leaves)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if calls and calls[-1][0] is module:
                recorder.close(calls.pop()[1])
            if is_block:
                _hook_nodes(output, enters)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True).remove,
            module.register_forward_hook(after, always_call=True).remove,
        ]

    found = blocks(model)
    remove = hook_autograd(recorder)
    if model not in found.values():
        remove += hook("forward", model, is_block=False)  # what it does between its blocks
    for name, module in found.items():
        remove += hook(name, module, is_block=True)
    return remove


def _hook_nodes(value: Any, hook: Callable[[Any], None]) -> None:
    """Call `hook` whenever a gradient of `value` is complete."""
    if torch.is_grad_enabled():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for node in {tensor.grad_fn for tensor in tensors} - {None}:
            node.register_prehook(hook)


def hook_autograd(recorder: Recorder) -> list[Callable[[], None]]:
    """`Tensor.backward` calls `torch.autograd.backward`; no hook tells where a backward begins."""
    originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with recorder.span("backward", "backward"):
                return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(torch.autograd, name, timed(function))
    return [lambda n=n, f=f: setattr(torch.autograd, n, f) for n, f in originals.items()]
