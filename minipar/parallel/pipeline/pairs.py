"""Forward of one microbatch beside backward of another: one computes while the other's rows travel.

Idea.   Two threads and one baton. Who comes to wait for an all-to-all hands the baton over, and
        waits when it comes back. So exactly one of the two computes at any moment, and what one has
        sent travels while the other computes. With experts in every layer:

            backward   combine' ------ experts' dispatch' ---- attention' combine' ------ ...
            forward             attention dispatch ---- experts combine ------- attention ...

        (a name is computing and its end a launch, dashes are a journey). The schedules called
        DualPipe are made of such pairs: a forward beside a backward of other layers.
Order.  The turn changes at every wait for an all-to-all, never by who is ready first. Ranks of a
        group play the same row of the schedule, so all of them launch in the same order, as NCCL
        demands. Other collectives are waited for at once.
Threads. Forward stays in the thread of the caller, with its autocast and every other context.
        Backward gets one of its own, in which autograd finds the same device and dispatch modes.
        Either has its own open spans of the recorder and its own random numbers; those of forward
        go on afterwards, so that dropout is what it is without pairs.
GPU.    There a wait is one of the stream, and the host goes on; the baton decides in which order
        the two launch their kernels, and one stream of kernels under two journeys is what remains.
        Autograd has a thread of its own for each GPU, which then holds the baton for backward.
        Counts of rows, read by the host once per layer, still make it wait for all that is queued.
        So it is by design; what was run and measured are CPUs and emulated devices.
Errors. What one of the two raises reaches the caller; the other ends at its next turn. A collective
        that fails or times out does so in whichever of the two waits for it.
Source. DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1, figure 4. In torch: none.
Proved by tests/parallel/test_pairs.py, and with experts and without by tests/parity.
"""

import contextvars
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
    """Run both, each while the other's all-to-alls travel, and return what they return.

    Neither may need what the other makes. Raises what either of them raises.
    """
    pair = _Pair()
    calls.taps.insert(0, pair)  # others see a wait when it is one
    try:
        return pair.run(forward, backward)
    finally:
        calls.taps.remove(pair)


class _Ended(BaseException):
    """The other one has raised; nothing needs the rest."""


class _Pair(calls.Tap):
    """Two threads, of which one runs; a tap, which hears of every wait."""

    def __init__(self) -> None:
        self.caller = threading.get_ident()
        self.batons = [threading.Semaphore(0) for _ in range(2)]
        self.travelling: set[int] = set()  # all-to-alls that were not waited for yet
        self.is_over, self.results = [False, False], [None, None]
        self.error: BaseException | None = None
        self.recorder = timeline.active()
        self.open_spans = [self.recorder.stack if self.recorder else [], []]
        self.random = [_random_state(), _random_state()]

    # ------------------------------------------------------------------ a tap
    def begin(self, call: calls.Call) -> None:
        if call.verb == "all_to_all":
            self.travelling.add(call.number)

    def wait(self, call: calls.Call) -> None:
        if call.number in self.travelling:
            self.travelling.discard(call.number)
            self.hand_over()
            if self.error is not None:
                raise _Ended

    # ------------------------------------------------------------------ whose turn it is
    def hand_over(self) -> None:
        """Let the other one run until it waits or ends."""
        me = FORWARD if threading.get_ident() == self.caller else BACKWARD
        if self.is_over[1 - me]:
            return
        with self.recorder.blocked() if self.recorder else nullcontext():
            self.random[me] = _random_state()
            self.batons[1 - me].release()
            self.batons[me].acquire()
            self.take_turn(me)

    def take_turn(self, me: int) -> None:
        """Go on where this one was."""
        if self.recorder:
            self.recorder.go_on(self.open_spans[me])
        _set_random_state(self.random[me])

    # ------------------------------------------------------------------ from beginning to end
    def run(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
        modes = dispatch._get_current_dispatch_mode_stack()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def after_it() -> Any:
            self.hand_over()  # the first journey of backward begins without much computing
            return forward()

        def beside() -> None:
            self.batons[BACKWARD].acquire()
            self.take_turn(BACKWARD)
            with ExitStack() as stack:
                if torch.cuda.is_initialized():
                    torch.cuda.set_stream(stream)
                for mode in modes:
                    dispatch._push_mode(mode)
                    stack.callback(dispatch._pop_mode)
                self.results[BACKWARD] = self.attempt(backward)
            self.is_over[BACKWARD] = True
            self.batons[FORWARD].release()

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(beside,), name="backward", daemon=True)
        thread.start()
        self.results[FORWARD], self.is_over[FORWARD] = self.attempt(after_it), True
        self.attempt(self.hand_over)  # what is left of backward
        thread.join()
        if self.error is not None:
            raise self.error
        return tuple(self.results)

    def attempt(self, job: Callable[[], Any]) -> Any:
        """Do it, and note what it raises, for the caller and to end the other one."""
        try:
            return job()
        except BaseException as error:
            self.error = self.error or error


def _random_state() -> list[torch.Tensor]:
    if torch.cuda.is_initialized():
        return [torch.get_rng_state(), torch.cuda.get_rng_state()]
    return [torch.get_rng_state()]


def _set_random_state(state: list[torch.Tensor]) -> None:
    host, *gpu = state
    torch.set_rng_state(host)
    if gpu and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(*gpu)
