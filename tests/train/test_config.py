"""The flags of a training run: what is refused before anything starts, and how they are stored."""

import inspect
import json
from dataclasses import replace

import pytest

from minipar.cli import training
from minipar.parallel.compression.feedback import COMPRESSORS
from minipar.parallel.local_sgd import METHODS
from minipar.parallel.plan import Plan
from minipar.train import config as configs
from minipar.train import flags
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
    ["", "dp", "dp=", "dp=0", "dp=-1", "dp=x", "dp=1.5", "xx=2", "dp=2,dp=2", "dp=2,,", "=2"]
    + ["dp=٣", "dp=２", "dp=²", "dp=" + "9" * 20, "dp=" + "9" * 5000, "tp=2000000"],
)
def test_a_wrong_mesh_is_refused(mesh):
    with pytest.raises(ValueError, match="--mesh .* is not axis=size .*; try dp=4"):
        TrainConfig(mesh=mesh).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh="ep=2"), "ep=2 spreads experts, and this Llama has none"),
        (dict(mesh="ep=3", preset="tiny-moe"), "ep=3 does not divide num_experts=8"),
        (dict(mesh="tp=3"), "plan tp=3: .* num_heads=4.* nearest plan that works is dp=3"),
        (dict(mesh="pp=2", zero=3, microbatches=4), "zero=3 .* nearest .* pp=2,zero=2,microb"),
        (dict(pipeline_schedule="zb_v"), "schedule=zb_v needs several ranks of pp"),
        (dict(mesh="dp=2,tp=2", compress="top-k"), "compression=top-k .* drift apart"),
        (dict(mesh="dp=2,tp=2", local_method="diloco"), "--local-method .* whole model .* dp=4"),
        (dict(mesh="dp=2,pp=2", slow="1=2"), "--slow 1=2 .* use --mesh dp=4"),
        (dict(mesh="dp=2,cp=2", grow_batch_to=64), "--grow-batch-to 64 .* use --mesh dp=4"),
        (dict(mesh="dp=1000000,tp=1000000"), "1,000,000,000,000 ranks are more than the 1,048,576"),
        (dict(mesh="pp=500000"), "pp=500000 cuts the model into 500000 stages"),
        (dict(mesh="pp=2", microbatches=10**9), "would be empty, all but 32: .* use up to 32"),
        (dict(plan="pp=2,microbatches=20000", batch_size=30000), "must be at most 10,000"),
        (dict(plan="dp=9999999999"), "cannot read 'dp=9999999999'; try dp=2"),
        (dict(plan="dp=٣"), "cannot read 'dp=٣'; try dp=2"),
        (
            dict(mesh="pp=2", microbatches=2, batch_ramp="64@3"),
            "makes 4 micro.* no --batch-ramp 64",
        ),
        (
            dict(mesh="pp=2", microbatches=4, batch_size=5),
            "makes 3 .* a --batch-size that 4 divides",
        ),
        (
            dict(mesh="pp=2", pipeline_schedule="interleaved_1f1b", stages_per_rank=10**9),
            "2000000000 stages",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes).check()


def test_a_plan_is_spelled_out():
    """Mutant: what the plan does not name stays as it was in the run that is resumed."""
    text = "tp=2,pp=2,sequence_parallel,schedule=zb_v,microbatches=4,precision=bf16"
    config = replace(TrainConfig(zero=1, recompute="full"), plan=text)
    config.check()
    assert config.mesh_sizes() == {"pp": 2, "tp": 2} and config.num_ranks == 4
    assert (config.sequence_parallel, config.pipeline_schedule) == (True, "zb_v")
    assert (config.microbatches, config.precision) == (4, "bf16")
    assert (config.zero, config.recompute, config.plan) == (0, "none", "")
    assert config.as_plan() == Plan.parse(text)
    with pytest.raises(ValueError, match="plan 'tp2'"):
        TrainConfig(plan="tp2")


