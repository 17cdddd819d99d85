"""Whole runs under any plan: what is saved, and by which plan it is resumed.

Unless a test says otherwise runs are in float64: what agrees to 1e-10 is the same computation.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minipar.model import hf
from minipar.model.llama import PRESETS, Llama
from minipar.parallel.plan import Plan
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from minipar.train.trainer import Trainer
from tests.train.runs import SAME, assert_same_run, lines_of, report_of, saved

PLAIN = TrainConfig(
    steps=6,
    batch_size=5,
    seq_len=24,
    dtype="float64",
    warmup_steps=2,
    max_norm=0.5,
    sample_tokens=0,
    save_every=3,
    record_steps=0,
)


# ---------------------------------------------------------------------- any plan
PLANS = [
    "dp=2,zero=3,microbatches=2",
    "tp=2,sequence_parallel",
    "pp=2,tp=2,zero=2,sequence_parallel,schedule=zb_v,microbatches=3",
    "cp=2,tp=2,zero=3,context=ulysses",
]
WHOLE_RUN = dict(steps=4, sample_tokens=5, eval_every=3, mesh="")
NUM_PARAMETERS = len(list(Llama(PRESETS["tiny"]).parameters()))


@pytest.fixture(scope="module")
def on_one_device(text, tmp_path_factory):
    """The folder of a run that a single process has made."""
    folder = tmp_path_factory.mktemp("one")
    trainer.train(replace(PLAIN, data=str(text), plan="dp=1", **WHOLE_RUN), str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_leaves_what_one_device_would(run, on_one_device, plan):
    """Losses, norms, weights, optimizer state, validation and sample: all as of one device.

    Mutants: pieces joined in another order; a norm of this rank's pieces only (no `shard_axes`);
    weights read before they have arrived; only rank 0 in a collective (which would hang); moments
    of one stage; tokens that all ranks of tp count.
    """
    one = on_one_device
    many = run(Plan.parse(plan).num_ranks, "many", plan=plan, **WHOLE_RUN)
    assert any(norm > PLAIN.max_norm for (norm,) in lines_of(one, "grad_norm"))
    assert_same_run(many, one)
    (weights, state), (expected, serial) = saved(many, 4), saved(one, 4)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10)
    ours, theirs = state["optimizer"], serial["optimizer"]
    assert ours["groups"] == theirs["groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    assert len(theirs["state"]) == NUM_PARAMETERS
    for name, entries in theirs["state"].items():
        assert entries.keys() == ours["state"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in entries.items():
            torch.testing.assert_close(ours["state"][name][key], value, rtol=1e-8, atol=1e-12)
    written, (ours, theirs) = Plan.parse(plan), map(report_of, (many, one))
    assert ours["num_parameters"] == theirs["num_parameters"]
    if written.zero < 3:
        assert ours["sample"] == theirs["sample"]
    else:  # no rank can have the whole model
        assert ours["sample"].startswith("(none: ")
    validated = [
        [line.get("validation_loss", 0) for line in read(f / "metrics.jsonl")] for f in (one, many)
    ]
    assert validated[0][2] and validated[1] == pytest.approx(validated[0], rel=1e-10)


@pytest.mark.slow
def test_experts_in_parts_train_and_go_on_as_copies_of_all_would(run):
    """ZeRO 3 fills what a router counts, too. Mutants: shares of a batch by dp alone, alike along
    ep; only what a checkpoint has gets a first value.

    Not beside one device: this preset balances each rank's microbatch, as Mixtral did.
    """
    moe = dict(preset="tiny-moe", steps=4, batch_size=4)
    copies = run(2, "copies", **moe)
    apart, cut = run(2, "apart", mesh="ep=2", **moe), run(2, "cut", mesh="ep=2", zero=3, **moe)
    rest = run(2, "rest", start=cut / "checkpoints/step_000003", **moe)
    for folder, first in ((apart, 0), (cut, 0), (rest, 3)):
        assert_same_run(folder, copies, first)


@pytest.mark.slow
def test_a_plan_resumes_to_the_bit(run):
    """In single precision, with the weight decay of its flags. Mutants: a moment not restored; the
    weight decay of the checkpoint."""
    plan, size = "dp=2,tp=2,zero=1,sequence_parallel,microbatches=2", 4
    changes = dict(plan=plan, mesh="", dtype="float32")
    whole = run(size, "whole", **changes)
    start = whole / "checkpoints/step_000003"
    rest = run(size, "rest", start=start, **changes)
    assert lines_of(rest, *SAME) == lines_of(whole, *SAME)[3:]
    ours, theirs = saved(rest, 6)[0], saved(whole, 6)[0]
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    other = run(size, "other", start=start, weight_decay=0.7, steps=4, **changes)
    groups = saved(other, 4)[1]["optimizer"]["groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.7}


# ---------------------------------------------------------------------- never whole
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,tp=2", "pp=2,microbatches=2"])
def test_zero_3_begins_as_the_whole_model_does(ranks, tmp_path, plan):
    """From "meta", by a seed or from a folder: weights as of one process, bit for bit.

    Mutants: a rank draws its pieces from the global stream; a tied head of its own."""
    folder, tied = tmp_path / "model", "pp" not in plan  # which two stages cannot share here
    hf.save(Llama(replace(PRESETS["tiny"], tie_embeddings=tied), seed=5), folder)
    config = replace(PLAIN, data=str(Path(checkpoint.__file__)), plan=f"{plan},zero=3")
    for init, seed in (("", 3), (str(folder), 3))[not tied :]:
        expected = hf.load(folder) if init else Llama(PRESETS["tiny"], seed=seed)
        asked = replace(config, init=init, seed=seed)
        for found in ranks(config.num_ranks).run(first_weights, asked, str(tmp_path / "run")):
            wanted = {name: t.double() for name, t in expected.state_dict().items()}
            assert found.keys() == wanted.keys()
            assert all(found[name].equal(wanted[name]) for name in wanted)


def first_weights(config: TrainConfig, folder: str) -> dict:
    with torch.random.fork_rng():
        return Trainer(config, Path(folder)).strategy.full_state_dict()
