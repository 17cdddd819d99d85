"""The recorder of one rank: the compute spans that are open, and the communication in flight.

`minipar.observe.timeline.record` makes one. The `hook_...` functions put their hooks on an
`ExitStack`, which takes them away again.
"""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from minipar.comm import clock
from minipar.comm.calls import Call, Tap
from minipar.observe.spans import Span


@dataclass(eq=False, slots=True)
class Frame:
    """An open compute span. `kind` None means waiting, which leaves no span."""

    kind: str | None
    name: str
    start: float


class Recorder(Tap):
    """Appends finished spans of this rank to `spans`; keeps the open compute spans on a `stack`.

    Only the innermost open span runs. If an inner span opens, the outer span's piece ends. If the
    inner span closes, the outer span's next piece begins. So compute spans never overlap. Spans are
    opened by the thread that records, and by autograd's threads during its backward.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.spans: list[Span] = []
        self.stack: list[Frame] = []  # the innermost last
        self.unwaited: dict[int, tuple[Span, Any]] = {}  # by number of the call: span and work
        self._thread = threading.get_ident()

    # ------------------------------------------------------------------ communication: a tap
    def started(self, call: Call) -> None:
        """Begin a span for `call`; it ends when the work ends, not when somebody waits for it."""
        if call.work is None or call.axis is None:  # nothing is sent
            return
        span = Span("comm", call.verb, self.rank, call.start, math.inf)
        span.axis, span.num_bytes = call.axis.name, call.num_bytes
        self.spans.append(span)
        if call.axis.group is not None and "nccl" in dist.get_backend(call.axis.group):
            # Waiting here would stall the GPU. The profiler records when the kernels ran.
            span.end = time.monotonic()
            return
        try:
            ended = getattr(call.work, "ended", None) or call.work.get_future()
        except (AttributeError, RuntimeError):
            call.work = ended = Watched(call.work)
        work = call.work  # do not keep the call: its result would live as long as torch's work
        ended.add_done_callback(lambda _: _end(span, work))
        self.unwaited[call.number] = span, work

    def wait(self, call: Call) -> None:
        """Pause the open compute span: a rank that waits does not compute."""
        call.notes[self] = self.open(None, "")

    def end(self, call: Call) -> None:
        """Go on with the compute span."""
        if call.number in self.unwaited:  # the future may be late
            _end(*self.unwaited.pop(call.number))
        self.close(call.notes.pop(self, None))

    def finish(self, is_profiled: bool) -> None:
        """End the spans that are in flight, so that the ledger has all bytes.

        First wait for their works if torch's profiler runs: if it stops while a work of gloo is in
        flight, the process dies by a SIGSEGV.
        """
        for _, work in [*self.unwaited.values()] if is_profiled else []:
            with suppress(Exception):  # the caller's own wait raises this error
                work.wait()
        for span in (span for span in self.spans if span.end == math.inf):
            span.end = max(span.start, clock.now())

    # ------------------------------------------------------------------ compute spans
    @contextmanager
    def span(self, kind: str | None, name: str) -> Iterator[None]:
        """Record the body as a span that interrupts the running span; kind None means waiting."""
        frame = self.open(kind, name)
        try:
            yield
        finally:
            self.close(frame)

    def open(self, kind: str | None, name: str) -> Frame | None:
        """Open a span, which interrupts the running span; return the argument for `close`."""
        if threading.get_ident() != self._thread and not in_backward():
            return None
        self.stack.append(Frame(kind, name, self._pause()))
        return self.stack[-1]

    def close(self, frame: Frame | None) -> None:
        """End `frame` and all open spans inside of `frame`; the span around `frame` goes on."""
        if frame not in self.stack:
            return
        now = self._pause()
        del self.stack[self.stack.index(frame) :]
        if self.stack:
            self.stack[-1].start = now

    def running(self) -> Frame | None:
        """Return the innermost open span."""
        return self.stack[-1] if self.stack else None

    def go_on(self, stack: list[Frame]) -> None:
        """Record this thread from here on; `stack` holds the spans that it has open."""
        self.stack, self._thread = stack, threading.get_ident()

    def _pause(self) -> float:
        """End the piece of the span that runs; return the time."""
        frame, now = self.running(), clock.now()
        if frame is not None and frame.kind is not None and now > frame.start:
            self.spans.append(Span(frame.kind, frame.name, self.rank, frame.start, now))
        return now


def _end(span: Span, work: Any) -> None:
    """End the span of `work`, once. An emulated link knows when its wire was busy."""
    with suppress(TypeError):  # no end yet: the wait was interrupted, or another message failed
        if span.end == math.inf:
            start, end = getattr(work, "times", None) or (span.start, time.monotonic())
            span.start, span.end = start, float(end)


class Watched(Future):
    """A message of gloo, which tells of its end only to a thread that waits."""

    wait = Future.result  # raises the message's error, each time

    def __init__(self, work: Any) -> None:
        super().__init__()
        threading.Thread(target=self._watch, args=(work,), daemon=True).start()

    def _watch(self, work: Any) -> None:
        try:
            self.set_result(work.wait())
        except BaseException as error:
            self.set_exception(error)


# ---------------------------------------------------------------------- hooks
def in_backward() -> bool:
    """True if autograd is calling."""
    return torch._C._current_graph_task_id() != -1


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules worth a span: members of lists, and other leaves with weights."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        in_list = bool(name) and isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        is_leaf = not any(module.children()) and any(True for _ in module.parameters())
        is_inside = any(name.startswith(f"{block}.") for block in found)
        if (in_list or is_leaf) and not is_inside:
            found[name or type(model).__name__] = module
    return found


def hook_optimizers(recorder: Recorder, hooks: ExitStack) -> None:
    """Open a span for every step of any optimizer."""
    frames: list[Frame | None] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        frames.append(recorder.open("optimizer", type(optimizer).__name__))

    def after(*_: Any) -> None:
        if frames:
            recorder.close(frames.pop())

    hooks.enter_context(register_optimizer_step_pre_hook(before))
    hooks.enter_context(register_optimizer_step_post_hook(after))


def hook_model(recorder: Recorder, model: nn.Module, hooks: ExitStack) -> None:
    """Open forward spans by module hooks, and backward spans by hooks on nodes of the graph.

    The backward span of block i begins when autograd has the gradient of its output. The span ends
    when autograd has the gradient of block i-1's output, or at the end of the backward. Unlike
    `register_full_backward_hook`, hooks on nodes allow views and in-place operations.
    """
    found = blocks(model)
    if model not in found.values():
        _hook_module(recorder, "", model, hooks)
    for name, module in found.items():
        _hook_module(recorder, name, module, hooks)


def _hook_module(recorder: Recorder, name: str, module: nn.Module, hooks: ExitStack) -> None:
    frames: list[Frame | None] = []
    is_block, name = bool(name), name or "forward"  # the model itself has no name

    def before(*_: Any) -> None:
        recomputed = in_backward()  # activation checkpointing
        kind, what = ("backward", f"{name} (recompute)") if recomputed else ("forward", name)
        frames.append(recorder.open(kind, what))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if frames:
            recorder.close(frames.pop())
        if is_block and torch.is_grad_enabled():
            for node in {getattr(leaf, "grad_fn", None) for leaf in tree_leaves(output)} - {None}:
                node.register_prehook(enters_backward)

    def enters_backward(_: Any) -> None:
        running, frame = recorder.running(), recorder.open("backward", name)
        if running is None or running.kind != "backward":  # else `frame` closes with `running`
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: recorder.close(frame))

    hooks.enter_context(module.register_forward_pre_hook(before))
    hooks.enter_context(module.register_forward_hook(after, always_call=True))
