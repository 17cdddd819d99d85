"""The last backward: pipeline and data parallelism together.

Every stage has copies on other ranks, whose gradients have to be added up. The gradient of a stage
is complete when its last B or W has run, which is at another moment for each stage. Sent earlier
it is a part; sent at the end of the step, the cool-down could have hidden it, and did not.
Source: Narayanan et al. 2021 (2104.04473), section 3; Li et al. 2020 (2006.15704), section 3.2.4.
"""

import time

import torch
import torch.distributed as dist

from minipar.comm.collectives import wire_bytes
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails
from minipar.parallel.pipeline.actions import Action
from minipar.parallel.pipeline.schedules import interleaved_zb

LEVEL, MINUTES = "medium", 20
GOOD = "one all-reduce per stage, started right after its last gradient, waited for at the end"
PRAISE = "What the cool-down hides costs nothing. Many a trainer is off by one microbatch here."
SIZES = (2,)

WIDTH = 6
SLOW = Link("slow", latency=0.02, bandwidth=1e9)  # far longer than what is computed meanwhile


def given(size, random):
    """The same row of actions for each replica, and other gradients: per stage [M, WIDTH]."""
    p, m = 3, int(torch.randint(3, 7, (), generator=random))
    rank = int(torch.randint(p, (), generator=random))
    schedule = interleaved_zb(p, m)
    row = [str(action) for action in schedule.actions[rank]]

    def parts():
        return torch.randn(m, WIDTH, generator=random, dtype=torch.float64)

    return [(row, {stage: parts() for stage in schedule.stages_on(rank)}) for _ in range(size)]


def run(answer, axis, row, parts):
    """Return gradients, when which action began, each all-reduce was called, and waited for."""
    gradients = {stage: torch.zeros(WIDTH, dtype=torch.float64) for stage in parts}
    began, calls = [], []

    def compute(action):
        began.append((time.monotonic(), str(action)))
        parsed = Action.parse(str(action))
        if parsed.kind in "BW":
            gradients[parsed.stage] += parts[parsed.stage][parsed.microbatch]

    def note(work):
        if work.verb == "all_reduce":
            calls.append((work.t_issue, work.waits))

    link.use(SLOW)
    link.observers.append(note)
    try:
        answer(list(row), compute, gradients, axis)
        dist.barrier(axis.group)
    finally:
        link.observers.remove(note)
    return list(gradients.values()), began, sorted(calls)


def check_row(case: Case) -> None:
    for rank, ((row, _), (_, began, _)) in enumerate(zip(case.given, case.results, strict=True)):
        ran = [action for _, action in began]
        if ran != row:
            raise CheckFailed(
                f"rank {rank} ran\n    {' '.join(ran)}\nexpected\n    {' '.join(row)}"
            )


def check_result(case: Case) -> None:
    sums = []
    for stage in case.given[0][1]:
        sums.append(sum(parts[stage].sum(0) for _, parts in case.given))
    got = [gradients for gradients, _, _ in case.results]
    Case(case.size, case.given, got, case.sent).expect_close([sums] * case.size, "gradient")


def check_traffic(case: Case) -> None:
    num_bytes = wire_bytes("all_reduce", 8 * WIDTH, case.size)
    for rank in range(case.size):
        case.expect_sent(rank, [Sent("all_reduce", num_bytes)] * len(case.given[rank][1]))


def _moments(case: Case):
    """Per rank and stage: its last gradient, the action after it and when that began, the call."""
    for rank, ((row, parts), (_, began, calls)) in enumerate(
        zip(case.given, case.results, strict=True)
    ):
        last = [
            max(k for k, a in enumerate(row) if Action.parse(a).kind == "W" and stage == _stage(a))
            for stage in parts
        ]
        for at, call in zip(sorted(last), calls, strict=True):
            after = began[at + 1] if at + 1 < len(row) else (float("inf"), "")
            yield rank, row[at], after, call


def _stage(action):
    return Action.parse(action).stage


def check_moment(case: Case) -> None:
    for rank, final, (start, action), (called, _) in _moments(case):
        if called > start:
            raise CheckFailed(
                f"rank {rank}: the gradient of stage {_stage(final)} was complete after {final}, "
                f"but {action} began before it was sent"
            )


