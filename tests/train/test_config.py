"""The flags of a training run: what is refused before anything starts, and how they are stored."""

import json
from dataclasses import replace

import pytest

from minipar.train.config import TrainConfig


def test_defaults_are_valid():
    TrainConfig().check()
    assert TrainConfig().num_ranks == 4


@pytest.mark.parametrize(
    "mesh, sizes",
    [("dp=4", {"dp": 4}), ("dp=1", {"dp": 1}), ("dp=2, tp=1", {"dp": 2, "tp": 1})],
)
def test_mesh_is_read(mesh, sizes):
    config = TrainConfig(mesh=mesh)
    config.check()
    assert config.mesh_sizes() == sizes and config.num_ranks == max(sizes.values())


@pytest.mark.parametrize(
    "mesh",
    ["", "dp", "dp=", "dp=0", "dp=-1", "dp=x", "dp=1.5", "xx=2", "dp=2,dp=2", "dp=2,,", "=2"],
)
def test_a_wrong_mesh_is_refused(mesh):
    with pytest.raises(ValueError, match="--mesh .* is not axis=size .*; try dp=4"):
        TrainConfig(mesh=mesh).check()


def test_axes_without_a_strategy_are_refused():
    with pytest.raises(ValueError, match=r"--mesh dp=2,tp=2: .* axis tp \(tensor.*\) yet; use dp"):
        TrainConfig(mesh="dp=2,tp=2").check()


@pytest.mark.parametrize(
    "name, values",
    {
        "steps": (0, -1),
        "batch_size": (0,),
        "seq_len": (0, 10**6),
        "microbatches": (0,),
        "eval_batches": (0,),
        "save_every": (0,),
        "record_every": (0,),
        "warmup_steps": (-1,),
        "weight_decay": (-0.1, float("nan"), float("inf")),
        "bucket_mb": (-1.0,),
        "eval_every": (-1,),
        "sample_tokens": (-1,),
        "lr": (0.0, -1e-3, float("nan"), float("inf")),
        "max_norm": (0.0, -1.0),
        "timeout": (0.0, 1e30),
        "seed": (-1, 2**70),
        "preset": ("huge",),
        "name": ("a/b", "..", "/"),
        "link": ("5gbe", "1gbe*0", "1gbe*x"),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_refused_by_its_flag(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} |link"):
            replace(TrainConfig(), **{name: value}).check()


def test_comes_back_from_json(tmp_path):
    config = TrainConfig(mesh="dp=2", lr=1, dtype="float64", data="a.txt", resume="runs/x")
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "of_a_later_version": 1}))
    assert TrainConfig.load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"steps": 3',
        '{"steps": "3"}',
        '{"steps": null}',
        '{"steps": true}',
        '{"lr": [1]}',
        '{"ddp": "quick"}',
        "\xff",
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    """A mutant that checks no types crashes later, on comparing a string with a number."""
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{path} is not the configuration of a run"):
        TrainConfig.load(path)


def test_the_text_is_checked_before_anything_starts(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be\n" * 20)  # 380 bytes, of which 19 are for validation
    config = TrainConfig(data=str(text), seq_len=18)
    config.check_text()
    with pytest.raises(ValueError, match="--seq-len 19 .* the 19 tokens of validation text .* 18"):
        replace(config, seq_len=19).check_text()
    with pytest.raises(ValueError, match="--seq-len 500 .* the 361 tokens of training text .* 18"):
        replace(config, seq_len=500).check_text()
    with pytest.raises(ValueError, match="no tokenizer at"):
        replace(config, tokenizer=str(tmp_path / "none.json")).check_text()
    with pytest.raises(ValueError, match="is no tokenizer.json"):
        replace(config, tokenizer=str(text)).check_text()
    replace(config, data="hf:nobody/nothing").check_text()  # not fetched here
