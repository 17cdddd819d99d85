"""Background work: a thread that makes its calls one after the other, while its rank computes.

On an emulated device the thread has a clock of its own, and on a GPU a stream: neither its waits
nor its kernels hold up the rest of the rank.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from minipar.comm import clock
from minipar.comm.calls import Call
from minipar.comm.values import lane


class Background:
    """Do `work` in a thread, after all works `before` it: ranks make calls in the same order.

    `on` is the device of the tensors that `work` uses. On a GPU, works of one `purpose` share a
    stream. Tasks of different purposes do not, as ranks may come to them in different orders.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        before: Iterable["Background"],
        on: torch.device,
        purpose: str,
    ) -> None:
        self._work, self._before, self._error = work, list(before), None
        self._at = clock.now()  # when the work may begin; in the end, when it has ended
        self._is_inference = torch.is_inference_mode_enabled()  # the thread needs the same mode
        self._on, self._lane = on, None
        if on.type == "cuda":
            self._lane = lane(on, purpose)
            self._lane.wait_stream(torch.cuda.current_stream(on))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._call, self._ended = Call(purpose), threading.Event()
        self._call.begin(lambda: self._thread.start() or self._ended)

    def _run(self) -> None:
        for other in self._before:
            other._thread.join()
            self._at = max(self._at, other._at)
            if self._lane is not None and other._lane is not None:
                self._lane.wait_stream(other._lane)
        on_lane = torch.cuda.stream(self._lane) if self._on.type == "cuda" else nullcontext()
        try:
            with clock.beside(self._at), torch.inference_mode(self._is_inference), on_lane:
                self._work()
                self._at = clock.now()
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._work, self._before = None, []
        self._ended.set()

    def wait(self) -> None:
        """Block until the work is done; raise its error."""
        with self._call.waiting():
            self._thread.join()
            clock.reach(self._at)
        if self._on.type == "cuda":
            torch.cuda.current_stream(self._on).wait_stream(self._lane)
        if self._error is not None:
            raise self._error
