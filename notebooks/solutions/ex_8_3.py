"""Ulysses: all tokens of some heads, for as long as attention takes.

An all-to-all trades tokens for heads, another one trades back. Key/value heads that are fewer than
ranks are repeated first, each next to its copy, so that the r-th part of the keys belongs to the
r-th part of the queries.
Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.
"""

import math

import torch

from minipar.comm import autograd, collectives
from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.model.llama import dense_core

LEVEL, MINUTES = "medium", 30
GOOD = "attention of one device, gradients too, and each head sent no more often than it must be"
PRAISE = "Attention did not notice: it saw all tokens, of fewer heads."
SIZES = (4, 2)

BATCH, HEADS, KV_HEADS, TOKENS, HEAD = 2, 4, 2, 8, 3


def given(size, random):
    """This rank's tokens of q [B, H, T/n, K] and of k, v [B, G, T/n, K]."""
    whole = [
        torch.randn(BATCH, heads, TOKENS, HEAD, generator=random, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return [tuple(x.chunk(size, 2)[rank].clone() for x in whole) for rank in range(size)]


def run(answer, axis, *qkv):
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    out = answer(*leaves, axis)
    if out.requires_grad:
        (out.sin() * _weights(out, axis.rank)).sum().backward()
    return out.detach(), [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


def _weights(out: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.arange(out.numel(), dtype=out.dtype).view_as(out) + rank


def _one_device(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    q, k, v = (torch.cat([mine[i] for mine in case.given], 2).requires_grad_() for i in range(3))
    out = dense_core(q, k, v)
    pieces = out.chunk(case.size, 2)
    sum((p.sin() * _weights(p, rank)).sum() for rank, p in enumerate(pieces)).backward()
    return out.detach(), [q.grad, k.grad, v.grad]


def _with(case: Case, results: list) -> Case:
    return Case(case.size, case.given, results, case.sent)


def check_result(case: Case) -> None:
    expected = list(_one_device(case)[0].chunk(case.size, 2))
    _with(case, [out for out, _ in case.results]).expect_close(expected, "the output")


def check_gradients(case: Case) -> None:
    pieces = [grad.chunk(case.size, 2) for grad in _one_device(case)[1]]
    expected = [list(mine) for mine in zip(*pieces, strict=True)]
    found = [grads for _, grads in case.results]
    _with(case, found).expect_close(expected, "the gradient of", names="qkv")


def check_traffic(case: Case) -> None:
    """Forward and backward: q and the output once, k and v as often as ranks need copies."""
    head_bytes = 8 * BATCH * TOKENS // case.size * HEAD
    heads = 2 * HEADS + 2 * math.lcm(KV_HEADS, case.size)
    most = 2 * wire_bytes("all_to_all", heads * head_bytes, case.size)
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if num_bytes > most:
            raise CheckFailed(f"rank {rank} sent {num_bytes} bytes; all-to-alls need {most}")


def solution(q, k, v, axis):
    copies = math.lcm(k.shape[1], axis.size) // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (autograd.all_to_all(x, axis, 1, 2) for x in (q, k, v))  # heads out, tokens in
    return autograd.all_to_all(dense_core(q, k, v), axis, 2, 1)


def _swap(q, k, v, axis, swap):
    q, k, v = (swap(x, axis, 1, 2) for x in (q, k, v))
    return swap(dense_core(q, k, v), axis, 2, 1)


@fails(
    "result",
    "Each token looks only at those of its own rank: nothing was swapped.",
)
def wrong_sends_nothing(q, k, v, axis):
    """Each token looks at those of its own rank."""
    return dense_core(q, k, v)


@fails(
    "result",
    "Copies lie as 0 1 0 1: they belong side by side, with repeat_interleave.",
)
def wrong_copies_in_the_wrong_order(q, k, v, axis):
    """0 1 0 1: on four ranks query heads 1 and 2 meet keys that are not theirs."""
    copies = math.lcm(k.shape[1], axis.size) // k.shape[1]
    return _swap(q, k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1), axis, autograd.all_to_all)


@fails(
    "gradients",
    "collectives.all_to_all has no gradient: autograd.all_to_all has.",
)
def wrong_without_gradients(q, k, v, axis):
    """The plain collective: autograd does not know of it."""
    copies = math.lcm(k.shape[1], axis.size) // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    return _swap(q, k, v, axis, collectives.all_to_all)


@fails(
    "traffic",
    "Keys are copied for every query head: only until n divides their number.",
)
def wrong_copies_for_every_query_head(q, k, v, axis):
    """Right, and more than needed where n divides the key/value heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return _swap(q, k, v, axis, autograd.all_to_all)


@fails(
    "traffic",
    "All tokens of all heads are gathered: swap tokens for heads.",
)
def wrong_gathers_everything(q, k, v, axis):
    q, k, v = (autograd.all_gather(x, axis, 2, to="R") for x in (q, k, v))
    return dense_core(q, k, v).chunk(axis.size, 2)[axis.rank]
