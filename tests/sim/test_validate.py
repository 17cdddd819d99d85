"""What README says of the errors on published runs holds; nothing is fitted to `public-check`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minipar.lab import predicted
from minipar.sim import cost, validate

DATA = Path(__file__).with_name("data")


@pytest.fixture(scope="module")
def runs():
    return [run for name in ("tune", "public_check") for run in validate.read(
        DATA / f"measured_{name}.csv")]  # fmt: skip


# Stated in README: the median error of the step time, and whether a constant is beaten in the mean.
@pytest.mark.parametrize(
    ("source", "median", "beaten"),
    [
        ("ultrascale_nanotron_h100", 0.04, True),
        ("mosaic_llmfoundry_fsdp", 0.02, True),
        ("fms_fsdp", 0.15, True),
        ("seqpar_table3_table5", 0.07, True),
        ("megatron_sc21_table1", 0.04, False),
        ("torchtitan", 0.07, False),
        ("zero_bubble", 0.11, False),
    ],
)
def test_step_times_are_as_near_as_stated(runs, source, median, beaten):
    some = [run for run in runs if run.source == source]
    measured = [run.seconds for run in some]
    found = validate.errors((run.predicted for run in some), measured)
    flat = validate.errors(validate.constant(some), measured)
    assert len(some) >= 8 and np.median(found) < median
    assert (found.mean() < flat.mean()) == beaten


def test_nothing_was_fitted_to_the_runs_that_are_held_out(runs):
    """The sources that `software.toml` names are those of the split `tune`."""
    held_out = {run.source for run in runs if run.split != "tune"}
    fitted = {run.source for run in runs if run.split == "tune"}
    assert len(held_out) == 5 and len(fitted) == 2 and not held_out & fitted
    kept = [run for run in runs if run.split == "tune"]
    assert validate.fitted(kept[::60]) == validate.fitted([*kept[::60], runs[-1]])


def test_the_error_that_plans_are_printed_with_is_that_of_published_runs(runs):
    from minipar.sim.planner import ERROR

    some = [run for run in runs if run.split != "tune"]
    found = validate.errors((r.predicted for r in some), [r.seconds for r in some])
    assert np.quantile(found, 0.9) == pytest.approx(ERROR, abs=0.01)


def test_memory_is_within_8_percent_in_the_median(runs):
    for source in ("ultrascale_nanotron_h100", "zero_bubble"):
        some = [run for run in runs if run.source == source and run.memory]
        assert np.median(validate.errors((r.held for r in some), [r.memory for r in some])) < 0.08


def test_choices_are_never_below_the_rule_of_thumb(runs):
    """Mutant: a ranking by memory, or by the number of ranks of an axis."""
    for source, cells in (("ultrascale_nanotron_h100", 4), ("zero_bubble", 12)):
        found = validate.choices([run for run in runs if run.source == source])
        ours, thumb, rank = np.mean(found, axis=0)
        assert len(found) == cells and ours >= 0.95 and ours >= thumb and rank > 0.9


def test_the_fit_finds_the_numbers_that_made_the_times(runs):
    made = {"host": 2e-3, "passes": 2.5, "attention": 1.5}
    some = [run for run in runs if run.source == "ultrascale_nanotron_h100"][::6]
    jobs = [replace(r.job, software=replace(r.job.software, **made)) for r in some]
    some = [
        replace(r, seconds=sum(cost.seconds(j).values())) for r, j in zip(some, jobs, strict=True)
    ]
    found = validate.best_software(some, list(made))
    assert found == pytest.approx(made, rel=0.15)


def test_the_report_names_the_worst_rows_and_the_simple_rules(runs, capsys):
    validate.main([str(DATA / "measured_public_check.csv")])
    printed = capsys.readouterr().out
    for words in ("zero_bubble, public-check: 48 rows", "a constant", "rule of thumb", "measured;"):
        assert words in printed


def test_the_picture_is_drawn_from_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predicted, "OUT", str(tmp_path / "predicted.png"))
    predicted.main([str(DATA / "measured_public_check.csv")])
    assert (tmp_path / "predicted.png").stat().st_size > 5000
    assert "drawn into" in capsys.readouterr().out


def test_a_bad_table_is_one_line(tmp_path):
    lines = (DATA / "measured_public_check.csv").read_text(encoding="utf-8").splitlines()
    for old, new, message in (("h100-sxm", "h1000", "nearest"), ("4096,4096", "4096,x", "row")):
        path = tmp_path / "table.csv"
        path.write_text("\n".join(lines).replace(old, new), encoding="utf-8")
        if old in "\n".join(lines):
            with pytest.raises(SystemExit, match=message):
                validate.main([str(path)])
    with pytest.raises(SystemExit, match="usage"):
        validate.main([])
    assert cost.HEADROOM < 0.8
