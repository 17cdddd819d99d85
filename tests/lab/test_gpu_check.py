"""The check for GPUs, rehearsed on the CPU: all of it runs, and it can fail."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import torch

from minipar.comm import calls
from minipar.comm.mesh import Mesh
from minipar.lab import gpu_check, gpu_parts, gpu_speed
from minipar.lab.gpu_parts import LEARNERS
from minipar.model.llama import PRESETS, Llama
from minipar.parallel.compression.feedback import COMPRESSORS
from minipar.parallel.expert import Dispatch
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.ranks.launch import RankError
from minipar.ranks.worker import Failure
from minipar.train import trainer
from minipar.train.metrics import read
from minipar.train.step import train_step
from tests.law.harness import muted


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rehearsal_goes_through_all_checks(tmp_path, capsys, monkeypatch):
    """And, asked again, does nothing twice. Mutant: a file that is written at the end alone."""
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    by_check = {}
    for row in rows:
        by_check.setdefault(row["check"], []).append(row)
    assert {(row["plan"], row["precision"]) for row in by_check["parity"]} == {
        *((plan, precision) for plan in gpu_check.PLANS[::8] for precision in gpu_check.TOLERANCE),
        *((text, "float32") for text in gpu_check.ONCE[::8]),
        (gpu_parts.GROUPED, "bf16"),
    }
    for row in by_check["parity"] + by_check["checkpoint"]:
        assert row["ok"] and row["error"] <= row["tolerance"]
    plain, [theirs], [talked] = (
        by_check[name] for name in ("utilisation", "transformers", "overlap")
    )
    assert by_check["calibrate"][0]["peak"]["fp32"] > 1e8
    assert [row["recompute"] for row in plain] == ["none", "full"]
    for measured in plain:
        assert 0 < measured["share_of_matmul"] < 2
        assert measured["simulated_ms"] > 0
        assert measured["simulated_bytes"] > 16 * PRESETS["tiny"].num_parameters
    assert theirs["tokens_per_second"] > 0
    assert talked["ok"] and {"forward", "backward", "comm", "optimizer"} <= set(talked["spans"])
    assert 0 < talked["hidden_fraction"] <= 1 and talked["communication_ms"] > 0
    assert (tmp_path / "gpu_timeline.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert "the CPU: nothing of a GPU: parity dp=2 (float32)" in said
    assert "tokens/s with batch_size=2, seq_len=64, compile=False" in said

    monkeypatch.setattr(gpu_check, "ours", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(gpu_check, "group", lambda *_: pytest.fail("trained again"))
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == rows


@pytest.mark.slow
def test_a_plan_that_does_another_thing_is_noticed(ranks, tmp_path, monkeypatch):
    """Mutants: gradients that are not summed; a plan that fails is left out; one that failed is
    not tried again."""
    monkeypatch.setattr(gpu_check, "TOLERANCE", {"float32": 1e-4})
    monkeypatch.setattr(gpu_check, "train", train_when_muted)
    plans, check = ["dp=2", "tp=2"], gpu_check.GpuCheck(rehearse=True)
    rows = gpu_check.Rows(tmp_path / "gpu.json", check, 0)
    gpu_check.parity(rows, ranks(1), 0, str(tmp_path), plans)
    assert [row["plan"] for row in rows[1:]] == plans and not any(row["ok"] for row in rows[1:])
    assert "FAILED: parity dp=2 (float32); parity tp=2" in gpu_check.verdict(rows, 0)
    assert gpu_check.Rows(tmp_path / "gpu.json", check, 0) == rows[:1]
    assert gpu_check.Rows(tmp_path / "gpu.json", gpu_check.GpuCheck(preset="tiny"), 0) != rows[:1]


@pytest.mark.slow
def test_what_is_done_in_float32_alone_equals_one_device(ranks, tmp_path):
    """A flag behind a plan, and each kind of part, by two hands. Mutant, run here: ranks that do
    not talk."""
    rows = gpu_check.Rows(tmp_path / "gpu.json", gpu_check.GpuCheck(rehearse=True), 0)
    compiled = "dp=2; compile=aot_eager"
    texts = [
        compiled,
        "ep=2,dispatch=padded; expert_capacity=2",
        *LEARNERS,
        "compression=int8",
        "compression=powersgd",
    ]
    gpu_check.parity(rows, ranks(1), 0, str(tmp_path), texts, ["float32"], hands=2)
    assert {row["plan"] for row in rows[1:]} == {*texts} and all(row["ok"] for row in rows[1:])
    assert len(rows) == 1 + len(texts)
    config = gpu_check.configure(compiled, "float32")
    assert config.compile == "aot_eager" and gpu_check.alone(config).compile == "none"
    for part in (*LEARNERS, "compression=random-k"):
        [expected] = ranks(1).run(gpu_parts.steps_of, part, 1)
        found = ranks(2).run(steps_when_muted, part)[0]
        errors = map(gpu_check.difference, expected, found)
        assert not gpu_check.worst(errors) <= 1e-2, part


def steps_when_muted(part: str) -> list[dict[str, float]]:
    with muted():
        return gpu_parts.steps_of(part, 2)


def test_all_that_can_be_chosen_is_checked():
    """Mutants: a schedule, a dispatch, a compressor or a method that is left out."""
    said = "; ".join((*gpu_check.PLANS, *gpu_check.ONCE, *LEARNERS))
    for name in (*SCHEDULES, *get_args(Dispatch)[2:], *COMPRESSORS, "local sgd", "diloco delayed"):
        assert name in said, name
    for text in gpu_check.ONCE:
        if text not in gpu_parts.PARTS:
            gpu_check.configure(text, "float32").check()


def test_what_is_no_number_is_not_equal():
    """Mutant: the largest of errors as Python takes it, which passes over a nan."""
    steps = [{"loss": 1.0, "grad_norm": 1.0}] * 3
    lost = [steps[0], {"loss": 1.0, "grad_norm": math.nan}, steps[0]]
    rows = gpu_check.Rows(Path("unwritten"), gpu_check.GpuCheck(), 0)
    rows.write = lambda: None
    gpu_check.compare(rows, "parity", "dp=2", "float32", steps, lambda: (lost, ""))
    gpu_check.compare(rows, "parity", "dp=2", "float32", steps, lambda: (steps, ""))
    assert [row["ok"] for row in rows[1:]] == [False, True]


@pytest.mark.slow
def test_the_simulator_knows_what_was_measured_on_a_gpu(monkeypatch):
    """Its steps, simulated again: by what was calibrated there, and by the data sheet. Mutants:
    norms spelled out in operations; products at the rate of a data sheet's peak."""
    folder = Path("notebooks/assets/measured")
    told = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    rows = gpu_check.Rows(Path("unwritten"), gpu_check.GpuCheck(), 1)
    plain = [row for row in told if not row.get("loss_chunk")]  # others were in chunks, then
    rows[:] = [dict(row) for row in plain]
    monkeypatch.setattr(rows, "write", lambda: None)
    monkeypatch.setattr(gpu_speed.backends, "compute_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(gpu_speed, "name_of", lambda _: told[0]["device"])
    tried = gpu_speed.settings(told[0]["preset"])
    gpu_check.simulated(rows, tried, folder / "gpu_machine.toml")
    readme = Path("README.md").read_text(encoding="utf-8").partition("## What has run where")[2]
    said = next(row for row in plain if "simulated_ms" in row)
    for name in ("step_ms", "data_sheet_ms", "simulated_ms"):
        assert f"{said[name]:.0f} ms" in readme
    assert f"{said['peak_bytes'] / 1e9:.1f} GB" in readme
    again = [(old, new) for old, new in zip(plain, rows, strict=True) if "simulated_ms" in new]
    assert again
    for old, new in again:
        assert new["simulated_bytes"] == pytest.approx(new["peak_bytes"], rel=0.02)
        for name, error in (("simulated_ms", 0.03), ("data_sheet_ms", 0.08)):
            assert new[name] == pytest.approx(new["step_ms"], rel=error)
            assert new[name] == pytest.approx(old[name], rel=0.01)


def test_a_part_that_fails_is_noted_and_the_rest_goes_on(tmp_path, capsys, monkeypatch):
    """Mutant: a model that does not fit ends the check before parity is tried."""
    tried = []

    def fails(name):
        def run(*_):
            tried.append(name)
            raise RuntimeError("out of memory")

        return run

    parts = ["parity", "parity", "parity", "checkpoints", "calibrated", "speed", "simulated"]
    parts += ["overlap"]
    for name in parts:
        monkeypatch.setattr(gpu_check, name, fails(name))
    monkeypatch.setattr(gpu_check, "Ranks", lambda *_, **__: nullcontext(Here()))
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 1
    assert tried == parts
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))[1:]
    assert [row["message"] for row in rows] == ["out of memory"] * 8
    said = capsys.readouterr().out
    assert "parity; checkpoint; calibrate; utilisation; simulated; overlap" in said


