"""Your own schedule: less idle than 1F1B, in its memory.

The answer is data. It is checked and timed on paper first, and then it trains: four ranks run it
action by action, and the gradients of all stages have to be those of one device.
Sources: Qi et al. 2023 (2401.10241) and 2024 (2405.15362).
"""

import re

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.lab.cases import calls_of
from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.checks import peak_live, validate
from minipar.parallel.pipeline.schedules import SCHEDULES, compose, one_f_one_b
from minipar.parallel.pipeline.simulate import lower, simulate

LEVEL, MINUTES = "hard", 40
GOOD = "right, your own, with p microbatches of a rank's share and half of 1F1B's bubble at most"
PRAISE = "You have made a schedule, proved it on paper, and run it."
SIZES = (4,)

M, BATCH, WIDTH, STAGES = 8, 2, 5, 8


def given(size, random):
    """The same model and data for all ranks: [STAGES, D, D] weights, [M, BATCH, D] x and y."""

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    data = draw(STAGES, WIDTH, WIDTH), draw(M, BATCH, WIDTH), draw(M, BATCH, WIDTH)
    return [data] * size


def run(answer, axis, weights, x, y):
    """Return the schedule, which check refuses it and why, and the gradients of this rank."""
    start = {"naive", "gpipe", "1f1b"}  # may be taken: they fail check_bubble as they are
    with calls_of(*(make for name, make in SCHEDULES.items() if name not in start)) as taken:
        text = answer(axis.size, M)
    text = text.as_text() if isinstance(text, Schedule) else text
    if not isinstance(text, str):
        return repr(text), "valid", f"expected the text of a schedule, got {text!r}", {}
    if taken:
        return text, "own", f"your own, please: not by {', '.join(sorted(taken))}", {}
    try:
        schedule = Schedule.parse(text)
        validate(schedule)
        _check_form(schedule, axis.size)
    except (ValueError, AttributeError) as error:
        return str(text), "valid", str(error), {}
    if _held(schedule) > axis.size or _seconds(schedule) > _half(axis.size):
        return text, "", "", {}  # the checks say why; it need not run
    return text, "", "", execute(lower(schedule), weights, x, y, axis)


def _check_form(schedule: Schedule, p: int) -> None:
    if schedule.num_ranks != p or schedule.num_microbatches != M or schedule.copies != 1:
        raise ValueError(f"it has to be for {p} ranks, {M} microbatches and one copy of the model")
    if schedule.num_stages not in (p, 2 * p):
        raise ValueError(f"{schedule.num_stages} stages; cut the model into {p} or {2 * p}")


def _held(schedule: Schedule) -> float:
    """In microbatches of a rank's share of the model."""
    return max(peak_live(schedule)) * schedule.num_ranks / schedule.num_stages


def _seconds(schedule: Schedule) -> float:
    """Of a step, where F, I and W of a rank's whole share of the model take 1 s each."""
    return simulate(schedule).duration


def _half(p: int) -> float:
    """Seconds of a step with half of 1F1B's bubble, which is 3 (p - 1)."""
    return 3 * M + 3 * (p - 1) / 2


def execute(schedule: Schedule, weights: Tensor, x: Tensor, y: Tensor, axis) -> dict[int, Tensor]:
    """Run the actions of this rank; stage s is tanh(h @ weights[s].T). Returns its gradients.

    The loss of a microbatch is half of the sum of squared differences to y.
    """
    last, home = schedule.num_stages - 1, schedule.rank_of
    inputs = {(0, i): x[i] for i in range(M)}  # and what else goes into F of (stage, microbatch)
    outputs, coming, behind = {}, {}, {}  # of F; gradients that come in; those before tanh
    total = {s: torch.zeros_like(weights[s]) for s in schedule.stages_on(axis.rank)}
    for action in schedule.actions[axis.rank]:
        at = s, i = action.stage, action.microbatch
        if action.kind in ("RF", "RB"):
            data = torch.empty_like(x[0])
            dist.recv(data, group=axis.group, group_src=schedule.peer(action))
            (inputs if action.kind == "RF" else coming)[at] = data
        elif action.kind == "SF":
            dist.send(outputs[at], group=axis.group, group_dst=schedule.peer(action))
        elif action.kind == "SB":
            data = (behind[at] @ weights[s]).contiguous()
            dist.send(data, group=axis.group, group_dst=schedule.peer(action))
        elif action.kind == "F":
            outputs[at] = torch.tanh(inputs[at] @ weights[s].T)
            if s == last:
                coming[at] = outputs[at] - y[i]
            elif home[s + 1] == axis.rank:
                inputs[s + 1, i] = outputs[at]
        if action.kind in ("B", "I"):
            behind[at] = coming.pop(at) * (1 - outputs[at] ** 2)
            if s and home[s - 1] == axis.rank:
                coming[s - 1, i] = behind[at] @ weights[s]
        if action.kind in ("B", "W"):
            total[s] += behind[at].T @ inputs[at]
    return total


def _told(case: Case, criterion: str) -> None:
    for rank, (_, found, message, _) in enumerate(case.results):
        if found == criterion:
            raise CheckFailed(f"rank {rank}: {message}")


