"""Pipeline schedules as data: who runs forward and backward of which microbatch, in which order.

Idea:   Cut the model into stages, the batch into microbatches. A schedule is one list of actions
        per rank: `2F0` is stage 2, forward, microbatch 0. It can be printed, checked (`checks.py`),
        timed and drawn (`simulate.py`) before any process starts. No torch in this file.
Kinds:  F forward; B full backward; I and W its two halves: the gradient of the input, which the
        stage before waits for, and of the weights, which no rank waits for (`actions.py`).
Scores: Every schedule here is a *score*: phases `(times, "F B")`, from which `compose` makes rows.
        A letter takes the next microbatch of its queue; if that queue is empty, it does nothing. So
        two phases give warm-up, steady state and cool-down for any number of microbatches.

Shapes: p ranks, M microbatches, v stages per rank, S = p v stages, r rank. Bubbles below are idle
        time per rank, for equal stages, M >= p (V shapes: M >= 2p; zb_h2: M >= 2p-1) and free
        messages; F, B, I, W are times of a whole rank's share of the model, and B = I + W. `live`
        counts microbatches held by a stage, from F to the end of B or W; one costs 1/v of a share.
        Rows from zb_h1 on hold for W <= F and W <= I; the last three for F = I = W, and even M for
        dualpipe. zb_h2 and zb_v count from a rank's own first action to its last, as their papers
        do. DeepSeek's (p/2-1)(F&B + B - 3W) for DualPipe takes a pair of F and B for one piece;
        here the result of F leaves at once, which idles less.

    schedule           bubble               live on rank r                 source
    naive              M (p-1)(F+B)         1
    gpipe              (p-1)(F+B)           M                              1811.06965
    1f1b               (p-1)(F+B)           p-r                            2006.09503
    eager_1f1b         (p-1)(F+B)           2(p-r)-1                       2211.05322
    interleaved_1f1b   (p-1)(F+B)/v         (v-1)p + 2(p-r)-1              2104.04473, 2.2
    looped_bfs         (p-1)(F+B)/v         v M                            2211.05953
    zb_h1              (p-1)(F+I-W)         p                              2401.10241, 2.1
    zb_h2              (p-1)(F+I-2W)        2p-1                           2401.10241, 2.2
    interleaved_zb     (p-1)(F+I-W)/v       v p                            2401.10241
    zb_v               0                    2p                             2405.15362
    dualpipe_v         (p-1)(F+I-W)/2       2p+1                           2412.19437, 3.2.1
    dualpipe           (p/2-1)(F+I-W)       p+1                            2412.19437, 3.2.1
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from minipar.comm.plans import cut
from minipar.parallel.pipeline.actions import Action, Schedule

Phase = tuple[int, str]
"""(times, letters): `(3, "F B")` plays forward and backward in turn, three times."""
Queues = Mapping[str, Sequence[tuple[int, int]]]
"""Queues by letter: `{"F": [(stage, microbatch), ...], "B": ...}`; I draws from the queue of B."""
Score = Callable[[int], Sequence[Phase]]
"""The phases of a rank."""


# ---------------------------------------------------------------------- the one mechanism
def play(score: Sequence[Phase], queues: Queues) -> tuple[Action, ...]:
    """Return the actions of one rank.

    Letter F or B takes the next (stage, microbatch) of its queue. I takes the next of B and owes
    its weight gradient; W does the oldest one owed. A letter with an empty queue is silent. Queues
    may be numbered: F0, B1 and I1. Weight gradients still owed at the end of the score come last.
    """
    waiting = {letter: deque(items) for letter, items in queues.items()}
    owed: deque[tuple[int, int]] = deque()
    actions = []
    for letter in (letter for times, bar in score for letter in times * bar.split()):
        kind = letter[0]
        queue = owed if kind == "W" else waiting[letter.replace("I", "B")]
        if not queue:
            continue
        stage, microbatch = queue.popleft()
        actions.append(Action(stage, kind, microbatch))
        if kind == "I":
            owed.append((stage, microbatch))
    assert not any(waiting.values()), f"the score leaves {waiting} unplayed"
    return tuple(actions) + tuple(Action(stage, "W", microbatch) for stage, microbatch in owed)


def compose(
    name: str,
    rank_of: Sequence[int],
    num_microbatches: int,
    score: Score,
    queues: Callable[[list[int]], Queues],
) -> Schedule:
    """Make a schedule from the `score` of each rank and the `queues` of its stages."""
    bare = Schedule(name, num_microbatches, tuple(rank_of), actions=())
    rows = (play(score(r), queues(bare.stages_on(r))) for r in range(max(rank_of) + 1))
    return replace(bare, actions=tuple(rows))


def _looped(
    name: str, p: int, m: int, score: Score, v: int = 1, rounds: Sequence[range] = ()
) -> Schedule:
    """Make a schedule of stages that go round v times: rank 0 has stages 0, p, 2p ...

    All microbatches of a round go through a rank's first stage, then its second ...; B in reverse.
    """
    rounds = rounds or [range(m)]

    def queues(stages: list[int]) -> Queues:
        return {
            "F": [(s, i) for each in rounds for s in stages for i in each],
            "B": [(s, i) for each in rounds for s in stages[::-1] for i in each],
        }

    return compose(name, [stage % p for stage in range(p * v)], m, score, queues)


# ---------------------------------------------------------------------- one stage per rank
def naive(p: int, m: int) -> Schedule:
    """Model parallelism without a pipeline: a microbatch goes down and up before the next starts.

    All ranks but one are idle at any time.
    """
    return _looped("naive", p, m, lambda r: [(m, "F B")])


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards: little idle, but every activation is held. 1811.06965."""
    return _looped("gpipe", p, m, lambda r: [(m, "F"), (m, "B")])