def test_scaling_is_a_share_of_so_many_times_one_gpu(tmp_path, monkeypatch):
    """On two GPUs that are not here. Mutants: a plan that cannot be ends the rest; one that was
    run is run again; strong scaling with a larger batch."""
    ran = []

    def told(rows, row, config, *rest):
        ran.append((config.as_plan().num_ranks, config.batch_size))
        monkeypatch.setattr(gpu_check, "group", lambda *_: nullcontext(Here()))
        monkeypatch.setattr(trainer, "train", report_100_per_rank)
        return usual(rows, row, config, *rest)

    usual = gpu_check.told
    monkeypatch.setattr(gpu_check, "told", told)
    check = gpu_check.GpuCheck(rehearse=True)
    rows = gpu_check.Rows(tmp_path / "gpu.json", check, 2)
    args = check.run(2), 2, str(tmp_path), ["dp=2", "tp=16", "tp=2"]
    gpu_check.scaling(rows, *args)
    assert ran == [(1, 4), (2, 4), (2, 8), (16, 4), (16, 8), (2, 4), (2, 8)]
    found = {(row["plan"], row["law"]): row.get("efficiency") for row in rows[1:]}
    assert found.pop(("tp=16", "strong")) is found.pop(("tp=16", "weak")) is None
    assert found == {("dp=1", "alone"): 1.0} | {
        (plan, law): 0.75 for plan in ("dp=2", "tp=2") for law in ("strong", "weak")
    }
    monkeypatch.setattr(trainer, "train", lambda *_: pytest.fail("trained again"))
    before = list(rows)
    gpu_check.scaling(rows, *args)
    assert rows == before == gpu_check.Rows(tmp_path / "gpu.json", check, 2)


