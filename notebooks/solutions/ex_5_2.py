"""The same skip decision on all ranks, whoever has overflowed.

Where gradients are sharded, each rank sees only its own piece. If one of them finds an infinity and
leaves the step out, while the others take it, the pieces of the model no longer belong together.
One number from every rank, and the largest of them for all: that is enough.
Source: Narayanan et al. 2104.04473 train so; Micikevicius et al. 1710.03740, section 3.2.
"""

import torch

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "easy", 15
GOOD = "all ranks return the same, right decision, for one all-reduce of one number per step"
PRAISE = "The skip decision costs one number, under every sharding."
SIZES = (4, 3)

PIECES = 3


def given(size, random):
    """For each rank, its pieces in each of several steps, and the scale: [steps][pieces]."""
    scale = 2.0 ** int(torch.randint(1, 5, (), generator=random))
    ranks = [[] for _ in range(size)]

    def step(bad=()):
        for rank in range(size):
            shapes = [(5,), (2, 3), (0,)]  # the last piece of a shard may be empty
            ranks[rank].append([torch.randn(s, generator=random) for s in shapes])
        for rank, value in bad:
            ranks[rank][-1][1][1, 2] = value

    def large():
        """All finite; their sum is not, whether divided by the scale or not."""
        for rank in range(size):
            ranks[rank].append([torch.full(s, 3e38) for s in [(5,), (2, 3), (0,)]])

    one, other = torch.randperm(size, generator=random)[:2].tolist()
    infinity, nan = float("inf"), float("nan")
    for bad in (
        [],
        [(one, infinity)],
        [(other, nan)],
        [(one, infinity), (other, -infinity)],
    ):
        step(bad)
    large()
    step([(size - 1, -infinity)])
    return [(steps, scale) for steps in ranks]


def run(answer, axis, steps, scale):
    decisions = []
    for grads in steps:
        said = answer(grads, scale, axis)
        decisions.append(None if said is None else bool(said))
    return decisions, steps


def check_decision(case: Case) -> None:
    steps = [mine for mine, _ in case.given]
    for step in range(len(steps[0])):
        want = any(not g.isfinite().all() for mine in steps for g in mine[step])
        for rank in range(case.size):
            got = case.results[rank][0][step]
            if got != want:
                own = any(not g.isfinite().all() for g in steps[rank][step])
                raise CheckFailed(
                    f"step {step}: rank {rank} says {got}, expected {want} (its own gradients "
                    f"{'did' if own else 'did not'} overflow)"
                )


def check_division(case: Case) -> None:
    for rank, (mine, scale) in enumerate(case.given):
        for step, grads in enumerate(mine):
            for got, was in zip(case.results[rank][1][step], grads, strict=True):
                if not torch.allclose(got, was / scale, rtol=1e-6, equal_nan=True):
                    raise CheckFailed(f"step {step}, rank {rank}: a gradient was not divided")


def check_traffic(case: Case) -> None:
    for rank, sent in enumerate(case.sent):
        steps = len(case.given[rank][0])
        num_bytes = sum(one.num_bytes for one in sent)
        most = steps * wire_bytes("all_reduce", 8, case.size)
        if len(sent) != steps or num_bytes > most:
            raise CheckFailed(
                f"rank {rank} made {len(sent)} calls and sent {num_bytes} bytes in {steps} steps; "
                f"{steps} calls and {most} bytes are enough"
            )


def solution(grads, scale, axis):
    for grad in grads:
        grad /= scale
    found = torch.tensor([float(any(not grad.isfinite().all() for grad in grads))])
    return all_reduce(found, axis, "max").item() > 0


def _divide(grads, scale):
    for grad in grads:
        grad /= scale
    return torch.tensor([float(any(not grad.isfinite().all() for grad in grads))])


@fails(
    "decision",
    "Each rank decides for itself: all must hear of any overflow.",
)
def wrong_decides_alone(grads, scale, axis):
    return _divide(grads, scale).item() > 0


@fails(
    "decision",
    "Skipped only if all have overflowed: one is enough, so max and not min.",
)
def wrong_waits_for_all(grads, scale, axis):
    """Skips only if everybody has overflowed."""
    return all_reduce(_divide(grads, scale), axis, "min").item() > 0


@fails(
    "decision",
    "A sum of large finite numbers overflowed: ask isfinite of each element.",
)
def wrong_adds_up_values(grads, scale, axis):
    """A sum overflows although none of its parts has."""
    total = sum((grad.sum() for grad in grads), torch.zeros(()))
    _divide(grads, scale)
    return not all_reduce(total[None], axis).isfinite().item()


@fails(
    "division",
    "The gradients are not divided by the scale.",
)
def wrong_forgets_to_divide(grads, scale, axis):
    found = torch.tensor([float(any(not grad.isfinite().all() for grad in grads))])
    return all_reduce(found, axis, "max").item() > 0


@fails(
    "traffic",
    "One call per gradient: one number for all of them is enough.",
)
def wrong_asks_for_every_gradient(grads, scale, axis):
    """The right decision, and a latency per parameter for it."""
    _divide(grads, scale)
    votes = [torch.tensor([float(not grad.isfinite().all())]) for grad in grads]
    return max(all_reduce(vote, axis, "max").item() for vote in votes) > 0


@fails(
    "decision",
    "A sum of large finite numbers overflowed: ask isfinite of each element.",
)
def wrong_adds_up_what_is_divided(grads, scale, axis):
    _divide(grads, scale)
    total = sum((grad.sum() for grad in grads), torch.zeros(()))
    return not all_reduce(total[None], axis).isfinite().item()


@fails(
    "decision",
    "The maximum was not used: all_reduce returns it.",
)
def wrong_drops_the_maximum(grads, scale, axis):
    found = _divide(grads, scale)
    all_reduce(found, axis, "max")
    return found.item() > 0


@fails(
    "decision",
    "Turned round: return True where a step is to be skipped.",
)
def wrong_says_whether_to_step(grads, scale, axis):
    return not solution(grads, scale, axis)
