"""What we write, transformers reads, and the reverse; what is broken is said clearly."""

import inspect
import itertools
import json
import os
import re
import struct
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from minipar.model import hf
from minipar.model.hf_config import config_json
from minipar.model.llama import Llama, RopeScaling
from tests.model.oracle import CONFIGS, randomised, some_tokens, their_twin

SHARD_BYTES = 60_000  # several shards for the configurations of the oracle


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def saved(folder, name: str = "gqa", **options) -> Llama:
    model = randomised(CONFIGS[name], torch.float32)
    hf.save(model, folder, **options)
    return model


def same_weights(a: Llama, b: Llama) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and torch.equal(x, y) for (m, x), (n, y) in pairs)


def edit_config(folder, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = {name: value for name, value in (raw | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


# -------------------------------------------------------------------------------- both directions


@pytest.mark.mostly_slow
@pytest.mark.parametrize("max_shard_bytes", [10**9, SHARD_BYTES], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_what_we_save(name, max_shard_bytes, folder):
    model = saved(folder, name, max_shard_bytes=max_shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 2) == (max_shard_bytes == SHARD_BYTES)
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


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(name, folder):
    model = saved(folder, name, max_shard_bytes=SHARD_BYTES)
    back = hf.load(folder)
    assert back.config == model.config and same_weights(back, model)
    assert all(p.requires_grad and p.is_leaf for p in back.parameters())


@pytest.mark.parametrize("version", [4, 5])
def test_both_layouts_of_the_configuration_are_read(version, folder):
    saved(folder)
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    layouts = {
        4: dict(rope_theta=500_000.0, rope_scaling=scaling),
        5: dict(rope_theta=..., rope_scaling=..., rope_parameters={"rope_theta": 5e5, **scaling}),
    }
    edit_config(folder, **layouts[version])
    config = hf.load_config(folder)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_defaults_of_an_old_configuration(folder):
    """Files of the first Llama say neither head_dim nor the number of key/value heads nor theta."""
    saved(folder, "mha")
    old = ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "rms_norm_eps")
    edit_config(folder, **dict.fromkeys((*old, "tie_word_embeddings"), ...))
    assert hf.load_config(folder) == replace(CONFIGS["mha"], norm_eps=1e-6)


# ------------------------------------------------------------------------------------------ loading


def test_dtype_is_that_of_the_file_unless_said_otherwise(folder):
    model = randomised(CONFIGS["gqa"]).bfloat16()
    hf.save(model, folder)
    assert {p.dtype for p in hf.load(folder).parameters()} == {torch.bfloat16}
    wide = hf.load(folder, dtype=torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.lm_head.weight, model.lm_head.weight.double())
    assert LlamaForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_shards_of_two_models_are_never_taken_for_one(folder, monkeypatch):
    """A save over another model is cut short: what is left is one of them, or does not load."""
    old = saved(folder, max_shard_bytes=SHARD_BYTES)
    replace, left = hf.os.replace, 0
    new = Llama(old.config, seed=9)

    def once(source, target):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        replace(source, target)

    monkeypatch.setattr(hf.os, "replace", once)
    for steps in itertools.count():
        monkeypatch.setattr(hf.os, "replace", replace)
        hf.save(old, folder, max_shard_bytes=SHARD_BYTES)
        monkeypatch.setattr(hf.os, "replace", once)
        left = steps
        try:
            hf.save(new, folder, max_shard_bytes=SHARD_BYTES)
            break
        except KeyboardInterrupt:
            pass
        try:
            found = hf.load(folder)
        except (ValueError, FileNotFoundError):
            continue
        assert same_weights(found, old) or same_weights(found, new), steps
    assert same_weights(hf.load(folder), new) and steps > 3


def test_only_the_tensors_asked_for_are_read(folder, monkeypatch):
    """Counts what is taken from the files; catches reading all and throwing away."""
    model = saved(folder, max_shard_bytes=SHARD_BYTES)
    opened, read = [], []

    class Spy:
        def __init__(self, file, **options):
            opened.append(file.name)
            self.contents = safe_open(file, **options)

        def __enter__(self):
            self.contents.__enter__()
            return self

        def __exit__(self, *error):
            self.contents.__exit__(*error)

        def keys(self):
            return self.contents.keys()

        def get_slice(self, name):
            return self.contents.get_slice(name)

        def get_tensor(self, name):
            read.append(name)
            return self.contents.get_tensor(name)

    monkeypatch.setattr(hf, "safe_open", Spy)
    part = hf.Folder(folder).read(lambda name: name.startswith("model.layers.1."))
    assert len(read) == 9 and all(name.startswith("model.layers.1.") for name in read)
    assert 0 < len(opened) < len(list(folder.glob("*.safetensors")))
    assert part.keys() == set(read)
    assert all(torch.equal(part[name], model.get_parameter(name)) for name in read)


def test_a_tied_head_is_not_stored_but_may_be(folder):
    model = saved(folder, "tied")
    weights = load_file(folder / hf.SINGLE)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # in old files
    save_file(weights, folder / hf.SINGLE)
    back = hf.load(folder)
    assert back.lm_head.weight is back.model.embed_tokens.weight and same_weights(back, model)


@pytest.mark.parametrize("where", ["value", "shape"])
def test_a_head_that_is_not_the_embedding_is_no_tied_one(where, folder):
    """transformers unties with a warning; here the file has to say so. Catches one ignored."""
    model = saved(folder, "tied")
    weights = load_file(folder / hf.SINGLE)
    head = weights["model.embed_tokens.weight"].clone()
    head[3, 5] += 1
    weights["lm_head.weight"] = head if where == "value" else head[:-1]
    save_file(weights, folder / hf.SINGLE)
    said = "write tie_word_embeddings: false" if where == "value" else r"lm_head.weight has shape"
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{said}"):
        hf.load(folder)
    elsewhere = hf.Folder(folder).read(lambda name: ".layers." in name)  # a stage without either
    assert len(elsewhere) == 9 * model.config.num_layers
    if where == "value":
        edit_config(folder, tie_word_embeddings=False)
        back = hf.load(folder)
        assert torch.equal(back.lm_head.weight, head)
        assert torch.equal(back.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_a_folder_read_tensor_by_tensor_is_looked_through_once(folder, monkeypatch):
    """Mutant: its whole table of contents, and a model on meta, for each of them."""
    saved(folder, "tied")
    expected, shapes, times = hf.Folder(folder).read(), hf._expected_shapes, []
    monkeypatch.setattr(hf, "_expected_shapes", lambda *args: times.append(1) or shapes(*args))
    source = hf.Folder(folder)
    for name, tensor in expected.items():
        assert source.read({name}.__contains__)[name].equal(tensor)
    assert len(expected) > 9 and len(times) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_several_types_are_refused_or_made_one(dtype, folder):
    saved(folder)
    weights = load_file(folder / hf.SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / hf.SINGLE)
    said = "is bfloat16, but .* is float32; say which `dtype`"
    if dtype != torch.bfloat16:
        said = "is stored as .*8.*: quantised weights are not supported"
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name} {said}"):
        hf.load(folder)
    if dtype == torch.bfloat16:
        assert {p.dtype for p in hf.load(folder, torch.float32).parameters()} == {torch.float32}
    else:
        with pytest.raises(ValueError, match="quantised"):
            hf.load(folder, torch.float32)


# ------------------------------------------------------------------------------------------- saving


def test_a_state_dict_needs_its_config(folder):
    model = randomised(CONFIGS["tied"])
    with pytest.raises(ValueError, match="pass config"):
        hf.save(model.state_dict(), folder)
    hf.save(model.state_dict(), folder, model.config)
    assert same_weights(hf.load(folder), model)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("model.norm.weight"), "missing model.norm.weight; not known nothing"),
        (lambda s: s.update(extra=torch.ones(1)), "missing nothing; not known extra"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight has shape \(3,\), but the config says \(48,\)",
        ),
        (lambda s: s.update({"lm_head.weight": s["lm_head.weight"].to("meta")}), "without data"),
    ],
    ids=["missing", "foreign", "shape", "meta"],
)
def test_a_state_dict_that_is_not_the_model_is_not_written(change, message, folder):
    model = randomised(CONFIGS["gqa"])
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        hf.save(state, folder, model.config)
    assert not folder.exists()


