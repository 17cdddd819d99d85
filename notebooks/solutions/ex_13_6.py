"""Predict, then measure: when is the last gradient there?

Backward computes block by block; the gradients of each are reduced while the next computes, one
all-reduce after the other on the link. The prediction is held against its closed form, and then
against ranks that sleep instead of computing and reduce for real on an emulated link.
Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.3, for the overlap; alpha-beta as in 13.2.
"""

import time

import torch

from minipar.comm.collectives import all_reduce
from minipar.emulate import link
from minipar.lab.cases import apart
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "the closed form to six digits in all cases, and within 10 % of what the ranks take"
PRAISE = "Predicted, then measured, within 10 %: that is what a plan needs."
SIZES = (4,)

TRIES = 2  # a busy machine is late: of several measurements, the shortest


def given(size, random):
    """Cases (seconds of each block's backward, bytes of its gradients, latency, bandwidth).

    In the first, computing takes longer; in the second, the link; the last has no pattern.
    """
    r = torch.rand(3, 4, generator=random, dtype=torch.float64)
    cases = []
    for i, (compute, megabytes) in enumerate([(0.04, 1), (0.01, 4), (0.03, 2)]):
        seconds = [compute * (0.5 + x) for x in r[i].tolist()]
        num_bytes = [int(megabytes * 2**20 * (0.5 + x)) // 4 * 4 for x in r[i].flip(0).tolist()]
        cases.append((seconds, num_bytes, 1e-3 * (1 + float(r[i, 0])), 1e8))
    return [(cases,)] * size


def run(answer, axis, cases):
    """The prediction of each case, and what it takes here."""
    predicted = [float(answer(*case, axis.size)) for case in cases]
    if not min(predicted) > 0:
        return predicted, []  # there is nothing to measure
    return predicted, [min(_measure(axis, *case) for _ in range(TRIES)) for case in cases]


def _measure(axis, seconds, num_bytes, latency, bandwidth) -> float:
    """Seconds until the slowest rank has its last gradient."""
    before = link.current()
    all_reduce(torch.zeros(1), axis)  # all start together
    link.use(link.Link("exercise", latency, bandwidth))
    try:
        start, works = time.monotonic(), []
        for compute, size in zip(seconds, num_bytes, strict=True):
            time.sleep(compute)
            options = {"group": axis.group, "async_op": True}
            works.append(torch.distributed.all_reduce(torch.zeros(size // 4), **options))
        for work in works:
            work.wait()
        taken = time.monotonic() - start
    finally:
        link.use(before)
    return float(all_reduce(torch.tensor([taken], dtype=torch.float64), axis, "max"))


def _seconds(seconds, num_bytes, latency, bandwidth, ranks) -> float:
    computed = arrived = 0.0
    for compute, size in zip(seconds, num_bytes, strict=True):
        computed += compute
        takes = 2 * (ranks - 1) * (latency + size / ranks / bandwidth)
        arrived = max(computed, arrived) + takes
    return arrived


def check_closed_form(case: Case) -> None:
    for asked, predicted in zip(case.given[0][0], case.results[0][0], strict=True):
        want = _seconds(*asked, case.size)
        if not abs(predicted - want) <= 1e-6 * want:
            milliseconds = [f"{1e3 * s:.1f}" for s in asked[0]]
            raise CheckFailed(
                f"blocks of {', '.join(milliseconds)} ms, gradients of {asked[1]} bytes, latency "
                f"{1e3 * asked[2]:.2f} ms, {asked[3]:.0e} bytes/s; milliseconds until the last one "
                f"is there: {apart(1e3 * want, 1e3 * predicted)}"
            )


def check_measured(case: Case) -> None:
    for asked, predicted, taken in zip(case.given[0][0], *case.results[0], strict=True):
        late = max(1.0, taken / _seconds(*asked, case.size))  # of a machine that others use, too
        if not taken / (1.1 * late) <= predicted <= 1.1 * taken:
            raise CheckFailed(f"you say {1e3 * predicted:.1f} ms, it took {1e3 * taken:.1f}")


def solution(seconds, num_bytes, latency, bandwidth, ranks):
    computed = arrived = 0.0
    for compute, size in zip(seconds, num_bytes, strict=True):
        computed += compute
        takes = 2 * (ranks - 1) * (latency + size / ranks / bandwidth)
        arrived = max(computed, arrived) + takes
    return arrived


@fails(
    "closed_form",
    "A step of no time at all: what is missing is the prediction.",
)
def wrong_predicts_nothing(seconds, num_bytes, latency, bandwidth, ranks):
    return 0.0


@fails(
    "closed_form",
    "All computing, then all sending: a gradient leaves while the next is computed.",
)
def wrong_hides_nothing(seconds, num_bytes, latency, bandwidth, ranks):
    """All computing, then all communication."""
    takes = sum(2 * (ranks - 1) * (latency + n / ranks / bandwidth) for n in num_bytes)
    return sum(seconds) + takes


@fails(
    "closed_form",
    "The larger of two sums: the last gradient cannot leave before it is computed.",
)
def wrong_takes_the_larger_of_two_sums(seconds, num_bytes, latency, bandwidth, ranks):
    """The last gradient cannot travel before it is computed."""
    takes = sum(2 * (ranks - 1) * (latency + n / ranks / bandwidth) for n in num_bytes)
    return max(sum(seconds), takes)


@fails(
    "closed_form",
    "All travel at once: there is one link, and the next one queues.",
)
def wrong_lets_all_travel_at_once(seconds, num_bytes, latency, bandwidth, ranks):
    """One link: the next one queues."""
    computed, ends = 0.0, []
    for compute, size in zip(seconds, num_bytes, strict=True):
        computed += compute
        ends.append(computed + 2 * (ranks - 1) * (latency + size / ranks / bandwidth))
    return max(ends)


@fails(
    "closed_form",
    "Each byte is sent once: a ring moves 2 (n - 1)/n of them.",
)
def wrong_sends_each_byte_once(seconds, num_bytes, latency, bandwidth, ranks):
    """A ring moves 2 (n - 1)/n of them."""
    computed = arrived = 0.0
    for compute, size in zip(seconds, num_bytes, strict=True):
        computed += compute
        arrived = max(computed, arrived) + 2 * (ranks - 1) * latency + size / bandwidth
    return arrived
