"""What README says of the errors on published runs holds; nothing is fitted to `public-check`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.lab import predicted
from minipar.sim import cost, hardware, validate

DATA = Path(__file__).with_name("data")


@pytest.fixture(scope="module")
def runs():
    return [run for name in ("tune", "public_check") for run in validate.read(
        DATA / f"measured_{name}.csv")]  # fmt: skip


# Stated in README: the median error of the step time, and whether in the mean it is below half of
# a constant's.
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
    assert 0.07 < np.quantile(found, 0.9) < ERROR


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


HEAD = "source,row_id,layers,hidden,heads,seq,device,gpus,dp,microbatch,global_batch,dtype"
HEAD += ",step_seconds"
GOOD = "here,a,32,4096,32,4096,NVIDIA H100 80GB SXM5,8,8,1,64,bf16,4.5"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("NVIDIA H100 80GB SXM5=h1000", "no machine 'h1000': the nearest"),
        ("NVIDIA H100 80GB SXM5=v100", "v100 has no bf16"),
        (",4.5=,four", "step_seconds=four must be a number"),
        (",4.5=,nan", "step_seconds=nan must be"),
        (",4.5=,-1", "step_seconds=-1 must be"),
        (",4.5=,0", "step_seconds=0 must be above 0"),
        (",8,8,1=,16,8,1", "dp=8 x tp=1 x pp=1 x cp=1 are not gpus=16"),
        (",64,bf16=,60,bf16", "global_batch=60 is not microbatch=1"),
        (",32,4096,32=,,4096,32", "layers= must be a number of 1 or more"),
        (",32,4096,32=,1.5,4096,32", "layers=1.5 must be whole"),
        ("bf16=int7", "no type 'int7'"),
    ],
)
def test_a_row_that_is_not_understood_is_left_out_counted_and_said(
    tmp_path, capsys, changed, message
):
    """Mutant: it ends the reading of the table, or is dropped without a word."""
    path, bad = tmp_path / "table.csv", GOOD.replace(*changed.split("="))
    assert bad != GOOD
    path.write_text("\n".join(["# a comment", HEAD, bad, GOOD, bad]), encoding="utf-8")
    validate.main([str(path)])
    printed = capsys.readouterr().out
    assert f"rows left out: 2: {message}" in printed and "here, : 1 rows" in printed
    path.write_text("\n".join([HEAD, bad]), encoding="utf-8")
    with pytest.raises(SystemExit, match="no run that can be predicted"):
        validate.main([str(path)])


@pytest.mark.parametrize(("dtype", "name"), [("torch.bfloat16", "bf16"), ("float32", "fp32")])
def test_a_type_may_have_torchs_name(tmp_path, capsys, dtype, name):
    """Mutant: a name that products know, and the peak does not."""
    path = tmp_path / "table.csv"
    path.write_text(f"{HEAD}\n{GOOD.replace('bf16', dtype)}\n", encoding="utf-8")
    validate.main([str(path)])
    assert validate.read(path)[0].job.dtype == name and "1 rows" in capsys.readouterr().out


def test_a_row_with_fewer_layers_than_ranks_of_a_pipeline_is_left_out(tmp_path, capsys):
    """Mutant: it is predicted, with ranks that have nothing to do."""
    path, head = tmp_path / "table.csv", f"{HEAD},pp"
    four = GOOD.replace("a,32,", "a,4,").replace(",8,8,1,", ",8,1,1,")
    rows = [head, f"{GOOD},1", f"{four},8"]
    path.write_text("\n".join(rows), encoding="utf-8")
    validate.main([str(path)])
    assert "rows left out: 1: pp=8 must be at most layers=4" in capsys.readouterr().out


def test_the_bandwidth_of_a_device_is_not_divided_by_those_of_its_node(tmp_path):
    """Mutant: a share of one port for all, of which each has a share again."""
    path = tmp_path / "table.csv"
    row = f"{GOOD.replace('NVIDIA H100 80GB SXM5', 'v100').replace('bf16', 'fp16')},25"
    path.write_text(f"{HEAD},inter_gbps_per_gpu\n{row}\n", encoding="utf-8")
    between = validate.read(path)[0].job.machine.between
    assert (between.bandwidth, between.shared) == (25e9 / 8, 0)
    assert hardware.load("v100").between.shared == 1


def test_a_fit_without_rows_to_fit_to_is_one_line(tmp_path):
    """Mutant: numpy's words on arrays without numbers."""
    path = tmp_path / "table.csv"
    path.write_text(f"{HEAD}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="no row has split=tune") as error:
        validate.main(["--fit", str(path)])
    assert str(error.value).count("\n") == 0


def test_what_is_no_table_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="usage"):
        validate.main([])
    path = tmp_path / "table.csv"
    for text in (b"", b"a,b\n1,2", HEAD.replace("layers,", "").encode(), bytes(range(256)) * 9):
        path.write_bytes(text)
        with pytest.raises(SystemExit, match="has no column layers") as error:
            validate.main([str(path)])
        assert str(error.value).count("\n") == 0
    with pytest.raises(SystemExit, match="No such file"):
        validate.main([str(tmp_path / "none.csv")])


