"""The ring: keys and values travel while they are multiplied.

In each step a rank passes on what it has just begun to multiply, and receives what it will need
next. Nobody waits if a product takes longer than a message; nobody holds more than two blocks.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).
"""

import time

import torch
import torch.distributed as dist

from minipar.comm import collectives
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 30
GOOD = "every block once on every rank, n - 1 messages, each on its way while a product is computed"
PRAISE = "Post, compute, wait: the forward pass of ring attention."
SIZES = (4, 3)

TOKENS, WIDTH = 3, 4  # of each rank
SLOW = Link("slow", latency=0.02, bandwidth=1e9)  # 20 ms per message
PRODUCT = 0.03  # seconds


def given(size, random):
    """Keys and values [2, t, K] of each rank."""
    kv = torch.randn(size, 2, TOKENS, WIDTH, generator=random, dtype=torch.float64)
    return [(mine.clone(),) for mine in kv]


def _query(rank):
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None] * (rank + 1)


def run(answer, axis, kv):
    """Return which blocks came, the attention over them, when it was computed, and the sends."""
    came, blocks, scores, computed, sends = [], [], [], [], []

    def compute(kv, source):
        computed.append(time.monotonic())
        came.append(int(source))
        scores.append(_query(axis.rank) @ kv[0].mT)
        time.sleep(PRODUCT)
        blocks.append(kv.clone())

    def note(work):
        if work.verb == "send":
            sends.append((work.t_issue, work.waits))

    link.use(SLOW)
    link.observers.append(note)
    try:
        answer(kv, compute, axis)
        dist.barrier(axis.group)
    finally:
        link.observers.remove(note)
    out = torch.zeros(1, WIDTH, dtype=torch.float64)
    if scores:
        out = torch.cat(scores, -1).softmax(-1) @ torch.cat([block[1] for block in blocks])
    return out, came, blocks, computed, sorted(sends)


def check_result(case: Case) -> None:
    kv = torch.stack([mine for (mine,) in case.given])
    keys, values = kv[:, 0].flatten(0, 1), kv[:, 1].flatten(0, 1)
    for rank, (_, came, *_) in enumerate(case.results):
        if sorted(came) != list(range(case.size)):
            raise CheckFailed(
                f"rank {rank} computed with the blocks of {came}; each of 0 to {case.size - 1} once"
            )
    expected = [(_query(rank) @ keys.mT).softmax(-1) @ values for rank in range(case.size)]
    found = [out for out, *_ in case.results]
    Case(case.size, case.given, found, case.sent).expect_close(expected, "attention")
    for rank, (_, came, blocks, *_) in enumerate(case.results):
        for step, (source, block) in enumerate(zip(came, blocks, strict=True)):
            if not torch.equal(block, kv[source]):
                raise CheckFailed(
                    f"rank {rank}, product {step}: source is {source}, and this is no block of "
                    f"rank {source}; a causal mask would hide other keys"
                )


def check_traffic(case: Case) -> None:
    num_bytes = case.given[0][0].nbytes
    for rank in range(case.size):
        to = (rank + 1) % case.size
        case.expect_sent(rank, [Sent("send", num_bytes, to)] * (case.size - 1))


def check_overlap(case: Case) -> None:
    for rank, (*_, computed, sends) in enumerate(case.results):
        for step, (begun, waits) in enumerate(sends):
            if begun > computed[step]:
                raise CheckFailed(
                    f"rank {rank}: message {step} left only when product {step} had begun, or was "
                    "over; post it before you compute"
                )
            if any(at < computed[step] for at in waits):
                raise CheckFailed(
                    f"rank {rank}: message {step} was waited for before product {step} began, so "
                    "nothing is hidden"
                )


def solution(kv, compute, axis):
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for step in range(axis.size):
        arriving = None
        if step < axis.size - 1:
            sends, recvs = [(kv, after)], [(torch.empty_like(kv), before)]
            arriving = collectives.exchange(sends, recvs, axis, async_op=True)
        compute(kv, (axis.rank - step) % axis.size)
        if arriving is not None:
            [kv] = arriving.wait()


def _pass_on(kv, axis, **options):
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    sends, recvs = [(kv, after)], [(torch.empty_like(kv), before)]
    return collectives.exchange(sends, recvs, axis, **options)


@fails(
    "result",
    "Each rank computes with its own block under other names: nothing was sent.",
)
def wrong_sends_nothing(kv, compute, axis):
    for step in range(axis.size):
        compute(kv, (axis.rank - step) % axis.size)


@fails(
    "result",
    "The source is not that of the block: in step s it is rank - s.",
)
def wrong_names_the_wrong_source(kv, compute, axis):
    """What has come from the left was on rank - step; the sum over all would not tell."""
    for step in range(axis.size):
        compute(kv, axis.rank)
        if step < axis.size - 1:
            [kv] = _pass_on(kv, axis)


@fails(
    "result",
    "compute was given a block that had not arrived: wait first.",
)
def wrong_does_not_wait(kv, compute, axis):
    for step in range(axis.size):
        arriving = _pass_on(kv, axis, async_op=True) if step < axis.size - 1 else None
        compute(kv, (axis.rank - step) % axis.size)
        if arriving is not None:
            kv = torch.zeros_like(kv)
            arriving.wait()


@fails(
    "result",
    "A block is filled while it is still read: receive into a fresh buffer.",
)
def wrong_receives_into_the_block(kv, compute, axis):
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for step in range(axis.size):
        arriving = None
        if step < axis.size - 1:
            arriving = collectives.exchange([(kv, after)], [(kv, before)], axis, async_op=True)
        compute(kv, (axis.rank - step) % axis.size)
        if arriving is not None:
            arriving.wait()


@fails(
    "traffic",
    "One message too many: after the last product nothing is needed.",
)
def wrong_goes_around_once_more(kv, compute, axis):
    for step in range(axis.size):
        arriving = _pass_on(kv, axis, async_op=True)
        compute(kv, (axis.rank - step) % axis.size)
        [kv] = arriving.wait()


@fails(
    "traffic",
    "All blocks are gathered at once: pass one on in each step.",
)
def wrong_gathers(kv, compute, axis):
    for source, block in enumerate(collectives.all_gather(kv[None], axis)):
        compute(block, source)


@fails(
    "overlap",
    "Nothing travels while compute runs: start the exchange, compute, then wait.",
)
def wrong_computes_first(kv, compute, axis):
    for step in range(axis.size):
        compute(kv, (axis.rank - step) % axis.size)
        if step < axis.size - 1:
            [kv] = _pass_on(kv, axis)


@fails(
    "overlap",
    "Nothing travels while compute runs: start the exchange, compute, then wait.",
)
def wrong_waits_before_it_computes(kv, compute, axis):
    for step in range(axis.size):
        coming = _pass_on(kv, axis) if step < axis.size - 1 else None
        compute(kv, (axis.rank - step) % axis.size)
        if coming is not None:
            [kv] = coming


@fails(
    "result",
    "The blocks are right, and their ranks are not: after s steps it is that of rank - s.",
)
def wrong_names_the_next_rank(kv, compute, axis):
    def named(kv, source):
        compute(kv, (2 * axis.rank - source) % axis.size)

    solution(kv, named, axis)
