"""All-gather with prefetch: the next layer's weights arrive while this one computes.

Two whole weights at a time: the one in use and the one on its way. One more would cost memory and
hide nothing, one fewer would leave the link idle while the layer computes.
Source: Zhao et al. 2023 (arXiv 2304.11277), section 3.3.
"""

import time
import weakref

import torch
import torch.distributed as dist

from minipar.comm.collectives import wire_bytes
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 25
GOOD = "one all-gather per layer, begun before the layer before it computes; two weights at a time"
PRAISE = "From the second layer on, nobody waits for weights: this is the forward pass of FSDP."
SIZES = (4, 3)

LAYERS, WIDTH = 5, 12
WHOLE = 8 * WIDTH * WIDTH  # bytes of a weight
SLOW = Link("slow", latency=0.01, bandwidth=1e9)  # 10 ms per step of a ring


def given(size, random):
    """For each rank its rows of every weight [D, D], and an input [B, D] of its own."""
    weights = torch.randn(LAYERS, size, WIDTH // size, WIDTH, generator=random).double()
    inputs = torch.randn(size, 3, WIDTH, generator=random, dtype=torch.float64)
    return [(list(weights[:, rank].clone()), x) for rank, x in enumerate(inputs)]


def _layer(weight, x):
    return torch.tanh(x @ weight / WIDTH**0.5)


def run(answer, axis, shards, x):
    """Return the output, when layers computed and how many weights lived, and when it gathered."""
    computed, gathers = [], []
    seen = weakref.WeakKeyDictionary()  # memory that was computed with, while it lives: its number

    def compute(weight, x):
        own = seen.setdefault(weight.untyped_storage(), len(computed))
        alive = sum(memory.nbytes() for memory in seen) // WHOLE  # it may be of several weights
        computed.append((time.monotonic(), alive, own, set(seen.values())))
        result = _layer(weight, x)
        time.sleep(0.02)
        return result

    def note(work):
        if work.verb == "all_gather":
            gathers.append((work.t_issue, work.waits))

    link.use(SLOW)
    link.observers.append(note)
    try:
        y = answer(shards, x, compute, axis)
        dist.barrier(axis.group)
    finally:
        link.observers.remove(note)
    return y, computed, sorted(gathers)


def check_result(case: Case) -> None:
    weights = [torch.cat(rows) for rows in zip(*(shards for shards, _ in case.given), strict=True)]
    expected = []
    for _, x in case.given:
        for weight in weights:
            x = _layer(weight, x)
        expected.append(x)
    found = [y for y, _, _ in case.results]
    Case(case.size, case.given, found, case.sent).expect_close(expected, "the output")


def check_traffic(case: Case) -> None:
    num_bytes = wire_bytes("all_gather", WHOLE, case.size)
    for rank in range(case.size):
        case.expect_sent(rank, [Sent("all_gather", num_bytes)] * LAYERS)


def check_memory(case: Case) -> None:
    for rank, (_, computed, gathers) in enumerate(case.results):
        for i, (begins, alive, _, known) in enumerate(computed):
            coming = zip(gathers[i + 1 :], computed[i + 1 :], strict=False)
            begun = [into for (at, _), (_, _, into, _) in coming if at < begins]
            ahead = sum(into not in known for into in begun)  # else it fills what is alive
            if alive + ahead > 2:
                raise CheckFailed(
                    f"rank {rank}: when layer {i} computed, {alive + ahead} whole weights were "
                    f"alive or on their way: {alive} that had been used, and {ahead} to come; at "
                    "most 2 in all"
                )


def check_overlap(case: Case) -> None:
    for rank, (_, computed, gathers) in enumerate(case.results):
        if len(computed) != LAYERS:
            raise CheckFailed(f"rank {rank} called compute {len(computed)} times, not {LAYERS}")
        for i in range(1, LAYERS):
            (begins, *_), (begun, waits) = computed[i - 1], gathers[i]
            if begun > begins:
                raise CheckFailed(
                    f"rank {rank}: the gather of layer {i} began only when layer {i - 1} computed"
                )
            if any(at < begins for at in waits):
                raise CheckFailed(
                    f"rank {rank}: the gather of layer {i} was waited for before layer {i - 1} "
                    "computed, so nothing is hidden"
                )


def solution(shards, x, compute, axis):
    def gather(shard):
        whole = shard.new_empty(axis.size * len(shard), shard.shape[1])
        work = dist.all_gather_single(whole, shard, group=axis.group, async_op=True)
        return whole, work

    coming = gather(shards[0])
    for i in range(len(shards)):
        weight, work = coming
        work.wait()
        coming = gather(shards[i + 1]) if i + 1 < len(shards) else None
        x = compute(weight, x)
        del weight, work  # else they live on while the next but one is gathered
    return x


@fails(
    "result",
    "Weights are made of this rank's rows alone: nothing was gathered.",
)
def wrong_sends_nothing(shards, x, compute, axis):
    for shard in shards:
        x = compute(shard.repeat(axis.size, 1), x)
    return x


@fails(
    "result",
    "compute ran on a weight that had not arrived: wait first, and use two buffers.",
)
def wrong_does_not_wait(shards, x, compute, axis):
    works = []
    for shard in shards:
        whole = shard.new_zeros(axis.size * len(shard), shard.shape[1])
        work = dist.all_gather_single(whole, shard, group=axis.group, async_op=True)
        works.append(work)
        x = compute(whole.clone(), x)
    for work in works:
        work.wait()
    return x


@fails(
    "traffic",
    "Each weight is gathered twice.",
)
def wrong_gathers_twice(shards, x, compute, axis):
    solution(shards, x, lambda weight, x: x, axis)
    return solution(shards, x, compute, axis)


@fails(
    "overlap",
    "Each gather begins when it is needed: start the next one before compute.",
)
def wrong_gathers_when_needed(shards, x, compute, axis):
    for shard in shards:
        x = compute(_whole(shard, axis), x)
    return x


@fails(
    "overlap",
    "The next weight is waited for before compute: wait for it after.",
)
def wrong_waits_for_the_next(shards, x, compute, axis):
    """Gathers ahead, but waits for it before it computes."""
    whole = _whole(shards[0], axis)
    for i in range(len(shards)):
        ahead = _whole(shards[i + 1], axis) if i + 1 < len(shards) else None
        x = compute(whole, x)
        whole = ahead
    return x


@fails(
    "memory",
    "All weights are gathered at the start: gather one ahead.",
)
def wrong_gathers_all_at_once(shards, x, compute, axis):
    coming = []
    for shard in shards:
        whole = shard.new_empty(axis.size * len(shard), shard.shape[1])
        work = dist.all_gather_single(whole, shard, group=axis.group, async_op=True)
        coming.append((whole, work))
    for whole, work in coming:
        work.wait()
        x = compute(whole, x)
    return x


@fails(
    "memory",
    "Old weights are alive: let go of every name for them.",
)
def wrong_frees_nothing(shards, x, compute, axis):
    kept = []

    def keeping(weight, x):
        kept.append(weight)
        return compute(weight, x)

    return solution(shards, x, keeping, axis)


def _whole(shard, axis):
    whole = shard.new_empty(axis.size * len(shard), shard.shape[1])
    dist.all_gather_single(whole, shard, group=axis.group)
    return whole