def report_100_per_rank(config, folder):
    ranks = config.as_plan().num_ranks
    Path(folder).mkdir()
    report = {"tokens_per_second": 100.0 if ranks == 1 else 75.0 * ranks}
    (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")


def test_what_does_not_fit_is_no_failure(tmp_path, monkeypatch):
    """One setting of several. Mutant: an error of ours is taken for one."""

    def runs_out(*_):
        raise RankError({0: Failure("rank 0 of 1", "OutOfMemoryError", "CUDA out of memory", "")})

    monkeypatch.setattr(Here, "run", runs_out)
    monkeypatch.setattr(gpu_check, "Ranks", lambda *_, **__: nullcontext(Here()))
    check = gpu_check.GpuCheck(rehearse=True, preset="tiny")
    rows = gpu_check.Rows(tmp_path / "gpu.json", check, 1)
    gpu_check.speed(rows, check.settings())
    assert [row.get("message") for row in rows[1:]] == ["does not fit into memory"] * 3
    assert "FAILED" not in gpu_check.verdict(rows, 1)


class Here:
    def run(self, fn, *args):
        return [fn(*args)]


def test_in_bf16_masters_learn():
    """As the trainer does it. Mutants: autocast in its place; masters in bf16."""
    model = Llama(PRESETS["tiny"])
    optimizer = gpu_speed.learner(model, torch.bfloat16)
    tokens = torch.arange(8).view(1, 8)
    train_step(model, [], optimizer, [(tokens, tokens)], Mesh().dp)
    for p in model.parameters():
        assert p.dtype == torch.bfloat16 and p.master.dtype == torch.float32
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(p, p.master.bfloat16()) and not torch.equal(p.float(), p.master)


@pytest.mark.slow
def test_another_order_of_launches_is_noticed(ranks):
    """Mutant: as many launches are taken for the same."""
    says = ranks(2).run(launched_in_another_order, True)
    assert says == ["launch 1 along dp: rank 1 broadcast, rank 0 all_reduce"] * 2
    assert ranks(2).run(launched_in_another_order, False) == ["", ""]


def launched_in_another_order(differs: bool) -> str:
    axis, order = Mesh(dp=2).dp, gpu_check.Order()
    verbs = ["all_gather", "all_reduce", "broadcast"]
    if differs and axis.rank == 1:
        verbs[1:] = verbs[:0:-1]
    for verb in [*verbs, "send"]:
        order.begin(calls.Call(verb, axis, 8, (1 - axis.rank,) if verb == "send" else None))
    return order.problem(axis)


def train_when_muted(config, folder, start=None):
    if config.mesh == "tp=2":
        raise RuntimeError("no such kernel")
    with nullcontext() if config.mesh == "dp=1" else muted():
        trainer.train(config, folder)
    return read(Path(folder) / "metrics.jsonl"), ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "minipar: error: there is no GPU here; --rehearse runs on the CPU\n"
    )