def check_asynchronous(case: Case) -> None:
    for rank, final, (start, action), (_, waits) in _moments(case):
        if action and any(at < start for at in waits):
            raise CheckFailed(
                f"rank {rank} waited for the all-reduce after {final} before {action} began: "
                "a call that waits stops the pipeline"
            )


def solution(row, compute, gradients, axis):
    last = {}
    for at, action in enumerate(row):
        if "B" in action or "W" in action:
            last[_stage_of(action)] = at
    works = []
    for at, action in enumerate(row):
        compute(action)
        stage = _stage_of(action)
        if last[stage] == at:
            works.append(dist.all_reduce(gradients[stage], group=axis.group, async_op=True))
    for work in works:
        work.wait()


def _stage_of(action):
    for kind in "FBIW":
        action = action.split(kind)[0]
    return int(action)


@fails(
    "result",
    "Gradients are those of one rank: nothing was sent.",
)
def wrong_sends_nothing(row, compute, gradients, axis):
    for action in row:
        compute(action)


@fails(
    "row",
    "compute was not called for the row.",
)
def wrong_runs_nothing(row, compute, gradients, axis):
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=axis.group)


@fails(
    "result",
    "Sent after the last I: a gradient is complete after the last B or W.",
)
def wrong_takes_the_last_i_for_the_end(row, compute, gradients, axis):
    """The stage before has its gradient then; the weights of this one still wait for W."""
    last = {_stage_of(action): at for at, action in enumerate(row) if "I" in action}
    _send_at(last, row, compute, gradients, axis)


@fails(
    "result",
    "What was summed is summed again with each W: once per stage.",
)
def wrong_sums_again_and_again(row, compute, gradients, axis):
    """What was added up already is added up once more with the next microbatch."""
    for action in row:
        compute(action)
        if "W" in action:
            dist.all_reduce(gradients[_stage_of(action)], group=axis.group)


@fails(
    "run",
    "The gradient still grows while it travels: send it once, after its last B or W.",
)
def wrong_sends_while_it_grows(row, compute, gradients, axis):
    works = []
    for action in row:
        compute(action)
        if "W" in action:
            gradient = gradients[_stage_of(action)]
            works.append(dist.all_reduce(gradient, group=axis.group, async_op=True))
    for work in works:
        work.wait()


@fails(
    "traffic",
    "One call per microbatch: one per stage, after its last gradient.",
)
def wrong_sends_every_microbatch(row, compute, gradients, axis):
    total = {stage: torch.zeros_like(gradient) for stage, gradient in gradients.items()}
    for action in row:
        compute(action)
        if "W" in action:
            stage = _stage_of(action)
            dist.all_reduce(gradients[stage], group=axis.group)
            total[stage] += gradients[stage]
            gradients[stage].zero_()
    for stage, gradient in gradients.items():
        gradient.copy_(total[stage])


@fails(
    "moment",
    "All calls come at the end of the row: each right after its last gradient.",
)
def wrong_sends_at_the_end(row, compute, gradients, axis):
    for action in row:
        compute(action)
    works = [
        dist.all_reduce(gradient, group=axis.group, async_op=True)
        for gradient in gradients.values()
    ]
    for work in works:
        work.wait()


@fails(
    "asynchronous",
    "Each call is waited for at once: keep the works, and wait at the end.",
)
def wrong_waits_at_once(row, compute, gradients, axis):
    last = {_stage_of(action): at for at, action in enumerate(row) if "W" in action}
    _send_at(last, row, compute, gradients, axis)


def _send_at(last, row, compute, gradients, axis):
    for at, action in enumerate(row):
        compute(action)
        if last[_stage_of(action)] == at:
            dist.all_reduce(gradients[_stage_of(action)], group=axis.group)


@fails(
    "result",
    "The gradients were averaged: asked is their sum over the ranks.",
)
def wrong_averages(row, compute, gradients, axis):
    solution(row, compute, gradients, axis)
    for gradient in gradients.values():
        gradient /= axis.size
