"""This computer's steps beside their predictions: errors of medians, and beside a control."""

from unittest import mock

import pytest

from minipar.emulate import device as devices
from minipar.emulate import link
from minipar.parallel.plan import Plan
from minipar.sim import hardware, here
from minipar.sim.here import Row
from minipar.sim.replay import replay
from minipar.sim.trace import trace


def test_errors_are_those_of_the_medians():
    """Mutants: a mean; the error of the measured instead of the predicted."""
    row = Row("dp=2", "none", (1.0, 2.0, 9.0), (1.0, 1.0, 1.0), predicted=2.2, control=1.0)
    assert row.error == pytest.approx(0.1)
    assert row.beside_control == pytest.approx(0.1)


def test_a_computer_that_slows_down_as_a_whole_is_as_good_as_predicted():
    """Mutant: the ratio of medians, of rounds that do not belong together."""
    row = Row("zero", "none", (2.0, 4.0, 12.0), (1.0, 2.0, 6.0), predicted=4.0, control=2.0)
    assert row.error == 0 and row.beside_control == 0
    apart = row._replace(measured=(2.0, 8.0, 6.0), controls=(1.0, 4.0, 3.0), predicted=3.0)
    assert apart.error == pytest.approx(-0.5) and apart.beside_control == pytest.approx(-0.25)


def test_the_table_ends_with_the_median_and_the_worst():
    rows = [Row("dp=2", "none", (1.0,), (1.0,), predicted, 1.0) for predicted in (1.1, 0.9, 1.4)]
    *head, plain, beside = here.table(rows).splitlines()
    assert len(head) == 4 and "1000.0   1100.0  +10.0%" in head[1]
    assert plain == "error: median 10.0%, worst 40.0%"
    assert beside == "beside the control: median 10.0%, worst 40.0%"


@pytest.mark.slow
@pytest.mark.timed
def test_steps_of_this_computer_are_measured_and_predicted():
    """On a link so slow that no backward hides it, of however busy a computer. Mutants: a link that
    stays as it was; a prediction without the link.
    """
    machine, links = hardware.load("this-cpu"), ("none", "1gbe*10")
    free, slow = here.compare(machine, plans=("dp=2",), rounds=2, links=links)
    assert (free.link, slow.link) == links and len(slow.measured) == 2
    wire = slow.predicted - free.predicted
    assert wire > 0.2 and min(slow.measured) - min(free.measured) > 0.5 * wire
    assert free.predicted == free.control


def test_a_link_is_no_faster_than_the_processes_behind_it():
    """Mutants: a link that moves bytes for nothing; one that adds what happens meanwhile; a call
    whose beginning and end cost nothing on a slow link.
    """
    machine = hardware.load("this-cpu")
    call, moving = (machine.seconds_of_collective("all_reduce", n, 2) for n in (0, 4e6))
    for name in ("none", "1gbe"):
        there = here.Here(devices.Device(machine.device), link.LINKS[name], machine)
        wire = link.seconds("all_reduce", 4_000_000, 2, link.LINKS[name])
        assert there.seconds_of_collective("all_reduce", 4e6, 2) == max(call + wire, moving)
    assert wire > moving


def test_a_core_that_moves_bytes_computes_nothing_meanwhile():
    """Mutants: bytes that move by themselves; cores that are always too few."""
    machine = hardware.load("this-cpu")
    there = here.Here(devices.Device(machine.device), link.LINKS["none"], machine)
    traces = trace(here.CONFIG, Plan.parse("dp=2"), seq_len=16)

    def computing(cores: int) -> float:
        with mock.patch.object(here, "usable_cores", return_value=cores):
            return replay(traces, there).computing

    moving = sum(traces.ranks[0].sent().values()) / machine.inside.bus(2)
    assert moving > 0.001 and computing(2) - computing(8) == pytest.approx(moving)