def one_f_one_b(p: int, m: int) -> Schedule:
    """GPipe's bubble with at most p activations: backward as early as possible. 2006.09503.

    Rank r starts with p-1-r forwards, as many as there are stages after it.
    """
    return _looped("1f1b", p, m, lambda r: [(p - 1 - r, "F"), (m, "F B")])


def eager_1f1b(p: int, m: int) -> Schedule:
    """1F1B with twice the warm-up: messages have time to travel while a rank computes. 2211.05322.

    It costs memory, and helps if a message takes up to as long as a forward.
    """
    return _looped("eager_1f1b", p, m, lambda r: [(2 * (p - 1 - r), "F"), (m, "F B")])


def zb_h1(p: int, m: int) -> Schedule:
    """A third of 1F1B's bubble in its memory: weight gradients fill the cool-down. 2401.10241, 2.1.

    Rank r puts off r weight gradients, so that every rank holds p activations, as rank 0 must.
    """
    return _looped("zb_h1", p, m, lambda r: [(p - 1 - r, "F"), (r, "F I"), (m, "F I W")])


def zb_h2(p: int, m: int) -> Schedule:
    """No bubble between a rank's first and last action where F = I = W. 2401.10241, 2.2.

    A rank starts r F later than rank 0 and ends as much later; a step that waits for all ranks
    still waits for (p-1) F. The paper therefore lets ranks start the optimizer on their own.
    Wants m >= 2p - 1.
    """
    return _looped("zb_h2", p, m, lambda r: [(2 * (p - 1 - r), "F"), (2 * r, "F I"), (m, "F I W")])


