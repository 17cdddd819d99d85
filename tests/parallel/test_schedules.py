"""Schedules on paper: valid for every p, m and v; formulas of the papers; corruption is refused."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live, validate
from minipar.parallel.pipeline.schedules import LOOPED, SCHEDULES, make
from minipar.parallel.pipeline.simulate import Costs, bubble, lower, simulate

approx = partial(pytest.approx, rel=1e-9, abs=1e-9)
quick = settings(max_examples=40, deadline=None)


@st.composite
def drawn(draw, names=tuple(SCHEDULES), most=12):
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, 6)) if name != "dualpipe" else 2 * draw(st.integers(1, 3))
    v = draw(st.integers(1, 4)) if name in LOOPED else None
    return make(name, p, draw(st.integers(1, most)), v)


def every(p, m):
    names = [name for name in SCHEDULES if name != "dualpipe" or p % 2 == 0]
    return {name: make(name, p, m) for name in names}


# ---------------------------------------------------------------------- actions and text
@quick
@given(drawn(), st.booleans())
def test_text_is_read_back(schedule, with_messages):
    schedule = lower(schedule) if with_messages else schedule
    assert Schedule.parse(schedule.as_text()) == schedule
    for row in schedule.actions:
        assert all(a.twin.twin == a for a in row if not a.computes)


def test_one_f_one_b_by_hand():
    """Catches a warm-up that is one too long or too short, which stays valid but costs memory."""
    assert str(make("1f1b", 3, 4)) == (
        "1f1b: microbatches 4; stages on ranks 0 1 2\n"
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


# ---------------------------------------------------------------------- every schedule is valid
@settings(max_examples=80, deadline=None)
@given(drawn())
def test_any_p_m_and_v_is_valid_with_and_without_messages(schedule):
    """m < p, and m that p does not divide, included. Catches a wrong round or phase length."""
    validate(schedule)
    lowered = lower(schedule)
    validate(lowered)
    assert lowered.without_messages() == schedule


@quick
@given(drawn())
def test_receives_are_posted_ahead_of_need(schedule):
    """Before the action that its rank is busy with when the message departs.

    Catches receives put right before their use, where a rank would wait for every message.
    """
    ends = {span.name: span.end for span in simulate(schedule)}
    for row in lower(schedule).actions:
        for i, action in enumerate(row):
            if action.kind[0] == "R":
                kinds = "F" if action.kind == "RF" else "BI"
                maker = replace(action.twin, kind="F")
                names = [str(replace(maker, kind=kind)) for kind in kinds]
                departs = next(ends[name] for name in names if name in ends)
                after = [a for a in row[i:] if a.computes]
                assert ends[str(after[0])] >= departs
                before = [a for a in row[:i] if a.computes]
                assert all(ends[str(a)] <= departs for a in before)


@quick
@given(drawn())
def test_trap_17_last_gradient_is_each_stages_own(schedule):
    """Synchronising then, and only then, sees the whole gradient. Catches "on the last microbatch
    of the rank", which is early for one of two stages, and `B` where a W comes after."""
    for microbatch in range(schedule.num_microbatches):
        for stage in schedule.path(microbatch):
            row = schedule.actions[schedule.rank_of[stage]]
            last = row.index(schedule.last_gradient(stage))
            assert not any(a.stage == stage and a.kind in "BIW" for a in row[last + 1 :])
            assert row[last].kind in "BW" and row[last].stage == stage


# ---------------------------------------------------------------------- memory
LIVE = {  # microbatches held by the stages of rank r
    "naive": lambda p, m, v, r: 1,
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: p - r,
    "eager_1f1b": lambda p, m, v, r: 2 * (p - r) - 1,
    "interleaved_1f1b": lambda p, m, v, r: (v - 1) * p + 2 * (p - r) - 1,
    "looped_bfs": lambda p, m, v, r: v * m,
    "zb_h1": lambda p, m, v, r: p,
    "zb_h2": lambda p, m, v, r: 2 * p - 1,
    "interleaved_zb": lambda p, m, v, r: v * p,
    "zb_v": lambda p, m, v, r: 2 * p,
    "dualpipe_v": lambda p, m, v, r: 2 * p + 1,
    "dualpipe": lambda p, m, v, r: p + 1,
}


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_is_what_the_docstring_says(name, p):
    """On every rank, with many microbatches; and no more with fewer."""
    for m in (4 * p, p, 1):
        for r, held in enumerate(peak_live(make(name, p, m))):
            bound = LIVE[name](p, m, 2, r)
            assert held == bound if m == 4 * p else held <= bound


