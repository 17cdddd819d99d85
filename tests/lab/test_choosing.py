"""The calculator says what the planner says, the losses add up, and bad input is one line."""

from dataclasses import replace

import pytest

from minipar.lab import choosing
from minipar.sim import cost
from tests.lab.figures import texts

PLANS = (
    "dp=8",
    "dp=8,zero=3,microbatches=2",
    "tp=8,sequence_parallel",
    "dp=2,cp=4",
    "dp=4,tp=4,pp=4,zero=1,microbatches=8",
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_losses_add_up_to_the_step_and_begin_at_the_mfu(plan, recompute):
    """Mutant: a shortcoming that is handed back twice, or never."""
    found = choosing.calculate(plan=plan, recompute=recompute)
    lost = choosing.losses(found)
    first, *others = lost.values()
    assert sum(lost.values()) == pytest.approx(found.step)
    assert first == pytest.approx(found.mfu(True) * found.step)
    assert all(seconds > -1e-3 * found.step for seconds in others), lost
    for axis in cost.AXES:
        assert lost.get(axis, 0) == pytest.approx(found.seconds[axis])
    again = lost["computed again, uneven stages"] / first
    if "pp" not in plan:  # a fourth forward for three passes, but for the head
        assert again == pytest.approx(0 if recompute == "none" else 0.32, abs=0.04)


def test_an_ideal_machine_reaches_the_peak():
    """Mutant: an ideal that is none: what it lacks would be laid at no one's door."""
    found = choosing.calculate(plan="dp=8")
    device = found.job.machine.device
    fast = replace(device, launch=0, memory_bandwidth=1e30, tile=1, processors=1)
    machine = replace(found.job.machine, device=fast)
    better = replace(found, job=replace(found.job, machine=machine))
    better = replace(better, seconds=cost.seconds(better.job))
    lost = choosing.losses(better)
    assert lost["moving bytes"] == pytest.approx(0, abs=1e-9)
    assert 0 < lost["products below the peak"] < choosing.losses(found)["products below the peak"]


def rows(figure) -> set[str]:
    return {label.get_text() for ax in figure.axes for label in ax.get_yticklabels()}


def test_the_figures_bear_the_numbers():
    found = choosing.calculate("llama-3-8b", "dp=4,tp=2,zero=2")
    drawn = choosing.calculator("llama-3-8b", "dp=4,tp=2,zero=2")
    held = sum(found.memory.values()) / 1e9
    assert f"{found.mfu(False):.0%} MFU, needs {held:.0f} GB; it fits" in texts(drawn)
    assert f"a step of {found.step:.2f} s" in rows(drawn)
    assert "| tp | " in texts(drawn) and "| activations | " in texts(drawn)
    assert "no published run of this kind was checked: zero=2" in texts(drawn)
    assert choosing.calculate(plan="dp=8,checkpointing=full").job.plan.checkpointing == "full"
    large = texts(choosing.calculator("llama-3-70b", "dp=8"))
    assert "it does not fit" in large and "90 % of published runs lie within 15 %" in large


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (dict(model="llama-3-9b"), "nearest names are llama-3-8b"),
        (dict(plan="dp=8,tp=3"), "tp=3 does not divide num_heads"),
        (dict(tokens=0), "tokens=0"),
        (dict(tokens=10**6), "8,192 tokens"),
    ],
)
def test_bad_input_is_one_line(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        choosing.calculate(**words)
    assert "\n" not in str(caught.value)
