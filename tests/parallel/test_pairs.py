"""Two jobs with one baton: whose turn it is, what each keeps to itself, and how they end."""

import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minipar.comm import calls
from minipar.model.llama import PRESETS
from minipar.observe import timeline
from minipar.parallel.pipeline import pairs
from minipar.parallel.pipeline.actions import slots
from minipar.parallel.pipeline.checks import validate
from minipar.parallel.pipeline.schedules import PAIRED, make
from minipar.parallel.pipeline.simulate import lower
from minipar.parallel.plan import Plan
from minipar.sim.trace import trace


def wait(number: int, verb: str = "all_to_all") -> None:
    """Tell the pair of a call and of the wait for it, as `calls` does."""
    call = calls.Call(verb, number=number)
    pair = calls.taps[0]
    pair.begin(call), pair.wait(call)


def job(name: str, log: list, waits: int, verb: str = "all_to_all", then=None):
    def run() -> str:
        for i in range(waits):
            log.append(f"{name}{i}")
            wait(1000 * (name == "B") + i, verb)
        log.append(f"{name} ends")
        if then is not None:
            raise then
        return name

    return run


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = threading.active_count()
    yield
    assert not calls.taps and threading.active_count() <= before


def test_other_collectives_are_waited_for_at_once():
    log: list[str] = []
    pairs.side_by_side(job("F", log, 2, "all_reduce"), job("B", log, 1))
    assert " ".join(log) == "B0 F0 F1 F ends B ends"


@pytest.mark.parametrize("who", "FB")
def test_an_error_of_one_reaches_the_caller_and_ends_the_other(who):
    log: list[str] = []
    waits = {"F": 4, "B": 4} | {who: 1}
    jobs = [job(n, log, waits[n], then=KeyError(n) if n == who else None) for n in "FB"]
    with pytest.raises(KeyError, match=who):
        pairs.side_by_side(*jobs)
    other = "B" if who == "F" else "F"
    assert f"{who} ends" in log and f"{other} ends" not in log


def test_each_has_its_own_spans_and_only_one_computes():
    def spans(kind: str, first: int):
        def run() -> None:
            with timeline.span(kind, kind):
                for i in range(3):
                    time.sleep(0.002)
                    wait(first + i)
                time.sleep(0.002)

        return run

    with timeline.record() as recorded, timeline.span("compute", "around"):
        pairs.side_by_side(spans("forward", 0), spans("backward", 10))
    work = [s for s in recorded if s.kind != "compute"]
    assert [s.kind for s in work] == ["backward", "forward"] * 4
    assert all(a.end <= b.start for a, b in zip(work, work[1:], strict=False))
    assert recorded.spans[-1].kind == "compute" and recorded.end == recorded.spans[-1].end


def test_modes_of_the_caller_hold_for_both():
    seen: list[int] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(threading.get_ident())
            return op(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    loss = x.square().sum()
    with Sees():
        pairs.side_by_side(lambda: torch.ones(2) + 1, loss.backward)
        torch.zeros(1)
    assert len(set(seen)) == 2 and x.grad is not None


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", PAIRED)
def test_lowered_pairs_stay_pairs_and_send_after_both(name, p):
    """Each rank has one, and two that block cannot, either."""
    for m in range(2 * p, 3 * p + 1):
        plan = make(name, p, m)
        lowered = lower(plan, paired=True)
        validate(lowered)
        for row, own in zip(plan.actions, lowered.actions, strict=True):
            found = [slot for slot in slots(own, paired=True) if len(slot) == 2]
            assert found == [slot for slot in slots(row, paired=True) if len(slot) == 2] != []
            assert all(f.kind == "F" and b.kind == "B" for f, b in found)


def test_a_trace_refuses_what_it_cannot_replay():
    plan = Plan.parse("pp=2,ep=2,schedule=dualpipe_v,microbatches=4,dispatch=paired")
    with pytest.raises(ValueError, match="take dispatch=overlapped, which cannot be faster"):
        trace(PRESETS["tiny-moe"], plan, seq_len=8)