ODD = st.sampled_from(
    ["", "nan", "-1", "1e999", "1.2.3", '"', '""', ",", "\n", "\0", "Ä", "9" * 200_000]
)
PLACES = st.sampled_from([",", "32", "layers", "NVIDIA", "bf16", "8", "4.5", "\n"])


@pytest.mark.parametrize(
    "count", [50, pytest.param(2000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])]
)
def test_a_hostile_table_is_read_or_refused_in_one_line(tmp_path, count):
    """Mutant: the csv module's own error, which names no file."""
    path = tmp_path / "table.csv"

    @settings(max_examples=count, deadline=None)
    @given(st.lists(st.tuples(PLACES, ODD), min_size=1, max_size=3))
    def once(changes):
        text = f"{HEAD}\n{GOOD}\n{GOOD}\n"
        for old, new in changes:
            text = text.replace(old, new.replace("LONG", "9" * 200_000), 2)
        path.write_text(text, encoding="utf-8")
        try:
            validate.read(path)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)

    once()


def test_what_a_table_leaves_open_is_taken_as_usual(tmp_path):
    """An unknown microbatch is the fastest that fits; tokens a second stand for seconds."""
    head, good = HEAD.replace("step_seconds", "tokens_per_s_per_gpu"), GOOD.replace(",4.5", ",7282")
    good = good.replace(",1,64,", ",,64,").replace("a,32,", "a,4,")
    rows = [
        good,
        good.replace("NVIDIA H100 80GB SXM5", "h100-sxm"),
        good.replace("4096,NV", "128,NV"),
    ]
    path = tmp_path / "table.csv"
    path.write_text("\ufeff" + "\n".join([f" {head} ".replace(",", " ,"), *rows]), encoding="utf-8")
    long, same, short = validate.read(path)
    assert long.seconds == pytest.approx(4.5, rel=1e-3) and long.job == same.job
    assert short.job.microbatch > long.job.microbatch  # as 8 times 128 tokens take little room
    for run in (long, short):
        assert run.job.plan.microbatches * run.job.microbatch * 8 == 64
        assert run.held < cost.room(run.job.machine.device)


def test_gradients_of_microbatches_are_added_up_and_fsdp_copies():
    """Mutants: neither takes time. Both go through memory; one microbatch has nothing to add to."""
    run = validate.read(DATA / "measured_public_check.csv")[0]
    none = replace(run.job.software, copies=0.0)

    def computing(job):
        return cost.seconds(job)["compute"]

    plain = replace(run.job, plan=replace(run.job.plan, zero=1, microbatches=1))
    two = replace(plain, plan=replace(plain.plan, microbatches=2))
    assert computing(two) > 2.01 * computing(plain)
    with_copies, without = (
        cost.seconds(j)["dp"] for j in (run.job, replace(run.job, software=none))
    )
    device, layers = run.job.machine.device, run.job.config.num_layers
    copied = run.job.software.copies * cost.parameters(run.job)[0] * layers
    assert with_copies - without == pytest.approx(
        copied / (device.memory_bandwidth * device.memory_efficiency)
    )
