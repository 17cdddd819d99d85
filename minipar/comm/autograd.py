"""Collectives that gradients flow through: the transitions between types of a distributed tensor.

Idea: along one axis, the tensors that the ranks hold under one name have one of four types. The
type of a tensor says what its value is, and what its gradient is:

    type            the ranks hold                      its gradient is
    R  Replicate    the same; each uses it its own way  P: every rank has a part of the sum
    P  Partial      summands: the value is their sum    R: the same on every rank
    I  Invariant    the same; all use it the same way   I: the same on every rank
    V  Varying      pieces, or values of their own      V: of the own piece

R and I hold the same numbers. They differ in the computation that follows. With R, each rank
multiplies the activation by its own shard of a matrix, and so computes a part of the gradient.
With I, all ranks do the same computation, and so each rank computes the whole gradient.

A collective changes the type of a tensor. Its backward changes the type of the gradient back. This
backward is the transpose of the forward, and is another row of the same table. So each function
below needs one line of forward and one line of backward. Each can be differentiated again.

    function         forward                          backward                       bytes sent
    all_reduce       P -> R   sum                     P -> R   sum                   2A + 2A
                     P -> I   sum                     I -> R   nothing               2A +  0
    convert          I -> R   nothing                 P -> I   sum                    0 + 2A
    reduce_scatter   P -> V   sum, keep own piece     V -> R   join                   A +  A
    all_gather       V -> R   join                    P -> V   sum, keep own piece    A +  A
                     V -> I   join                    I -> V   keep own piece         A +  0
    cut              I -> V   keep own piece          V -> I   join                   0 +  A
    all_to_all       V -> V   transpose               V -> V   transpose back      A/n + A/n

A = (n-1)/n of the bytes of the whole tensor, forward + backward, as `collectives.wire_bytes` counts
and the ledger records them. No function changes its argument: selective recomputation keeps the
argument of `all_reduce`, and two branches of the graph may share a gradient. On an axis of size 1,
only copies take time.

Why two rows for a sum: `torch.distributed.nn.all_reduce` is P -> R. If every rank then computes the
same loss, the type is I, and this P -> R makes gradients n times too large (T14). Megatron-LM's f
is `convert`, its g is ``all_reduce(to="I")``.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3, for f and g; Korthikanti
et al. 2022 (arXiv 2205.05198), section 4.2.2, for the pair gather and reduce-scatter; the four
type names come from meta-pytorch's `spmd_types`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from minipar.comm import collectives
from minipar.comm.mesh import Axis


class _Transition(torch.autograd.Function):
    """A linear map between types. Its backward is the transpose, made of transitions too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(gradient), None, None


def _transition(x: Tensor, forward: Callable, backward: Callable) -> Tensor:
    return outside_of_graphs(_Transition.apply, x, forward, backward)


def outside_of_graphs(function: Callable, *args: Any) -> Any:
    """Return ``function(*args)``; end torch.compile's graph, as it cannot trace collectives."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)
    return function(*args)


def all_reduce(x: Tensor, axis: Axis, *, to: Literal["R", "I"]) -> Tensor:
    """Add up over the axis: [D, ...] P -> [D, ...] R or I.

    Forward   [1 2] [3 4]  ->  [4 6] [4 6]
    Backward  ``to="R"``: each rank used the sum its own way, so its gradient is a part. P -> R:
              [a b] [c d]  ->  [a+c b+d] [a+c b+d]
              ``to="I"``: all ranks have the whole gradient already. I -> R, nothing to send:
              [a b] [a b]  ->  [a b] [a b]
    """
    backward = {"R": lambda g: all_reduce(g, axis, to="R"), "I": lambda g: convert(g, axis)}[to]
    return _transition(x, lambda x: collectives.all_reduce(x, axis), backward)


def convert(x: Tensor, axis: Axis) -> Tensor:
    """From here on, ranks use the same tensor in different ways: [D, ...] I -> R.

    Forward   [1 2] [1 2]  ->  [1 2] [1 2]      nothing to send
    Backward  P -> I: each way contributed a part of the gradient
              [a b] [c d]  ->  [a+c b+d] [a+c b+d]
    """
    return _transition(x, lambda x: x.view_as(x), lambda g: all_reduce(g, axis, to="I"))


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Add up over the axis and keep this rank's piece of `dim`: [D, ...] P -> [D/n, ...] V.

    Forward   [1 2] [3 4]  ->  [4] [6]
    Backward  V -> R: all summands have the gradient of the sum
              [a] [b]      ->  [a b] [a b]
    """
    return _transition(
        x,
        lambda x: collectives.reduce_scatter(x, axis, dim),
        lambda g: all_gather(g, axis, dim, to="R"),
    )


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, to: Literal["R", "I"]) -> Tensor:
    """Join the pieces along `dim`: [D, ...] V -> [n D, ...] R or I.

    Forward   [1] [2]      ->  [1 2] [1 2]
    Backward  ``to="R"``: each rank used the whole its own way. P -> V:
              [a b] [c d]  ->  [a+c] [b+d]
              ``to="I"``: all ranks have the whole gradient already. I -> V, nothing to send:
              [a b] [a b]  ->  [a] [b]
    """
    backward = {"R": lambda g: reduce_scatter(g, axis, dim), "I": lambda g: cut(g, axis, dim)}[to]
    return _transition(x, lambda x: collectives.all_gather(x, axis, dim), backward)


def cut(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Keep this rank's piece of `dim`: [D, ...] I -> [D/n, ...] V.

    Forward   [1 2] [1 2]  ->  [1] [2]          nothing to send
    Backward  V -> I: each rank knows the gradient of its piece
              [a] [b]      ->  [a b] [a b]
    """

    def keep(x: Tensor) -> Tensor:
        piece = collectives.split(x, dim, axis.size)[axis.rank]
        return piece.clone(memory_format=torch.contiguous_format)  # a view keeps all of x alive

    return _transition(x, keep, lambda g: all_gather(g, axis, dim, to="I"))


def all_to_all(x: Tensor, axis: Axis, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Send the r-th slice of `split_dim` to rank r, join the slices along `concat_dim`: V -> V.

    Forward   [1 2] [3 4]  ->  [1 3] [2 4]      [D, F] becomes [n D, F/n]: shapes change too
    Backward  V -> V: each slice goes back to its sender
              [a b] [c d]  ->  [a c] [b d]
    """
    return _transition(
        x,
        lambda x: collectives.all_to_all(x, axis, split_dim, concat_dim),
        lambda g: all_to_all(g, axis, concat_dim, split_dim),
    )


def start_all_to_all(
    x: Tensor, axis: Axis, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> Callable[[], Tensor]:
    """Begin an all-to-all of rows, V -> V; the returned function waits for the rows that arrive.

    ``send_counts[r]`` rows go to rank r, and ``recv_counts[r]`` come from rank r.
    Computation between the two calls hides the messages, in backward too. Autograd runs the calls
    in reverse: the backward of the wait sends gradients, the backward of the start waits for them.
    """
    pending = []

    def start(rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        pending.append(
            collectives.all_to_all(rows, axis, send_counts=send, recv_counts=receive, async_op=True)
        )
        return rows.new_zeros(())  # a number that connects start and wait in autograd's graph

    def wait(_: Tensor) -> Tensor:
        return pending.pop().wait()

    begun = _transition(x, lambda rows: start(rows, send_counts, recv_counts), wait)
    return lambda: _transition(begun, wait, lambda grad: start(grad, recv_counts, send_counts))