@pytest.mark.parametrize(
    "name, values",
    {
        "steps": (0, -1, 10**30),
        "batch_size": (0, 10**9),
        "seq_len": (0, 10**6),
        "microbatches": (0, 9, 10**30),  # a rank of four has eight of the 32 sequences
        "eval_batches": (0,),
        "save_every": (0,),
        "record_every": (0,),
        "warmup_steps": (-1,),
        "weight_decay": (-0.1, float("nan"), float("inf")),
        "bucket_mb": (-1.0,),
        "eval_every": (-1,),
        "sample_tokens": (-1, 10**400),
        "lr": (0.0, 1e-320, -1e-3, float("nan"), float("inf"), 1e308),
        "stages_per_rank": (10**10,),
        "stall_seconds": (-1.0, 1e-320, 1e308),
        "max_norm": (0.0, -1.0),
        "timeout": (0.0, 1e-320, 0.5, float("nan"), 1e30),
        "seed": (-1, 2**70),
        "preset": ("huge",),
        "name": ("a/b", "..", "/"),
        "link": ("5gbe", "1gbe*0", "1gbe*x", "1gbe*1e308", "1gbe*nan"),
        "batch_ramp": ("64", "64@0", "0@5", "64@5,128@5", "٦٤@5", "1000001@5", "9" * 5000 + "@5"),
        "grow_batch_to": (-1, 31, 10**9),
        "slow": ("4=2", "1=0.5", "x", "1=1e308", "1=nan", "-1=2", "١=2"),
        "rebalance_every": (-1, 5),  # of one microbatch per rank nothing can be moved
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_refused_by_its_flag(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} |link"):
            replace(TrainConfig(), **{name: value}).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(compress="zip"), "--compress zip is unknown; use none, fp16"),
        (dict(compress="int8", ddp="naive"), "--compress int8 needs buckets"),
        (dict(compress="int8", reduce_dtype="bfloat16"), "both say how gradients are sent"),
        (
            dict(compress="int8", precision="fp16"),
            "precision=fp16 scales the two by factors that differ",
        ),
        (dict(compress="int8", grow_batch_to=64), "measures noise by it"),
    ],
)
def test_what_does_not_go_with_compression_is_refused(changes, message):
    for name in ("none", *COMPRESSORS):
        TrainConfig(compress=name).check()
        assert name in inspect.getsource(flags)  # so that --help tells
    TrainConfig(compress="fp16", precision="fp16").check()
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(zero=1, compress="int8"), "--zero 1 does without the buckets of ddp"),
        (dict(zero=3, ddp="naive"), "which --ddp naive is about"),
        (dict(zero=2, grow_batch_to=64), "which --grow-batch-to 64 is about"),
        (dict(zero=2, reduce_dtype="bfloat16"), "use --zero 0 or 3"),
        (dict(zero=3, bucket_mb=1.0), "sends block by block"),
        (dict(zero=1, slow="1=2"), "--slow 1=2 takes the time of a forward"),
        (dict(zero=3, rebalance_every=2, microbatches=2), "--rebalance-every 2 takes"),
        (dict(local_method="diloko"), "--local-method 'diloko' is unknown; use none, local sgd"),
        (dict(local_method="diloco", zero=3), "needs a whole model on every rank, and --zero 3"),
        (dict(local_method="diloco", compress="int8"), "which --compress int8 is about"),
        (dict(local_method="diloco", ddp="bucketed"), "which --ddp bucketed is about"),
        (dict(local_method="local sgd", bucket_mb=1.0), "leave out --bucket-mb 1"),
        (dict(local_method="delayed gradients", precision="fp16"), "use --precision bf16"),
        (dict(local_method="local sgd", local_every=0), "--local-every 0 must be 1 or more"),
    ],
)
def test_what_does_not_go_with_zero_or_local_methods_is_refused(changes, message):
    for name in ("none", *METHODS):
        TrainConfig(local_method=name).check()
        assert name in inspect.getsource(flags)  # so that --help tells
    for zero in (0, 1, 2, 3):
        TrainConfig(zero=zero, precision="fp16", recompute="full").check()
    TrainConfig(zero=3, reduce_dtype="bfloat16").check()
    TrainConfig(local_method="diloco", precision="fp16").check()
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes).check()


def test_flags_about_experts_are_those_of_the_model():
    flags_ = dict(expert_balance="none", expert_bias=0.001, expert_capacity=1.5)
    config = TrainConfig(preset="tiny-moe", mesh="dp=2,ep=2", dispatch="padded", **flags_)
    config.check()
    fields = "balance", "bias_speed", "capacity_factor"
    moe, plain = config.model_config().moe, TrainConfig(preset="tiny-moe").model_config().moe
    assert [getattr(moe, field) for field in fields] == list(flags_.values())
    assert [getattr(plain, field) for field in fields] == ["microbatch", None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(expert_bias=0.1), "--expert-bias 0.1 is about experts, and this model has none"),
        (dict(expert_balance="none"), "--expert-balance none is about experts"),
        (dict(preset="tiny-moe", expert_capacity=-1.0), "--expert-capacity -1"),
        (dict(preset="tiny-moe", mesh="ep=2", dispatch="padded"), "dispatch=padded fills up to a"),
        (dict(preset="tiny-moe", mesh="cp=2", expert_capacity=1.0), "and 2 ranks hold pieces"),
        (
            dict(preset="tiny-moe", expert_balance="batch", microbatches=2, rebalance_every=1),
            "use --expert-balance microbatch",
        ),
    ],
)
def test_what_cannot_be_said_of_experts_is_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        TrainConfig(**changes).check()
    assert message in str(caught.value)


def test_comes_back_from_json(tmp_path):
    config = TrainConfig(mesh="dp=2", lr=1, dtype="float64", data="a.txt", resume="runs/x")
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "of_a_later_version": 1}), encoding="utf-8"
    )
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
        '{"mesh": "dp=2", "zero": true}',
        '{"mesh": "dp=2", "zero": 1.0}',
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
    text.write_text(
        "to be or not to be\n" * 20, encoding="utf-8"
    )  # 380 bytes, of which 19 are for validation
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


def test_ranks_of_torchrun_read_the_text_once(tmp_path, monkeypatch):
    """In the trainer. Mutant: each of them before, too."""
    monkeypatch.setattr(configs, "load_corpus", lambda *_: pytest.fail("the text was read"))
    monkeypatch.setattr(training, "_train_under_torchrun", lambda *_: None)
    monkeypatch.setattr(training.backends, "under_torchrun", lambda: True)
    training.train(TrainConfig())
    with pytest.raises(ValueError, match="no tokenizer at"):
        training.train(TrainConfig(tokenizer=str(tmp_path / "none.json")))


def test_growing_batches_need_ranks_and_buckets_to_compare():
    growing = TrainConfig(grow_batch_to=64)
    growing.check()
    for changes, message in [
        ({"mesh": "dp=1"}, "--grow-batch-to 64 compares the gradients of ranks; use dp=2 or more"),
        ({"ddp": "naive"}, "--grow-batch-to 64 looks into buckets"),
        ({"batch_ramp": "64@5"}, "--grow-batch-to 64 and --batch-ramp 64@5: use one of them"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(growing, **changes).check()
    TrainConfig(rebalance_every=5, microbatches=2, slow="3=2.5", batch_ramp="64@9").check()