def check_own(case: Case) -> None:
    _told(case, "own")


def check_valid(case: Case) -> None:
    _told(case, "valid")
    if len({text for text, *_ in case.results}) > 1:
        raise CheckFailed("the ranks made different schedules; all have to make the same one")


def check_memory(case: Case) -> None:
    schedule = Schedule.parse(case.results[0][0])
    if _held(schedule) > case.size:
        raise CheckFailed(
            f"a rank holds {_held(schedule):g} microbatches of its share of the model; "
            f"1F1B needs {case.size}"
        )


def check_bubble(case: Case) -> None:
    took, most = _seconds(Schedule.parse(case.results[0][0])), _half(case.size)
    if took > most:
        raise CheckFailed(
            f"with F = I = W = 1 the step takes {took:g}, {took - 3 * M:g} of it bubble; "
            f"that of 1F1B is {3 * (case.size - 1)}, so {most:g} would be enough"
        )


def bonus_shorter_than_zb_h1(case: Case) -> None:
    took, other = _seconds(Schedule.parse(case.results[0][0])), 3 * M + case.size - 1
    if took >= other:
        raise CheckFailed(
            f"with F = I = W = 1 the step takes {took:g}; ZB-H1 takes {other}, and {3 * M} would "
            "be no bubble at all"
        )


def check_gradients(case: Case) -> None:
    weights, x, y = case.given[0]
    schedule = Schedule.parse(case.results[0][0])
    weights = weights[: schedule.num_stages].clone().requires_grad_()
    h = x
    for weight in weights:
        h = torch.tanh(h @ weight.T)
    (h - y).square().sum().div(2).backward()
    want = [[weights.grad[s] for s in schedule.stages_on(rank)] for rank in range(case.size)]
    got = [list(gradients.values()) for *_, gradients in case.results]
    Case(case.size, case.given, got, case.sent).expect_close(want, "gradient")


def solution(p, m):
    """ZB-H1: like 1F1B, with I in place of B, and a W for every forward beyond what fits."""
    lines = [f"mine: microbatches {m}; stages on ranks {' '.join(map(str, range(p)))}"]
    for rank in range(p):
        row = [f"{rank}F{i}" for i in range(p - 1 - rank)]
        for i in range(m):
            if i + p - 1 - rank < m:
                row.append(f"{rank}F{i + p - 1 - rank}")
            row.append(f"{rank}I{i}")
            if i >= rank:
                row.append(f"{rank}W{i - rank}")
        row += [f"{rank}W{i}" for i in range(m - rank, m)]
        lines.append(f"rank {rank}: {' '.join(row)}")
    return "\n".join(lines)


def solution_bonus(p, m):
    """The same with two stages per rank, each half as long: half of the bubble."""

    def queues(stages):
        rounds = [range(first, first + p) for first in range(0, m, p)]
        return {
            "F": [(s, i) for part in rounds for s in stages for i in part],
            "B": [(s, i) for part in rounds for s in stages[::-1] for i in part],
        }

    return compose(
        "mine",
        [*range(p), *range(p)],
        m,
        lambda rank: [(2 * p - 1 - rank, "F"), (rank, "F I"), (2 * m, "F I W")],
        queues,
    )


@fails(
    "valid",
    "The text is empty.",
)
def wrong_says_nothing(p, m):
    return ""


@fails(
    "own",
    "This one is made by the library.",
)
def wrong_takes_one_from_the_shelf(p, m):
    return SCHEDULES["zb_h1"](p, m)


@fails(
    "valid",
    "A W is missing: a stage would step with a part of its gradient.",
)
def wrong_forgets_a_weight_gradient(p, m):
    """The step is a little shorter, and trains on a part of the gradient."""
    return solution(p, m).removesuffix(f" {p - 1}W{m - 1}")


@fails(
    "valid",
    "A backward stands before what it needs, so all ranks wait.",
)
def wrong_goes_backward_before_there_is_anything(p, m):
    return solution(p, m).replace("0F0 0F1 0F2 0F3 0I0", "0F0 0F1 0I0 0F2 0F3")


@fails(
    "memory",
    "All forwards come first, so that all microbatches are held.",
)
def wrong_holds_all_microbatches(p, m):
    lines = [f"mine: microbatches {m}; stages on ranks {' '.join(map(str, range(p)))}"]
    for rank in range(p):
        row = [f"{rank}{kind}{i}" for kind in "FIW" for i in range(m)]
        lines.append(f"rank {rank}: {' '.join(row)}")
    return "\n".join(lines)


@fails(
    "bubble",
    "As long as 1F1B itself: split B into I and W, and move a W.",
)
def wrong_is_1f1b(p, m):
    """It may be a start, and is not enough."""
    return one_f_one_b(p, m)


@fails(
    "bubble",
    "Gradients leave earlier, but W stands where B stood: no gap is filled yet.",
)
def wrong_splits_in_place(p, m):
    """A third of the bubble is gone, since nobody waits for a W."""
    return re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", one_f_one_b(p, m).as_text())
