"""Out of a run into a Hugging Face folder, and from such a folder into a run."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from minipar.cli import weights
from minipar.model import hf
from minipar.model.llama import PRESETS, Llama, LlamaConfig, RopeScaling
from minipar.train import checkpoint, trainer
from minipar.train.config import TrainConfig
from minipar.train.metrics import read
from tests.train.runs import save

CONFIG = TrainConfig(
    mesh="dp=1",
    steps=3,
    batch_size=4,
    seq_len=16,
    warmup_steps=2,
    sample_tokens=0,
    record_steps=0,
)
SHAPE = LlamaConfig(256, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64)


def test_an_export_spares_runs_and_may_be_to_where_one_is(tmp_path, monkeypatch):
    """Mutants: config.json of the run becomes that of the model; a folder "." has no name."""
    run, state = tmp_path / "run", {"step": 1, "model": asdict(SHAPE)}
    save(run / "checkpoints", 1, Llama(SHAPE).state_dict(), state)
    CONFIG.save(run / "config.json")
    with pytest.raises(ValueError, match=f"export: {run} is a run, and would lose its config.json"):
        weights.export(weights.Export(str(run), str(run)))
    assert TrainConfig.load(run / "config.json") == CONFIG
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    weights.export(weights.Export(str(run), "."))
    assert hf.load(tmp_path / "here").config == SHAPE
    with pytest.raises(ValueError, match="has weights already; name another .* --overwrite"):
        weights.export(weights.Export(str(run), "."))
    weights.export(weights.Export(str(run), ".", overwrite=True))
    (tmp_path / "full/.model.safetensors.tmp").mkdir(parents=True)  # as on a full disk
    with pytest.raises(OSError, match="cannot write .*full: Error while serializing"):
        weights.export(weights.Export(str(run), str(tmp_path / "full")))
    with pytest.raises(ValueError, match="is not the configuration of a run: "):
        TrainConfig.load(tmp_path / "here/config.json")


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_becomes_a_folder_of_hugging_face(tmp_path, tied):
    """Mutants: the shape of the preset instead of the run's; the scaling of RoPE is lost."""
    shape = replace(SHAPE, tie_embeddings=tied, rope_scaling=RopeScaling(4.0), vocab_size=300)
    model = Llama(shape, seed=3)
    state = {"step": 1, "model": asdict(shape)}
    save(tmp_path, 1, model.state_dict(), state)
    hf.save(checkpoint.model_of(tmp_path / "step_000001"), tmp_path / "out")
    other = hf.load(tmp_path / "out")
    assert other.config == shape
    tokens = torch.arange(40)[None]
    assert other(tokens).equal(model(tokens))
    written = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert written["vocab_size"] == 300 and written["tie_word_embeddings"] == tied


def test_a_run_goes_on_from_an_exported_one(tmp_path, text):
    """With its loss, not that of a fresh model. Mutants: --init ignored, or the shape of --preset.

    When it is resumed, the weights of the checkpoint win over those of --init.
    """
    torch.set_num_threads(1)
    hf.save(Llama(SHAPE, seed=3), tmp_path / "hf")
    config = replace(CONFIG, data=str(text), init=str(tmp_path / "hf"), lr=1e-2)
    config.check()
    trainer.train(config, str(tmp_path / "one"))
    start = tmp_path / "one/checkpoints/step_000003"
    names = Llama(SHAPE).state_dict().keys()
    assert checkpoint.load(start)[0].keys() == names  # two layers, where "tiny" has four

    hf.save(checkpoint.model_of(start), tmp_path / "more")
    more = replace(config, init=str(tmp_path / "more"), lr=1e-6, warmup_steps=0, steps=1)
    trainer.train(more, str(tmp_path / "two"))
    first, validated = (read(tmp_path / run / "metrics.jsonl") for run in ("one", "two"))
    assert first[0]["loss"] > 5.4  # about ln 256: a fresh model
    found, expected = (lines[-1]["validation_loss"] for lines in (validated, first))
    assert found == pytest.approx(expected, rel=1e-4) and found < first[0]["loss"] - 0.1
    trainer.train(replace(config, steps=4), str(tmp_path / "one"), str(start))
    assert read(tmp_path / "one/metrics.jsonl")[3]["loss"] < first[0]["loss"] - 0.1


def test_what_init_cannot_start_from_is_refused(tmp_path, text):
    hf.save(Llama(SHAPE), tmp_path)
    config = replace(CONFIG, data=str(text), init=str(tmp_path))
    config.check()
    with pytest.raises(ValueError, match=r"--seq-len 65 is too long: .* can see 64"):
        replace(config, seq_len=65).check()
    with pytest.raises(ValueError, match=r"config.json: .*No such file"):
        replace(config, init=str(tmp_path / "nowhere")).check()
    with pytest.raises(ValueError, match=r"knows 256 tokens, and the tokenizer has 300; use"):
        config.model_config(vocab_size=300)
    assert config.model_config(vocab_size=20) == SHAPE
    assert replace(config, init="").model_config(300) == replace(PRESETS["tiny"], vocab_size=300)
    hf.save(Llama(replace(SHAPE, vocab_size=300)), tmp_path / "words")
    with pytest.raises(ValueError, match=r"no tokenizer.json in .*, and a model of 300 words"):
        replace(config, init=str(tmp_path / "words")).check()
    with pytest.raises(ValueError, match=r"no tokenizer.json in .*, and a model of 300 words"):
        weights.generate(weights.Generate(str(tmp_path / "words")))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"reads no bytes; add --tokenizer .*/tokenizer.json"):
        config.check()
