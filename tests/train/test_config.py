"""The flags of a training run: what is refused before anything starts, and how they are stored."""

from dataclasses import replace

import pytest

from minipar.parallel.plan import Plan
from minipar.train.config import TrainConfig


def test_short_flags_are_words_of_the_plan():
    """Mutants: --mesh takes the other words away; a flag that stays beside the plan."""
    plan = "tp=2,pp=2,zero=1,sequence_parallel,microbatches=4,precision=bf16"
    config = TrainConfig(plan=plan)
    config.check()
    assert config.as_plan() == Plan.parse(plan) and config.num_ranks == 4
    other = replace(config, mesh="dp=2,tp=2")
    assert other.as_plan() == replace(Plan.parse(plan), pp=1, dp=2)
    other = replace(other, zero=3, microbatches=1, recompute="full", precision="float32")
    expected = "dp=2,tp=2,zero=3,sequence_parallel,checkpointing=full"
    assert other.as_plan() == Plan.parse(expected)
    assert (other.mesh, other.zero, other.recompute) == ("", None, None)
    assert replace(other, plan="dp=2").as_plan() == Plan(dp=2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(
            (dict(mesh=mesh), "is not axis=size with an axis out of .*; try dp=4")
            for mesh in ("xx=2", "=2", "dp=2,zero=1", "dp=2,,")
        ),
        *((dict(mesh=mesh), "plan .*: ") for mesh in ("dp", "dp=", "dp=x", "dp=1.5", "dp=2,dp=2")),
        (dict(mesh="tp=3"), "plan tp=3: .* num_heads=4"),
        (dict(mesh="pp=2", microbatches=1000), "1000 leaves some empty: a rank has 32 seq"),
        (
            dict(mesh="pp=2", microbatches=4, batch_size=5),
            "4 leaves .* for 3 microbatches",
        ),
        (dict(plan="tp2"), "plan 'tp2'"),
        (dict(precision="bf16", dtype="float64"), "--precision bf16 needs --dtype float32"),
        (dict(seq_len=10**6), "--seq-len 1000000 is too long: tiny can see"),
        (dict(preset="huge"), "--preset huge is unknown; use one of tiny"),
        (dict(link="5gbe"), "no link '5gbe'"),
        (
            dict(compile="aot_eager", plan="pp=2,microbatches=4,schedule=zb_h1"),
            "zb_h1 computes gradients of weights",
        ),
        (dict(compile="aot_eager", recompute="selective"), "single operations; use none or full"),
        *((dict(name=name), "must be a plain name") for name in ("a/b", "..", "/")),
    ],
)
def test_what_cannot_work_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**changes).check()


def test_a_wrong_number_is_refused_by_its_flag():
    wrong = {"steps": (0, -1, 10**30), "batch_size": (0, 10**10), "keep": (0,), "seed": (-1, 2**70)}
    wrong |= {"lr": (0.0, 1e-320, float("nan"), 1e308), "weight_decay": (-0.1, float("inf"))}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} "):
                replace(TrainConfig(), **{name: value}).check()


# ---------------------------------------------------------------------- files
@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"steps": 3', '{"of_a_later_version": 1}', "\xff", '{"plan": 3}', '{"keep": "2"}'],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{path} is not the configuration of a run"):
        TrainConfig.load(path)
