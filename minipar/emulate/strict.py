"""A race detector for collectives on the emulated link: it finds errors that fail on a GPU.

On a GPU a collective has only *begun* when its call returns. The result is ready after `wait`.
Until then, no code may write to the tensors of the call or free them. With gloo, most such errors
have no effect. This module reports them:

    with strict.watching():              # on every rank, with the backend ``link``
        train_step(...)                  # raises `Race`, which names the call and the tensor

*   Gloo sends copies. The caller's outputs are full of NaN until `wait` puts the result in.
*   `wait` compares the tensors with their earlier values. A changed or freed tensor is a race, even
    if gloo has sent its bytes long before. (A write of the same value is not detected.)
*   An operation that began in the body must be waited for in the body. So must work in a thread
    (`comm.background`).

In torch: the sanitizer of CUDA streams (`torch.cuda._sanitizer`), which needs a GPU.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minipar.comm.calls import Call, Tap, taps

_flying: "set[Handle] | None" = None  # operations that nobody has waited for; None: off


class Race(RuntimeError):
    """A collective in flight and its caller used a tensor at the same time."""


@contextmanager
def watching() -> Iterator[None]:
    """Find races of this rank's link groups in the body. Raises `Race` for the first one.

    Raises `ValueError` if there is no link group: on other backends it finds no race.
    """
    global _flying
    backends = {dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map}
    if "link" not in backends:
        found = ", ".join(sorted(backends)) or "none"
        raise ValueError(f"strict.watching() sees the backend link, not {found}; use Ranks of it")
    before, _flying = _flying, set()
    taps.append(_threads)
    try:
        yield
        if _flying:
            race = Race(f"never waited for: {'; '.join(sorted(set(map(str, _flying))))}")
            race.report = f"Race: {race}"
            raise race
    finally:
        taps.remove(_threads)
        _flying = before


@contextmanager
def paused() -> Iterator[None]:
    """Do not look for races in the body, so that operations take their usual time."""
    global _flying
    before, _flying = _flying, None
    try:
        yield
    finally:
        _flying = before


class Handle:
    """An operation, or work in a thread, for which nobody has waited yet.

    An operation reads some tensors of its `args` and fills others. Gloo moves the copies in
    `travelling` instead of `args`. The outputs are NaN until `settle` puts the results in. Outside
    of `watching`, gloo moves `args`, and `settle` checks nothing.
    """

    def __init__(
        self, what: str, args: Any = (), read: Sequence[Tensor] = (), written: Sequence[Tensor] = ()
    ) -> None:
        self._watch, self._read, self._written, self.travelling = _flying, [], [], args
        if _flying is None:
            return
        copies: dict[int, Tensor] = {}
        self.travelling = tree_map_only(
            Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.detach().clone()), args
        )
        # An in-place gather reads a part of its output. This part changes, and is no race.
        apart = [tensor for tensor in read if not any(_overlap(tensor, out) for out in written)]
        self._read = [(tensor, tensor.detach().clone()) for tensor in apart]
        self._written = [(tensor, copies[id(tensor)]) for tensor in written]
        for tensor in written:
            tensor.detach().copy_(_poison(tensor))
        self.what = f"{what}{_call_site()}"
        self._kinds = dict.fromkeys(map(kind, [*read, *written]))
        _flying.add(self)

    def __str__(self) -> str:
        return ", ".join([self.what, *self._kinds])

    def settle(self, error: Exception | None = None) -> None:
        """Check that nobody touched the tensors, and put the results in. Raises `Race`.

        If the operation has failed, raise its `error` instead. A second call does nothing else.
        """
        if self._watch is not None:
            self._watch.discard(self)
        read, written = self._read, self._written
        self._read = self._written = []
        if error is not None:
            raise error
        for tensor, before in read:
            self._check(tensor, before, "it is sent from there")
        for tensor, arrived in written:
            self._check(tensor, _poison(arrived), "it arrives there")
            tensor.detach().copy_(arrived)

    def _check(self, tensor: Tensor, before: Tensor, why: str) -> None:
        freed = tensor.numel() and not tensor.untyped_storage().nbytes()
        if freed or not torch.equal(_bytes(tensor), _bytes(before)):
            how = f"{'freed' if freed else 'written to'} before `wait` had returned, and {why}"
            what = f"{self.what}: its tensor of {kind(tensor)}"
            raise Race(f"{what} was {how} until then; wait first, or use another buffer")


class _Threads(Tap):
    """Watch work in threads (`comm.background`): this rank must wait for it."""

    def begin(self, call: Call) -> None:
        if call.axis is None and self not in call.notes:
            call.notes[self] = Handle(call.verb)

    def end(self, call: Call) -> None:
        if self in call.notes:
            call.notes[self].settle()


_threads = _Threads()


def kind(tensor: Tensor) -> str:
    """Return dtype and shape in words: "float32 (4, 2)"."""
    return f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"


def _overlap(a: Tensor, b: Tensor) -> bool:
    (start, end), (first, last) = ((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (a, b))
    return start < last and first < end


def _poison(tensor: Tensor) -> Tensor:
    """Return NaN, or the largest value of a type without NaN, in the shape of `tensor`."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full_like(tensor, float("nan"))
    return torch.full_like(tensor, tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _call_site() -> str:
    """Return the innermost line of the call outside of torch, `comm` and `emulate`."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if cell := _CELL.fullmatch(path):
            return f" at Cell In[{cell[1]}], line {frame.lineno}"
        if not any(folder in path for folder in ("/torch/", "/minipar/comm/", "/minipar/emulate/")):
            return f" at {'/'.join(path.split('/')[-2:])}:{frame.lineno}"
    return ""


_CELL = re.compile(r"<ipython-input-(\d+)-\w+>")  # how IPython calls the code of one
