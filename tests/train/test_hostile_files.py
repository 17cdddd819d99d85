"""Files that are handed over and are not what they should be: only errors of ours, and soon.

Each kind is fuzzed three ways: a valid file with pieces put in the place of others, any JSON, and
any bytes. What comes out is the thing itself or a `ValueError` of one line that names the file.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipar.train.config import TrainConfig
from minipar.train.corpus import load_corpus
from minipar.train.tokenizer import ByteTokenizer, load_tokenizer, try_out

WORDS = {f"w{i}": i for i in range(8)}
TOKENIZER = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, "w0")).to_str())
TOKENIZER["pre_tokenizer"] = {"type": "WhitespaceSplit"}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["\ud800", "\0", "tokenizer.json", "(a+)+$", [], {}])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw: Callable, valid: dict) -> dict:
    """`valid` with other values in the place of one or two, at any depth."""
    tree = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 2))):
        node = tree
        while True:
            key = draw(st.sampled_from(sorted(node)))
            if not isinstance(node[key], dict) or not node[key] or draw(st.booleans()):
                break
            node = node[key]
        node[key] = draw(anything)
    return tree


def contents(valid: dict) -> st.SearchStrategy[bytes]:
    """What may be in the file: mostly nearly valid, sometimes cut short, sometimes anything."""
    as_json = (changed(valid) | anything).map(lambda tree: json.dumps(tree).encode())
    deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b'{"text": 1' + b"0" * 9000 + b"}"])
    cut = st.tuples(as_json, st.integers(0, 400)).map(lambda both: both[0][: both[1]])
    return as_json | cut | deep | st.binary(max_size=60)


def read_config(path: Path) -> None:
    config = TrainConfig.load(path)
    try:
        config.check()
    except ValueError as error:  # of a value that is a value: it is named as a flag
        raise ValueError(f"{path}: {error}") from None


def read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    assert 0 < tokenizer.vocab_size <= 1 << 22
    tokenizer.decode(tokenizer.encode("w1 w2 aaaaaaaa \u00e4"))


KINDS = {
    "config.json": (asdict(TrainConfig()), read_config),
    "tokenizer.json": (TOKENIZER, read_tokenizer),
    "a.jsonl": (
        {"text": "to be or not to be", "id": 3, "meta": {"lang": "en"}},
        lambda path: load_corpus(str(path), ByteTokenizer()),
    ),
}


def fuzz(folder: Path, name: str, count: int) -> None:
    valid, read = KINDS[name]
    outcomes = set()

    @settings(
        max_examples=count,
        deadline=5000,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(contents(valid))
    def one(data: bytes) -> None:
        path = folder / name
        path.write_bytes(data)
        try:
            read(path)
            outcomes.add("read")
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 2000
            outcomes.add("refused")

    one()
    (folder / name).write_text(json.dumps(valid), encoding="utf-8")
    read(folder / name)
    assert "refused" in outcomes


@pytest.mark.parametrize("name", KINDS)
def test_a_hostile_file_is_read_or_refused(tmp_path, name):
    fuzz(tmp_path, name, 50)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", KINDS)
def test_a_hostile_file_is_read_or_refused_many_times(tmp_path, name):
    fuzz(tmp_path, name, 2000)


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
WORDLEVEL = TOKENIZER["model"]
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "////////"}


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a+)+$"}}}, "retry-limit-in-match over"),
        ({"model": {**BPE, "continuing_subword_prefix": "##"}}, "is no tokenizer.json"),
        ({"normalizer": CHARSMAP}, "more memory"),
        ({"model": {**WORDLEVEL, "vocab": {"w0": 2**32 - 1}}}, "4,294,967,296 ids"),
        ({"model": {**WORDLEVEL, "vocab": {"w1": 1}}}, "Missing [UNK] token"),
    ],
    ids=["regex", "panic", "memory", "ids", "unknown"],
)
def test_a_tokenizer_that_would_end_its_reader_is_refused(tmp_path, changes, says):
    """Mutant: read in this very process, the third of them ends it."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**TOKENIZER, **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer.json") as refused:
        try_out(path)
    assert says in str(refused.value) and "\n" not in str(refused.value)
