"""Latency and bandwidth from measurements.

Among n ranks an all-reduce of N bytes takes 2(n-1) latency + 2(n-1)/n N / bandwidth: a straight
line in N, and a least-squares fit gives both. But a stopwatch that starts when its own rank calls
also counts the wait for the last rank to call. Only that last rank measures the link alone, and
nobody knows beforehand who it is: of each measurement, take the shortest over the ranks.
Source: Hockney 1994 (the model); Thakur, Rabenseifner & Gropp 2005, section 4.5 (the ring).
"""

import torch

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "latency and bandwidth right to six digits on every rank, after one all-reduce of the times"
PRAISE = "Two numbers now predict every collective on this link."
SIZES = (4, 3)

NUM_BYTES = torch.tensor([4.0**k for k in range(5, 12)], dtype=torch.float64)  # 1 kB to 4 MB


def given(size, random):
    latency, bandwidth = _link(random)
    truth = 2 * (size - 1) * (latency + NUM_BYTES / size / bandwidth)
    waits = truth.mean() * torch.rand(size, len(truth), generator=random, dtype=torch.float64)
    waits[torch.arange(len(truth)) % size, torch.arange(len(truth))] = 0.0  # who calls last
    link = torch.tensor([latency, bandwidth], dtype=torch.float64)
    return [(NUM_BYTES.clone(), truth + wait, link) for wait in waits]


def _link(random) -> tuple[float, float]:
    """Draw a latency of 10 to 100 microseconds, and a bandwidth of 0.1 to 10 GB per second."""
    tens, hundreds = torch.rand(2, generator=random, dtype=torch.float64).tolist()
    return 1e-5 * 10**tens, 1e8 * 100**hundreds


def run(answer, axis, num_bytes, seconds, _truth):
    return answer(num_bytes, seconds, axis)


def check_result(case: Case) -> None:
    for rank, (result, (*_, truth)) in enumerate(zip(case.results, case.given, strict=True)):
        try:
            got = [float(value) for value in result]
        except (TypeError, ValueError):
            got = []
        if len(got) != 2:
            raise CheckFailed(f"rank {rank}: expected latency and bandwidth, got {result!r}")
        for name, value, want in zip(("latency", "bandwidth"), got, truth.tolist(), strict=True):
            if not abs(value - want) <= 1e-6 * want:
                raise CheckFailed(f"{name} of rank {rank}: expected {want:.6g}, got {value:.6g}")


def check_traffic(case: Case) -> None:
    most = wire_bytes("all_reduce", NUM_BYTES.nbytes, case.size)
    for rank, sent in enumerate(case.sent):
        num_bytes = sum(one.num_bytes for one in sent)
        if len(sent) != 1 or num_bytes > most:
            raise CheckFailed(
                f"rank {rank} called {len(sent)} collectives of {num_bytes} bytes; expected one "
                f"of {most} bytes, an all-reduce of all times at once"
            )


def solution(num_bytes, seconds, axis):
    seconds = all_reduce(seconds, axis, "min")  # the last to call waited for nobody
    rounds = 2 * (axis.size - 1)
    dx, dy = num_bytes - num_bytes.mean(), seconds - seconds.mean()
    slope = (dx * dy).sum() / (dx * dx).sum()
    at_zero = seconds.mean() - slope * num_bytes.mean()
    return at_zero / rounds, rounds / axis.size / slope


@fails(
    "result",
    "Fitted to this rank's own times, which hold waits: take the least over the ranks.",
)
def wrong_trusts_its_own_stopwatch(num_bytes, seconds, axis):
    """Sends nothing."""
    rounds = 2 * (axis.size - 1)
    columns = torch.stack([rounds * torch.ones_like(num_bytes), rounds / axis.size * num_bytes], 1)
    latency, inverse = torch.linalg.lstsq(columns, seconds[:, None]).solution.flatten()
    return latency, 1 / inverse


@fails(
    "result",
    "Fitted to the longest times, which hold waits: take the least over the ranks.",
)
def wrong_takes_the_slowest_stopwatch(num_bytes, seconds, axis):
    return wrong_trusts_its_own_stopwatch(num_bytes, all_reduce(seconds, axis, "max"), axis)


@fails(
    "result",
    "The latency is that of all 2(n-1) rounds: alpha belongs to one.",
)
def wrong_forgets_the_rounds(num_bytes, seconds, axis):
    latency, bandwidth = solution(num_bytes, seconds, axis)
    return 2 * (axis.size - 1) * latency, bandwidth


@fails(
    "traffic",
    "One call for each time: send all times in one tensor.",
)
def wrong_sends_each_time_alone(num_bytes, seconds, axis):
    seconds = torch.cat([all_reduce(one, axis, "min") for one in seconds.split(1)])
    rounds = 2 * (axis.size - 1)
    columns = torch.stack([rounds * torch.ones_like(num_bytes), rounds / axis.size * num_bytes], 1)
    latency, inverse = torch.linalg.lstsq(columns, seconds[:, None]).solution.flatten()
    return latency, 1 / inverse


@fails(
    "result",
    "Fitted to the mean of the ranks' times, which hold waits: take the least over the ranks.",
)
def wrong_takes_the_mean_stopwatch(num_bytes, seconds, axis):
    return wrong_trusts_its_own_stopwatch(num_bytes, all_reduce(seconds, axis, "avg"), axis)


@fails(
    "result",
    "This is the inverse: seconds per byte, where bytes per second are asked for.",
)
def wrong_inverts_the_bandwidth(num_bytes, seconds, axis):
    latency, bandwidth = solution(num_bytes, seconds, axis)
    return latency, 1 / bandwidth


@fails(
    "result",
    "Each of the 2(n-1) rounds carries N/n bytes: the slope is 2(n-1) / (n beta).",
)
def wrong_takes_the_slope_for_all_bytes(num_bytes, seconds, axis):
    latency, bandwidth = solution(num_bytes, seconds, axis)
    return latency, bandwidth * axis.size / (2 * (axis.size - 1))


@fails(
    "result",
    "The two are exchanged: return latency, then bandwidth.",
)
def wrong_exchanges_the_two(num_bytes, seconds, axis):
    return solution(num_bytes, seconds, axis)[::-1]