# ---------------------------------------------------------------------- time
FORMULAS = {  # idle seconds per rank, from f, i, w: F, I, W of a rank's whole share; B = I + W
    "naive": lambda p, m, v, f, i, w: m * (p - 1) * (f + i + w),
    "gpipe": lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    "eager_1f1b": lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    "interleaved_1f1b": lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v,
    "looped_bfs": lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v,
    "zb_h1": lambda p, m, v, f, i, w: (p - 1) * (f + i - w),
    "interleaved_zb": lambda p, m, v, f, i, w: (p - 1) * (f + i - w) / v,
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(1, 3),
    st.floats(0.5, 2),
    st.floats(0.5, 2),
    st.floats(0.1, 1),
)
def test_bubbles_by_the_formula(name, p, more, v, forward, inputs, share):
    """Formulas of the papers (module docstring), for any costs with W <= F, I and any m >= p.

    Catches an order that waits once too often, and costs that forget v or a part of B.
    """
    v = v if name in LOOPED else 1
    m = p + more if name not in LOOPED else p * (1 + more % 3)
    weights = share * min(forward, inputs)
    schedule = make(name, p, m, v if name in LOOPED else None)
    costs = Costs(forward, inputs, weights)
    expected = FORMULAS[name](p, m, v, forward, inputs, weights)
    found = bubble(simulate(schedule, costs))
    assert found == approx(expected / (m * (forward + inputs + weights)))


def bubble_between(timeline):
    """Idle / computing time of the rank that takes longest from its own start to its own end."""
    rows = [[s for s in timeline if s.rank == rank] for rank in timeline.ranks]
    lengths = [(row[-1].end - row[0].start, sum(s.duration for s in row)) for row in rows]
    length, busy = max(lengths)
    return length / busy - 1


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_bubbles_of_the_zero_bubble_schedules(p):
    """Rates of the zero-bubble README for F = I = W against 1F1B's (p-1)/(m+p-1): a third, and 0.

    0 from a rank's own start to its own end; a step that all ranks wait for still has a bubble.
    """
    m = 3 * p
    t = {name: simulate(s) for name, s in every(p, m).items()}
    whole = {name: bubble(x) / (1 + bubble(x)) for name, x in t.items()}  # of the step
    assert whole["1f1b"] == approx((p - 1) / (m + p - 1))
    assert bubble(t["zb_h1"]) == approx(bubble(t["1f1b"]) / 3)
    assert bubble_between(t["zb_h2"]) == bubble_between(t["zb_v"]) == approx(0)
    assert bubble(t["zb_h2"]) == approx((p - 1) / (3 * m))  # of F, at the start
    assert bubble(t["zb_v"]) == approx((p - 1) / (6 * m))
    assert bubble_between(t["1f1b"]) == approx(bubble(t["1f1b"]))  # rank 0 starts and ends it all
    assert bubble(t["dualpipe_v"]) == approx((p - 1) / (6 * m))
    assert p % 2 or bubble(t["dualpipe"]) == approx((p / 2 - 1) / (3 * m))
    late = Costs(1.0, 1.3, 0.8)
    got = bubble_between(simulate(make("zb_h2", p, m), late)) * m * 3.1
    assert got == approx((p - 1) * (1.0 + 1.3 - 2 * 0.8))  # 2401.10241, table 2


def test_trap_25_b_is_i_and_w():
    t = simulate(make("1f1b", 1, 3), Costs(1.0, 1.5, 0.25))
    assert t.duration == approx(3 * 2.75) and bubble(t) == approx(0)


def test_messages_take_time_and_queue_on_the_wire():
    """By hand: F 1 s, wire 2 s. Catches a wire that carries two at once."""
    t = simulate(make("gpipe", 2, 2), Costs(1, 1, 1, message=2.0))
    when = {span.name: (span.start, span.end) for span in t}
    assert when["0SF0"] == (1, 3) and when["0SF1"] == (3, 5)
    assert when["1F0"] == (3, 4) and when["1F1"] == (5, 6)
    assert when["1SB0"] == (8, 10) and when["0B1"] == (12, 14)
    assert t.bytes_by_axis() == {"pp": 0} and t.label == "simulated"


def test_costs_by_part_of_the_model():
    t = simulate(make("dualpipe", 2, 2), Costs((1.0, 3.0), (1.0, 3.0), (0.0, 0.0)))
    lengths = {span.name: span.duration for span in t.select(kind="forward")}
    assert lengths == {"0F0": 1, "1F0": 3, "2F1": 1, "3F1": 3}  # stage 2 has the layers of stage 0


