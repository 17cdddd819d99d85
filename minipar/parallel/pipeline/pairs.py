"""Forward of one microbatch beside backward of another: each computes while the other waits.

Idea.   Two threads take turns. A thread that must wait for an all-to-all lets the other thread run,
        and waits when its turn comes back. So one of the two computes at any moment while the rows
        of the other travel. With experts in every layer:

            backward   combine' ------ experts' dispatch' ---- attention' combine' ------ ...
            forward             attention dispatch ---- experts combine ------- attention ...

        (a name is compute that ends with a launch, dashes are rows in flight). The schedules
        called DualPipe are made of such pairs: a forward beside a backward of other layers.
Order.  The turn changes at every wait for an all-to-all, whichever thread is ready first. Ranks of
        a group run the same row of the schedule, so they all launch in the same order, as NCCL
        demands. At a wait for another collective, the turn does not change.
GPU.    The stream waits, and the host goes on. The turns decide in which order the two threads
        launch their kernels. Measured on CPUs and emulated devices only.
Source. DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1, figure 4. In torch: none.
Proved by tests/parallel/test_pairs.py, and with experts and without by tests/law.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from minipar.comm import calls
from minipar.observe import timeline

FORWARD, BACKWARD = 0, 1


def side_by_side(forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
    """Run both functions in turns, each while rows of the other travel; return both results.

    Neither may need a result of the other. Raises the error of either of them.
    """
    pair = _Pair()
    calls.taps.insert(0, pair)  # the other thread runs before other taps hear of a wait
    try:
        return pair.run(forward, backward)
    finally:
        calls.taps.remove(pair)


class _Ended(BaseException):
    """The other thread has raised; nothing needs the rest of this one."""


class _Pair(calls.Tap):
    """Two threads; one of them runs at a time. A tap, which hears of every wait."""

    def __init__(self) -> None:
        self.caller = threading.get_ident()
        self.turns = [threading.Semaphore(0) for _ in range(2)]
        self.travelling: set[int] = set()  # all-to-alls that were not waited for yet
        self.is_over = [False, False]
        self.error: BaseException | None = None
        self.recorder = timeline.active()
        self.open_spans = [self.recorder.stack if self.recorder else [], []]

    # ------------------------------------------------------------------ a tap
    def begin(self, call: calls.Call) -> None:
        if call.verb == "all_to_all":
            self.travelling.add(call.number)

    def wait(self, call: calls.Call) -> None:
        if call.number in self.travelling:
            self.travelling.discard(call.number)
            self.let_other_run()
            if self.error is not None:
                raise _Ended

    # ------------------------------------------------------------------ turns
    def let_other_run(self) -> None:
        """Run the other thread until it waits or ends."""
        me = FORWARD if threading.get_ident() == self.caller else BACKWARD
        if not self.is_over[1 - me]:
            with self.recorder.span(None, "") if self.recorder else nullcontext():
                self.turns[1 - me].release()
                self.take_turn(me)

    def take_turn(self, me: int) -> None:
        """Wait for the turn; from then on the recorder notes the spans of this thread."""
        self.turns[me].acquire()
        if self.recorder:
            self.recorder.go_on(self.open_spans[me])

    # ------------------------------------------------------------------ from beginning to end
    def run(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
        """Run forward in this thread, and backward in a thread with the same stream and modes.

        Backward goes first, because it needs little compute before its first all-to-all.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        modes, results = dispatch._get_current_dispatch_mode_stack(), [None, None]

        def run_backward() -> None:
            self.take_turn(BACKWARD)
            with ExitStack() as stack, torch.cuda.stream(stream):
                for mode in modes:
                    dispatch._push_mode(mode)
                    stack.callback(dispatch._pop_mode)
                results[BACKWARD] = self.attempt(backward)
            self.is_over[BACKWARD] = True
            self.turns[FORWARD].release()

        thread = threading.Thread(target=run_backward, daemon=True)
        thread.start()
        self.attempt(self.let_other_run)  # up to the first wait of backward
        if self.error is None:
            results[FORWARD] = self.attempt(forward)
        self.is_over[FORWARD] = True
        self.attempt(self.let_other_run)  # the rest of backward
        thread.join()
        if self.error is not None:
            raise self.error
        return tuple(results)

    def attempt(self, job: Callable[[], Any]) -> Any:
        """Do `job`; keep the first error, for the caller and to end the other thread."""
        try:
            return job()
        except BaseException as error:
            self.error = self.error or error
