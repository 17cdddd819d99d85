"""The errors that book/planner.md states hold; nothing is fitted to `public-check`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minipar.lab import predicted
from minipar.sim import cost, planner, validate

DATA = Path(__file__).with_name("data")


@pytest.fixture(scope="module")
def runs():
    names = ("tune", "public_check")
    return [run for name in names for run in validate.read(DATA / f"measured_{name}.csv")]


# Stated in book/planner.md: the median error of the step time, and whether in the mean it is below
# half of a constant's.
@pytest.mark.parametrize(
    ("source", "median", "beaten"),
    [
        ("ultrascale_nanotron_h100", 0.04, True),
        ("mosaic_llmfoundry_fsdp", 0.02, True),
        ("fms_fsdp", 0.07, True),
        ("seqpar_table3_table5", 0.06, True),
        ("megatron_sc21_table1", 0.02, True),
        ("torchtitan", 0.02, False),
        ("zero_bubble", 0.04, True),
    ],
)
def test_step_times_are_as_near_as_stated(runs, source, median, beaten):
    some = [run for run in runs if run.source == source]
    measured = [run.seconds for run in some]
    found = validate.errors((run.predicted for run in some), measured)
    flat = validate.errors(validate.constant(some), measured)
    assert len(some) >= 8 and np.median(found) < median
    assert (found.mean() < flat.mean() / 2) == beaten and found.mean() < flat.mean()


def test_the_error_that_plans_are_printed_with_is_that_of_published_runs(runs):
    assert {run.job.machine.device.name for run in runs} == {*planner.RUNS_ON}
    # Of those that were checked, tp over nodes and more devices alone are counted as unknown.
    few = [run for run in runs if run.gpus <= planner.RUNS_UP_TO]
    assert {run.job.plan.tp for run in few if planner.unchecked(run.job)} <= {16, 32}
    assert all(planner.unchecked(run.job) for run in runs if run not in few)
    some = [run for run in runs if run.split != "tune"]
    found = validate.errors((r.predicted for r in some), [r.seconds for r in some])
    assert 0.07 < np.quantile(found, 0.9) < planner.ERROR


def test_a_constant_is_the_best_one(runs):
    """Mutant: the median utilisation, which a few slow runs make three times as bad."""
    some = [run for run in runs if run.source == "ultrascale_nanotron_h100"]
    measured, best = [run.seconds for run in some], validate.constant(some)
    error = validate.errors(best, measured).mean()
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert validate.errors(factor * best, measured).mean() >= error
    assert len({*np.round(best / [run.ideal for run in some], 9)}) == 1


def test_memory_is_within_8_percent_in_the_median(runs):
    """Mutant: nanotron's first stages have as few layers as its last ones."""
    for source, most in (("ultrascale_nanotron_h100", 0.05), ("zero_bubble", 0.06)):
        some = [run for run in runs if run.source == source and run.memory]
        off = validate.errors((r.held for r in some), [r.memory for r in some])
        assert np.median(off) < most
        deep = [error for error, run in zip(off, some, strict=True) if run.job.plan.pp >= 8]
        assert np.median(deep) < 0.1


def test_choices_are_never_below_the_rule_of_thumb(runs):
    """Mutant: a ranking by memory, or by the number of ranks of an axis."""
    for source, cells in (("ultrascale_nanotron_h100", 4), ("zero_bubble", 12)):
        found = validate.choices([run for run in runs if run.source == source])
        ours, thumb, rank = np.mean(found, axis=0)
        assert len(found) == cells and ours >= 0.95 and ours >= thumb and rank > 0.9


def test_what_ran_is_predicted_to_fit(runs):
    """The largest microbatches that did. Mutant: logits in float32, of a loss in 16 bits."""
    for source, share in (("mosaic_llmfoundry_fsdp", 0.9), ("ultrascale_nanotron_h100", 0.95)):
        assert validate.fitting([run for run in runs if run.source == source]) > share


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predicted, "OUT", str(tmp_path / "predicted.png"))
    predicted.main([str(DATA / "measured_public_check.csv")])
    assert (tmp_path / "predicted.png").stat().st_size > 5000
    assert "drawn into" in capsys.readouterr().out


# ---------------------------------------------------------------------- tables
def test_a_row_that_cannot_be_read_is_named(tmp_path):
    head, row, *_ = [
        line
        for line in (DATA / "measured_public_check.csv").read_text().splitlines()
        if line[0] != "#"
    ]
    path = tmp_path / "table.csv"
    for good, bad in (("3.810233", "four"), (",a100,", ",a1000,"), ("dp=128", "pd=128")):
        path.write_text(f"{head}\n{row.replace(good, bad)}\n")
        with pytest.raises(ValueError, match="table.csv: .* in the row before line 3"):
            validate.read(path)


def test_the_bandwidth_of_a_table_is_that_of_each_device(runs):
    """Mutant: the port of the table's machine, which another cluster has."""
    run = next(run for run in runs if run.name == "fms-13b-a100")
    assert (run.job.machine.between.bandwidth, run.job.machine.between.shared) == (50e9 / 8, 0)


def test_the_report_has_errors_aims_and_what_would_fit(runs):
    said = validate.report([run for run in runs if run.source == "zero_bubble"])
    for words in (
        "zero_bubble, public-check: 48 rows", "a constant", "aim: mean below",
        "predicted to fit: 100%", "choice of 12 cells", "rule of thumb", "s measured;",
    ):  # fmt: skip
        assert words in said


def test_gradients_of_microbatches_are_added_up_and_fsdp_copies():
    """Mutants: neither takes time. Both go through memory; one microbatch has nothing to add to."""
    run = validate.read(DATA / "measured_public_check.csv")[0]
    plain = replace(run.job, plan=replace(run.job.plan, zero=1, microbatches=1))
    two = replace(plain, plan=replace(plain.plan, microbatches=2))
    assert cost.seconds(two)["compute"] > 2.01 * cost.seconds(plain)["compute"]
    none = replace(run.job, software=replace(run.job.software, copies=0.0))
    with_copies, without = (cost.seconds(job)["dp"] for job in (run.job, none))
    device, layers = run.job.machine.device, run.job.config.num_layers
    copied = run.job.software.copies * run.job.parameters.layer * layers
    assert with_copies - without == pytest.approx(
        copied / (device.memory_bandwidth * device.memory_efficiency)
    )