def test_saving_again_leaves_no_stale_shard_and_no_foreign_file_behind(folder):
    saved(folder, max_shard_bytes=SHARD_BYTES)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    model = saved(folder, "mqa")
    assert {f.name for f in folder.iterdir()} == {"config.json", hf.SINGLE, "tokenizer.json"}
    assert same_weights(hf.load(folder), model)
    saved(folder, "gqa", max_shard_bytes=SHARD_BYTES)
    assert not (folder / hf.SINGLE).exists()
    assert same_weights(hf.load(folder), randomised(CONFIGS["gqa"], torch.float32))


def test_a_failing_save_leaves_the_old_checkpoint_as_it_was(folder, monkeypatch):
    """Catches: writing in place. The disk is full in the middle of the second shard."""
    old = saved(folder, "mqa", max_shard_bytes=SHARD_BYTES)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    calls = []

    def full_disk(tensors, file, metadata):
        calls.append(file)
        if len(calls) == 2:
            file.write_bytes(b"half")
            raise OSError("No space left on device")
        save_file(tensors, file, metadata)

    monkeypatch.setattr(hf, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        saved(folder, "gqa", max_shard_bytes=SHARD_BYTES)
    assert len(calls) == 2
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert same_weights(hf.load(folder), old)
    assert os.listdir(folder.parent) == [folder.name], "nothing is left lying around"


def test_weights_come_before_the_index_that_names_them(folder, monkeypatch):
    """A reader that comes in between must not find an index whose files are not there yet."""
    saved(folder, "mqa", max_shard_bytes=SHARD_BYTES)
    moved = []
    monkeypatch.setattr(os, "replace", lambda new, _: moved.append(new.suffix))
    saved(folder, "gqa", max_shard_bytes=SHARD_BYTES)
    assert moved.index(".json") > max(i for i, s in enumerate(moved) if s == ".safetensors")


def test_a_shard_may_be_full():
    one, two = torch.zeros(2, 5)
    assert [list(s) for s in hf._split({"a": one, "b": two}, 40)] == [["a", "b"]]
    assert [list(s) for s in hf._split({"a": one, "b": two}, 39)] == [["a"], ["b"]]


def test_files_have_ordinary_permissions(folder):
    saved(folder)
    assert len({f.stat().st_mode for f in folder.iterdir()}) == 1


def test_bad_targets_are_refused(folder):
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be positive"):
        saved(folder, max_shard_bytes=0)
    folder.write_text("in the way", encoding="utf-8")
    with pytest.raises(ValueError, match="is a file; a checkpoint is a folder"):
        saved(folder)
    assert folder.read_text(encoding="utf-8") == "in the way" and os.listdir(folder.parent) == [
        folder.name
    ]


# ------------------------------------------------------------------------------- broken checkpoints

OTHER_MODELS = [  # settings that make another function of a Llama, from their relatives
    dict(sliding_window=4096),
    dict(logits_scaling=8.0),
    dict(residual_multiplier=0.22),
    dict(final_logit_softcapping=30.0),
    dict(use_qk_norm=True),
    dict(attention_dropout=0.1),
    dict(num_local_experts=8),
    dict(no_rope_layers=[0, 1]),
    dict(layer_types=["full_attention", "sliding_attention"]),
    dict(per_layer_config={"0": {"hidden_act": "gelu"}}),
    dict(partial_rotary_factor=0.5),
    dict(attention_chunk_size=8192),
]
BAD_CONFIGS = [
    (dict(model_type="mistral"), "model_type='mistral'; only 'llama'"),
    (dict(model_type=...), "model_type=None; only 'llama'"),
    (dict(attention_bias=True), "attention_bias=True is not supported"),
    (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported, only 'silu'"),
    (dict(quantization_config={"bits": 4}), "quantization_config=.* is not supported"),
    (dict(rope_scaling={"type": "yarn", "factor": 2.0}), "rope_type='yarn' is not supported"),
    (dict(rope_scaling={"rope_type": "llama3"}), "'factor' is missing"),
    (dict(hidden_size=...), "'hidden_size' is missing"),
    (dict(hidden_size="48"), "config.json: "),
    (dict(num_key_value_heads=4), "num_kv_heads=4 does not divide num_heads=6"),
    (dict(num_hidden_layers=4), "no weights for model.layers.3.input_layernorm.weight, .* 6 more"),
    (dict(num_hidden_layers=2), "weights for model.layers.2.* knows nothing of"),
    (dict(intermediate_size=81), r"down_proj.weight has shape \(48, 80\), but .* \(48, 81\)"),
    *((change, f"{name}=.* is not supported") for change in OTHER_MODELS for name in change),
    (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "from layer to layer"),
    (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5: use 1"),
    (dict(rope_parameters=[1]), "config.json: "),
    (dict(tie_word_embeddings="no"), "tie_word_embeddings='no' is neither true nor false"),
    (dict(num_hidden_layers=10**7), "num_hidden_layers=10000000, but there are no weights"),
    (dict(num_attention_heads=10**12), "num_attention_heads=1000000000000 is no whole number"),
    (dict(num_attention_heads=True), "num_attention_heads=True is no number"),
    (dict(hidden_size=48.0), "hidden_size=48.0 is no whole number"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan is no number"),
    (dict(rope_theta="1e4"), "rope_theta='1e4' is no number"),
    (dict(vocab_size=2**24, hidden_size=2**24, head_dim=2**24), "(embed_tokens|no model|lm_head)"),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("changes, message", BAD_CONFIGS)
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
        try:
            assert hf.load_config(folder) != before, name
        except ValueError as error:
            assert "not supported" in str(error) or name in str(error)
        (folder / "config.json").write_text(config, encoding="utf-8")


def test_settings_that_change_nothing_are_no_hindrance(folder):
    """All that transformers 5 writes by itself, and what relatives leave behind, switched off."""
    saved(folder)
    mine = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit_config(folder, **(TheirConfig().to_dict() | mine | {"pretraining_tp": 4}))
    off = dict(sliding_window=4096, use_sliding_window=False, max_window_layers=28)
    off |= dict(layer_types=["full_attention"] * 3, logits_scaling=1.0, num_experts=0)
    edit_config(folder, **off, temperature=0.6, unsloth_version="2024.9")
    assert hf.load_config(folder) == CONFIGS["gqa"]


def cut(file, keep: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def drop_tensor(file) -> None:
    weights = load_file(file)
    weights.pop(min(weights))
    save_file(weights, file)


BAD_FILES = [
    (lambda f: cut(f / hf.SINGLE), r"model.safetensors: not a whole safetensors file .* \d+ bytes"),
    (lambda f: cut(f / hf.SINGLE, 0.0001), "not a whole safetensors file"),
    (lambda f: (f / hf.SINGLE).write_bytes(b""), "not a whole safetensors file .* 0 bytes"),
    (
        lambda f: (f / hf.SINGLE).write_bytes(struct.pack("<Q", 2**60)),
        "not a whole safetensors file",
    ),
    (lambda f: (f / hf.SINGLE).unlink(), "neither model.safetensors nor"),
    (lambda f: drop_tensor(f / hf.SINGLE), "no weights for lm_head.weight"),
    (lambda f: (f / "config.json").unlink(), "config.json: cannot be read .No such file"),
    (lambda f: cut(f / "config.json"), "config.json: not JSON"),
    (lambda f: os.truncate(f / "config.json", 1 << 40), "config.json: not JSON .*over 64 MiB"),
    (
        lambda f: (f / "config.json").write_text("[]", encoding="utf-8"),
        "holds a list, not a JSON object",
    ),
    (lambda f: (f / hf.INDEX).write_text("{}", encoding="utf-8"), "index.json: no weight_map"),
]


@pytest.mark.parametrize("damage, message", BAD_FILES)
def test_damaged_files_are_named(damage, message, folder):
    saved(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


def test_damaged_shards_are_named(folder):
    saved(folder, max_shard_bytes=SHARD_BYTES)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    drop_tensor(second)
    with pytest.raises(ValueError, match=f"{second.name}: no .*, although .*index.json says"):
        hf.load(folder)
    first.unlink()
    with pytest.raises(ValueError, match=f"{first.name}: the file is missing"):
        hf.load(folder)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="nowhere/config.json: cannot be read"):
        hf.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/passwd", "", ".", 7, None, [], "a\0b.safetensors"]
    + ["x" * 300 + ".safetensors", "sub/dir.safetensors", "model.bin"],
)
def test_an_index_leads_to_files_of_its_folder_only(file, folder):
    """Catches other folders, devices and names that the system cannot even look up."""
    saved(folder, max_shard_bytes=SHARD_BYTES)
    (folder.parent / "secret.safetensors").write_bytes(b"")
    index = json.loads((folder / hf.INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["lm_head.weight"] = file
    (folder / hf.INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json: lm_head.weight is said to be in"):
        hf.load(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_a_shard_that_is_no_file_is_missing(make, folder):
    """A pipe would be waited for without end, a link to itself followed."""
    saved(folder, max_shard_bytes=SHARD_BYTES)
    first = min(folder.glob("*.safetensors"))
    first.unlink()
    make(first)
    with pytest.raises(ValueError, match=f"{first.name}: the file is missing"):
        hf.load(folder)


# ------------------------------------------------------------------------- hypothesis hands it over
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([10**30, 2**63, [], {}, [1], {"a": {}}, "../x", "F32", "llama3", [[[]]]]),
)
SMALL = replace(CONFIGS["tied"], num_layers=1)


@pytest.fixture(scope="module")
def valid():
    """(config, index, weights) of a checkpoint in two shards, as bytes."""
    model = Llama(SMALL)
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    config = json.dumps(config_json(SMALL, torch.float32)).encode()
    index = json.dumps({"weight_map": dict.fromkeys(state, "model-1.safetensors")}).encode()
    return {"config.json": config, hf.INDEX: index, "model-1.safetensors": save(state)}


def mutated(draw, document: dict) -> bytes:
    """The JSON object with some entries replaced, removed or added, one level down as well."""
    for _ in range(draw(st.integers(1, 3))):
        inner = [v for v in document.values() if isinstance(v, dict)]
        owner = draw(st.sampled_from([document, *inner]))
        key = draw(st.sampled_from([*owner, "extra", "sliding_window", "rope_parameters"]))
        if draw(st.integers(0, 3)):
            owner[key] = deepcopy(draw(JUNK))
        else:
            owner.pop(key, None)
    return json.dumps(document).encode()


def hand_over(folder, valid, data) -> None:
    """One file of the three is another; it loads, finite in shape, or is refused by name."""
    name = data.draw(st.sampled_from(sorted(valid)))
    content = valid[name]
    how = data.draw(st.sampled_from(["mutated", "cut", "bytes", "flipped"]))
    if how == "cut":
        content = content[: data.draw(st.integers(0, len(content)))]
    elif how == "bytes":
        content = data.draw(st.binary(max_size=100))
    elif how == "flipped":
        at = data.draw(st.integers(0, min(len(content), 3000) - 1))
        flipped = content[at] ^ data.draw(st.integers(1, 255))
        content = content[:at] + bytes([flipped]) + content[at + 1 :]
    elif name.endswith(".json"):
        content = mutated(data.draw, json.loads(content))
    else:
        length = struct.unpack("<Q", content[:8])[0]
        header = mutated(data.draw, json.loads(content[8 : 8 + length]))
        content = struct.pack("<Q", len(header)) + header + content[8 + length :]
    folder.mkdir(exist_ok=True)
    for file, whole in (valid | {name: content}).items():
        (folder / file).write_bytes(whole)
    try:
        model = hf.load(folder)
    except ValueError as error:
        assert str(folder) in str(error), error
    else:
        assert len({p.dtype for p in model.parameters()}) == 1
        assert not any(p.is_meta for p in model.parameters())


lenient = dict(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@settings(max_examples=50, **lenient)
@given(data=st.data())
def test_whatever_a_stranger_hands_over_loads_or_is_refused_by_name(valid, tmp_path, data):
    hand_over(tmp_path / "given", valid, data)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@settings(max_examples=2000, **lenient)
@given(data=st.data())
def test_whatever_many_strangers_hand_over_loads_or_is_refused_by_name(valid, tmp_path, data):
    hand_over(tmp_path / "given", valid, data)