# ---------------------------------------------------------------------- v stages per rank
def _rounds(p: int, m: int) -> list[range]:
    """Cut microbatches into rounds of p, or a few more if p does not divide m; one if m < p."""
    return [range(*span) for span in cut((0, m), max(1, m // p))]


def interleaved_1f1b(p: int, m: int, v: int = 2) -> Schedule:
    """Rounds of p microbatches visit the v stages of a rank in turn: bubble / v. 2104.04473, 2.2.

    v times the messages. Rounds grow a little where p does not divide m, as the paper wants.
    """
    rounds = _rounds(p, m)
    most = (v - 1) * len(rounds[0]) + 2 * (p - 1)
    return _looped(
        "interleaved_1f1b", p, m, lambda r: [(most - 2 * r, "F"), (m * v, "F B")], v, rounds
    )


def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """GPipe with v stages per rank, all microbatches through one before the next. 2211.05953.

    A stage's weights are needed for one stretch of time only, which suits sharded data parallelism.
    """
    return _looped("looped_bfs", p, m, lambda r: [(m * v, "F"), (m * v, "B")], v)


def interleaved_zb(p: int, m: int, v: int = 2) -> Schedule:
    """ZB-H1 with v stages per rank: ZB-1P, interleaved. 2401.10241."""
    rounds = _rounds(p, m)
    most = (v - 1) * len(rounds[0]) + p - 1
    return _looped(
        "interleaved_zb", p, m, lambda r: [(most - r, "F"), (r, "F I"), (m * v, "F I W")], v, rounds
    )


# ---------------------------------------------------------------------- two stages per rank, as a V
def _v_shape(name: str, p: int, m: int, score: Score, copies: int = 1) -> Schedule:
    """Stages run down the ranks and up again: rank 0 has the first and the last one.

    So the loss is where the input is, and a microbatch turns around without a message. With two
    copies, one runs down and one up: even microbatches go through the first, odd ones the second.
    """

    def queues(stages: list[int]) -> Queues:
        chunks = [(stage, range(c % copies, m, copies)) for c, stage in enumerate(stages)]
        if copies == 2 and stages[0] >= p // 2:  # this rank is nearer to where odd ones enter
            chunks.reverse()
        return {
            f"{kind}{chunk}": [(stage, i) for i in microbatches]
            for chunk, (stage, microbatches) in enumerate(chunks)
            for kind in "FB"
        }

    layout = [*range(p), *reversed(range(p))]
    return replace(compose(name, layout, m, score, queues), copies=copies)


def zb_v(p: int, m: int) -> Schedule:
    """No bubble in 1F1B's memory where F = I = W: ZB-V. 2405.15362.

    Scores of V shapes are written for m >= 2p - 1; of fewer microbatches, some letters are silent.
    """
    n = max(m, 2 * p - 1)
    return _v_shape(
        "zb_v",
        p,
        m,
        lambda r: [
            (2 * (p - r) - 1, "F0"),
            (r, "F1 F0"),
            (p - r, "F1 I1 W"),
            (n - 2 * p + r + 1, "F0 I0 W F1 I1 W"),
            (p - r - 1, "I0 W F1 I1 W"),
            (r, "I0 I1"),
            (p - r, "I0 W"),
        ],
    )


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe cut in half: one copy of the model, two stages per rank. 2412.19437, 3.2.1.

    Forward of one chunk stands beside the backward of the other, so that the all-to-alls of a
    mixture of experts in one may hide behind the computing of the other.
    """
    return _v_shape("dualpipe_v", p, m, lambda r: _dualpipe_score(p, m, r))


def dualpipe(p: int, m: int) -> Schedule:
    """Microbatches enter at both ends of two copies of the model. 2412.19437, 3.2.1.

    Two DualPipeVs that face each other: where a microbatch would turn around, it goes on into the
    other half. Even microbatches go down the ranks, odd ones up. Raises ValueError for an odd p.
    """
    if p % 2:
        near = f"{p - 1} or {p + 1}" if p > 1 else "2"
        raise ValueError(f"p={p}: the halves of a dualpipe face each other; use an even p: {near}")

    def score(r: int) -> list[Phase]:
        return _dualpipe_score(p // 2, (m + 1) // 2, min(r, p - 1 - r))

    return _v_shape("dualpipe", p, m, score, copies=2)


def _dualpipe_score(p: int, m: int, r: int) -> list[Phase]:
    n = max(m, 2 * p)
    split, odd = divmod(r + 1, 2)
    return [
        (2 * (p - 1 - r), "F0"),
        (r + 1, "F0 F1"),
        (p - 1 - r, "I1 W F1"),
        (n - 2 * p + r + 1, "F0 B1 F1 B0"),
        (p - 1 - r, "B1 F1 B0"),
        (split, "B1 B0"),  # from here on weight gradients are put off ...
        (odd, "B1 I0"),
        (split, "I1 I0"),
        (p - 1 - r, "W I0"),  # ... to where nothing else is left to do
    ]


# ---------------------------------------------------------------------- by name
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
}
"""Every schedule: a function of p ranks and m microbatches; the LOOPED ones also of v."""
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zb")
PAIRED = ("dualpipe", "dualpipe_v")
"""Those whose F and B in a row are meant to run side by side: `actions.slots`."""


@cache
def make(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Make the schedule `name` for p ranks, m microbatches and, for LOOPED ones, v stages per rank.

    Raises ValueError for an unknown name, and for a v that the schedule does not have.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    for what, count in (("p", p), ("m", m), ("v", 2 if v is None else v)):
        if count < 1:
            raise ValueError(f"{what}={count}; a pipeline has at least 1")
    if name in LOOPED:
        return SCHEDULES[name](p, m, 2 if v is None else v)
    schedule = SCHEDULES[name](p, m)
    has = len(schedule.stages_on(0)) // schedule.copies
    if v not in (None, has):
        raise ValueError(f"v={v}: {name} has v={has}; use v={has}, or one of {', '.join(LOOPED)}")
    return schedule
