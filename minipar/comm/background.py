"""Background work: a thread that makes its calls one after the other, while its rank computes.

The thread has its own clock on an emulated device, and its own stream on a GPU. So neither the
waits nor the kernels of the thread delay the rest of the rank.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from minipar.comm import clock
from minipar.comm.calls import Call


class Background:
    """Do `work` in a thread after the work of `after`, so that all ranks make calls in one order.

    `on` is the device of the tensors that `work` uses. On a GPU, `work` runs on `after`'s stream.
    Errors and taps call the work by its `name`.
    """

    def __init__(
        self, work: Callable[[], Any], after: "Background | None", on: torch.device, name: str
    ) -> None:
        self._work, self._after, self._error = work, after, None
        self._at = clock.now()  # when the work may begin; after the work, when it ended
        self._is_inference = torch.is_inference_mode_enabled()  # the thread needs the same mode
        self._on, self._stream = on, None
        if on.type == "cuda":
            self._stream = torch.cuda.Stream(on) if after is None else after._stream
            self._stream.wait_stream(torch.cuda.current_stream(on))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._call = Call(name)
        self._call.begin(self._thread.start)

    def _run(self) -> None:
        if self._after is not None:
            self._after._thread.join()
            self._at = max(self._at, self._after._at)
        try:
            with torch.inference_mode(self._is_inference), torch.cuda.stream(self._stream):
                clock.beside(self._at)
                self._work()
                self._at = clock.now()
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._work = self._after = None

    def wait(self) -> None:
        """Block until the work is done; raise its error."""
        with self._call.waiting():
            self._thread.join()
            clock.reach(self._at)
        if self._stream is not None:
            torch.cuda.current_stream(self._on).wait_stream(self._stream)
        if self._error is not None:
            raise self._error