# ---------------------------------------------------------------------- torch's own generators
def parsed(row):
    flat = [b for a in row if a is not None for b in (a.sub_actions or [a])]
    return [Action.parse(str(a)) for a in flat if "REDUCE" not in str(a)]


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8)])
def test_trap_06_an_oracle_is_checked_before_it_is_believed(p, m):
    """torch 2.13's exported order of 1F1B is ours, but on the last rank off by one: refused."""
    known = SimpleNamespace(_num_stages=p, _n_microbatches=m)
    exported = theirs.Schedule1F1B._get_pipeline_order(known)
    rows = [tuple(parsed(exported[rank])) for rank in range(p)]
    mine = make("1f1b", p, m)
    assert tuple(rows[:-1]) == mine.actions[:-1] and rows[-1] != mine.actions[-1]
    with pytest.raises(ValueError, match=f"{p - 1}F{m} on rank {p - 1}: there are"):
        validate(replace(mine, actions=tuple(rows)))


# ---------------------------------------------------------------------- corruption is refused
HEAD = "mine: microbatches 2; stages on ranks 0 1\n"
FLAT = {
    "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1": "stage 1 has F for microbatch 1, and needs F B or F I W",
    "0F0 0F1 0B0 0B1 | 1B0 1F0 1F1 1B1": "deadlock: .* rank 1 at 1B0 for 1F0",
    "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1 1F0": "stage 1 has F F B for microbatch 0",
    "0F0 0F1 0B0 0B1 1F0 | 1B0 1F1 1B1": "1F0 on rank 0: .* and this rank has .0.",
    "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1 1W1": "stage 1 has F B W for microbatch 1",
    "0F0 0F1 0B0 0B1 | 1F0 1I0 1F1 1B1": "F I for microbatch 0, .*: the optimizer would",
    "0F0 0F1 0B0 0B1 | 1F0 1W0 1I0 1F1 1B1": "rank 1 at 1W0 for 1I0",
    "0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1": ("deadlock: rank 0 at 0B0 for 1B0; rank 1 at 1F1 for 0F1"),
}
FIRST = "0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 | "  # of rank 0, and right
LAST = " | 1RF0 1RF1 1F0 1F1 1B0 1SB0 1B1 1SB1"
WITH_MESSAGES = {
    # Both ranks send first: fine for messages that return at once, else neither receives.
    FIRST + "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1": (
        "deadlock: rank 0 at 0SF1 for 1RF1; rank 1 at 1SB0 for 0RB0"
    ),
    FIRST + "1RF1 1RF0 1F0 1F1 1B0 1SB0 1B1 1SB1": "rank 0 at 0SF0 for 1RF0; rank 1 at 1RF1",
    FIRST + "1RF0 1F0 1F1 1B0 1SB0 1B1 1SB1": "rank 1 at 1F1 for 1RF1",
    FIRST
    + "1RF0 1RF1 1F0 1F1 1SF0 1B0 1SB0 1B1 1SB1": "1SF0 on rank 1: .* goes through the stages 0-1",
    "0SF0 0F0 0F1 0SF1 0RB0 0B0 0RB1 0B1" + LAST: "rank 0 at 0SF0 for 0F0",
    "0F0 0SF0 0F1 0SF1 0RB0 0B0 0B1 0RB1" + LAST: "rank 0 at 0B1 for 0RB1",
}


@pytest.mark.parametrize("rows, said", [*FLAT.items(), *WITH_MESSAGES.items()])
def test_what_is_wrong_is_said(rows, said):
    lines = [f"rank {rank}: {row}" for rank, row in enumerate(rows.split("|"))]
    with pytest.raises(ValueError, match=said):
        validate(Schedule.parse(HEAD + "\n".join(lines)))


def with_action(wrong):
    schedule = make("gpipe", 1, 2)
    return replace(schedule, actions=((*schedule.actions[0], wrong),))


ERRORS = [
    *((lambda t=t: Action.parse(t), "is unknown; write stage, one") for t in ("F0", "2X0", "2F")),
    (lambda: Schedule.parse("rank 0: 0F0"), "does not say what the schedule is"),
    (
        lambda: simulate(Schedule.parse(HEAD + "rank 0: 0F0 0B0\nrank 1: 1B0 1F0")),
        "deadlock: ",
    ),
    (lambda: make("interleaved_1f1b", 0, 1), "p=0; a pipeline has at least 1"),
    (lambda: make("dualpipe", 3, 6), "p=3: .* use an even p: 2 or 4"),
    (lambda: make("gpipes", 2, 2), "no schedule 'gpipes'; use one of naive, gpipe"),
    (lambda: make("zb_v", 2, 4, 3), "v=3: zb_v has v=2; use v=2, or one of interleaved_1f1b"),
    (lambda: validate(with_action(Action(0, "F", -1))), "0F-1 on rank 0: there are 2 microbatches"),
]


@pytest.mark.parametrize("call, said", ERRORS)
def test_what_a_user_may_write_is_refused_with_what_can_be(call, said):
    with pytest.raises(ValueError, match=said):
        call()
