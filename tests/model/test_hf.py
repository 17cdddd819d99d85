"""What we write, transformers reads, and the reverse; what would be silently wrong is refused."""

import inspect
import json
import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from minipar.model import hf
from minipar.model.llama import Llama, RopeScaling
from minipar.model.moe import MoEConfig
from tests.model.oracle import CONFIGS, randomised, some_tokens, their_twin

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def saved(folder, name: str = "gqa") -> Llama:
    model = randomised(CONFIGS[name], torch.float32)
    hf.save(model, folder)
    return model


def same_weights(a: Llama, b: Llama) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and torch.equal(x, y) for (m, x), (n, y) in pairs)


def edit_config(folder, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = {name: value for name, value in (raw | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def edit_weights(folder, **changes) -> None:
    weights = load_file(folder / hf.SINGLE)
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({n: t for n, t in weights.items() if t is not ...}, folder / hf.SINGLE)


# -------------------------------------------------------------------------------- both directions


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_what_we_save(name, folder):
    model = saved(folder, name)
    theirs, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert "missing_keys" in report and not any(report.values()), report
    assert theirs.dtype == torch.float32
    tokens = some_tokens(model.config)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_we_load_what_transformers_saves(name, max_shard_size, folder):
    twin = their_twin(randomised(CONFIGS[name], torch.float32))
    twin.save_pretrained(folder, max_shard_size=max_shard_size)
    assert (folder / hf.INDEX).exists() == (max_shard_size == "60KB")
    model = hf.load(folder)
    assert model.config == CONFIGS[name]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == CONFIGS[name].tie_embeddings
    tokens = some_tokens(model.config)
    torch.testing.assert_close(model(tokens), twin(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_older_layout_of_the_configuration_is_read(folder):
    saved(folder)
    edit_config(folder, rope_theta=500_000.0, rope_scaling=LLAMA3)
    config = hf.load_config(folder)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_defaults_of_an_old_configuration(folder):
    """Files of the first Llama say neither head_dim nor the number of key/value heads nor theta."""
    saved(folder, "mha")
    old = ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "rms_norm_eps")
    edit_config(folder, **dict.fromkeys((*old, "tie_word_embeddings"), ...))
    assert hf.load_config(folder) == replace(CONFIGS["mha"], norm_eps=1e-6)


def test_dtype_is_that_of_the_file_unless_said_otherwise(folder):
    model = randomised(CONFIGS["gqa"]).bfloat16()
    hf.save(model, folder)
    assert {p.dtype for p in hf.load(folder).parameters()} == {torch.bfloat16}
    wide = hf.load(folder, dtype=torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.lm_head.weight, model.lm_head.weight.double())
    assert LlamaForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_a_tied_head_is_not_stored_but_may_be(folder):
    model = saved(folder, "tied")
    weights = load_file(folder / hf.SINGLE)
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].clone()
    in_old_files = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(6)}
    edit_weights(folder, lm_head__weight=head, **in_old_files)
    back = hf.load(folder)
    assert back.lm_head.weight is back.model.embed_tokens.weight and same_weights(back, model)
    head[3, 5] += 1  # transformers unties these with a warning; here the file has to say so
    edit_weights(folder, lm_head__weight=head)
    with pytest.raises(ValueError, match="write tie_word_embeddings: false"):
        hf.load(folder)
    edit_config(folder, tie_word_embeddings=False)
    assert torch.equal(hf.load(folder).lm_head.weight, head)


# ------------------------------------------------------------------------------------------- saving


def without_norm(model: Llama) -> None:
    model.model.norm = None


@pytest.mark.parametrize(
    "change, config, message",
    [
        (without_norm, {}, r"not a whole model: missing \('model.norm.weight', \(48,\)\)"),
        (id, dict(qk_norm=True), "no Llama and no Mixtral of Hugging Face's is like this"),
        (id, dict(moe=MoEConfig(6, 2, 80, num_shared=1)), "no Llama and no Mixtral"),
        (id, dict(moe=MoEConfig(6, 2, 80, normalise=False)), "no Llama and no Mixtral"),
    ],
)
def test_what_is_no_whole_model_is_not_written(change, config, message, folder):
    model = Llama(replace(CONFIGS["gqa"], **config))
    change(model)
    with pytest.raises(ValueError, match=message):
        hf.save(model, folder)
    assert not folder.exists()


def test_saving_again_leaves_no_stale_shard_and_no_foreign_file_behind(folder):
    their_twin(randomised(CONFIGS["gqa"])).save_pretrained(folder, max_shard_size="60KB")
    assert (folder / hf.INDEX).exists()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    model = saved(folder, "mqa")
    left = {f.name for f in folder.iterdir()} - {"generation_config.json"}
    assert left == {"config.json", hf.SINGLE, "tokenizer.json"}
    assert same_weights(hf.load(folder), model)


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mistral"), "model_type='mistral'; only 'llama'"),
        (dict(attention_bias=True), "attention_bias=True is not supported, only False is"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported, only 'silu' is"),
        (dict(sliding_window=4096), "sliding_window=4096 is not supported"),
        (dict(quantization_config={"bits": 4}), "quantization_config=.* is not supported"),
        (dict(rope_scaling={"type": "yarn", "factor": 2.0}), "rope_type that is 'yarn'"),
        (dict(rope_scaling={"factor": 4.0}), "rope_type that is not given .* with .'factor'"),
        (dict(rope_parameters={"rope_type": "default", "factor": 4.0}), "is 'default' is not"),
        (dict(rope_scaling=LLAMA3 | {"attention_factor": 1.5}), "not supported with"),
        (dict(rope_scaling={"rope_type": "llama3"}), "'factor' is missing"),
        (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "'full_attention'"),
        (dict(rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"}), "both given"),
        (dict(hidden_size=...), "hidden_size"),
        (dict(num_hidden_layers=2.0), "num_layers=2.0 must be a whole number"),
        (dict(tie_word_embeddings="false"), "tie_embeddings='false' must be true or false"),
        (dict(num_hidden_layers=4), "missing model.layers.3.input_layernorm.weight, .* 6 more"),
        (dict(intermediate_size=81), r"_proj.weight has shape \(80, 48\), but .* \(81, 48\)"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes, message, folder):
    saved(folder)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        hf.load(folder)
    assert str(folder) in str(caught.value)


def test_every_setting_that_the_computation_of_transformers_reads_is_read_or_refused(folder):
    """Oracle: the settings that their code names. Catches one that is ignored in silence."""
    named = set(re.findall(r"config\.(\w+)", inspect.getsource(modeling_llama)))
    named -= {"_attn_implementation", "pad_token_id"}  # how it is computed; which row stays zero
    assert named >= {"attention_dropout", "hidden_act", "rms_norm_eps"}  # the search finds some
    saved(folder)
    before = hf.load_config(folder)
    plain = TheirConfig().to_dict()
    for name in named:
        other = {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 7.0}}
        value = other.get(name, True if plain[name] is False else 0.5)
        config = (folder / "config.json").read_text(encoding="utf-8")
        edit_config(folder, **{name: value})
        with suppress(ValueError):  # refused
            assert hf.load_config(folder) != before, name
        (folder / "config.json").write_text(config, encoding="utf-8")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / hf.SINGLE).unlink(), "neither model.safetensors nor"),
        (lambda f: edit_weights(f, lm_head__weight=...), "missing lm_head.weight; not known noth"),
        (lambda f: edit_weights(f, extra=torch.ones(1)), "missing nothing; not known extra"),
        (lambda f: (f / "config.json").unlink(), "config.json: .*No such file"),
        (lambda f: (f / "config.json").write_text("[1]"), "config.json: 'list' object has no"),
        (lambda f: (f / hf.SINGLE).write_text("version https://git-lfs"), "run git lfs pull"),
    ],
)
def test_damaged_folders_are_named(damage, message, folder):
    saved(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        hf.load(folder)
    assert str(folder) in str(caught.value)
