"""The corpus: text from any source that a user may name, split into two parts for good."""

import json
import sys
import types

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.train.corpus import load_corpus
from minipar.train.tokenizer import ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()


def text_of(tokens: torch.Tensor) -> str:
    return BYTES.decode(tokens)


# ------------------------------------------------------------------------------------ tokenizers


def word_tokenizer(folder, *specials):
    """Write a tokenizer.json of a few words; return its path."""
    words = {word: i for i, word in enumerate(["[UNK]", *specials, "one", "two", "three"])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_tokenizer_file_ends_each_document_with_its_separator(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, "</s>"))
    assert tokenizer.vocab_size == 5
    assert tokenizer.separator == 1
    assert tokenizer.decode(tokenizer.encode("three one two")) == "three one two"
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"text": "one two three"}\n' * 20, encoding="utf-8")
    corpus = load_corpus(str(lines), tokenizer)
    assert corpus.train.dtype == torch.uint8  # and int32 where the vocabulary is larger
    assert corpus.train.tolist() == [2, 3, 4, 1] * 19  # the mutant without separators has no 1
    assert corpus.validation.tolist() == [2, 3, 4, 1]


def test_the_end_of_a_document_is_what_the_tokenizer_says_or_nothing_and_said(tmp_path):
    """A name that is not among the usual ones, beside one that is. Mutants: the usual name first;
    documents joined without a word; a run that is resumed has forgotten the name."""
    end, lines = "<｜end｜>", tmp_path / "text.jsonl"
    lines.write_text("\n".join([json.dumps({"text": "one two"})] * 8), encoding="utf-8")
    says = "nothing between documents: the tokenizer names no token that ends one"
    word_tokenizer(tmp_path, end)
    assert says in load_corpus(str(lines), load_tokenizer(tmp_path)).description
    assert says not in load_corpus(str(lines), BYTES).description
    word_tokenizer(tmp_path, "</s>", end)
    for told in (end, {"content": end, "lstrip": False}):
        config = json.dumps({"eos_token": told})
        (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
        assert load_tokenizer(tmp_path).separator == 2
    (tmp_path / "run").mkdir()
    load_tokenizer(tmp_path).save(tmp_path / "run/tokenizer.json")
    assert load_tokenizer(tmp_path / "run").separator == 2


def test_a_text_is_encoded_whole_and_always_alike(tmp_path):
    """Mutants: what the file says of truncation, padding or dropout is obeyed."""
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("ab" * 30) == [2] * 30


def test_bad_tokenizers(tmp_path):
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    for name in ("nowhere", "bad.json"):
        with pytest.raises(ValueError, match=f"{name} is no tokenizer.json: "):
            load_tokenizer(tmp_path / name)


# ---------------------------------------------------------------------------------------- corpus


def parts_of(source, **options) -> list[str]:
    """The text of training, and that of validation."""
    corpus = load_corpus(str(source), BYTES, **options)
    return [text_of(part) for part in (corpus.train, corpus.validation)]


def make_folder(root, num_files=40):
    """Forty small files in three folders, each with its own name as text."""
    for i in range(num_files):
        path = root / f"{'abc'[i % 3]}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[file {i:02}]", encoding="utf-8")
    return root


def test_folder_is_split_by_file_in_the_order_of_names(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "binary.bin").write_bytes(b"text\0text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("secret", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    found = load_corpus(str(tmp_path), BYTES).description
    assert found == f"0.00036 MB of {tmp_path}, 40 documents, 2 files without text skipped"
    parts = [part[1:-1].split("][") for part in parts_of(tmp_path)]
    expected = [f"file {i:02}" for start in range(3) for i in range(start, 40, 3)]
    assert sorted(parts[0] + parts[1]) == sorted(expected)  # whole files, each in one part
    assert len(parts[1]) == 2
    for part in parts:
        assert part == [name for name in expected if name in part]


def test_a_text_that_links_show_again_is_read_once(tmp_path):
    """Mutant: a glob that goes round in a circle reads each text 41 times."""
    found = parts_of(make_folder(tmp_path))
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "b/link.txt").symlink_to(tmp_path / "a/00.txt")
    assert parts_of(f"{tmp_path}/**") == parts_of(tmp_path) == found


def test_split_depends_on_relative_names_alone(tmp_path, monkeypatch):
    """So a folder, its copy and its glob agree. Mutant: the whole path is hashed."""
    first, second = make_folder(tmp_path / "here"), make_folder(tmp_path / "there")
    found = parts_of(first)
    assert found == parts_of(second) == parts_of(f"{first}/**/*.txt")
    monkeypatch.chdir(first / "a")
    assert found == parts_of("../**/*.txt") == parts_of("./../*/*.txt")
    assert "".join(parts_of("*.txt")).count("file") == 14


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_both_parts_hold_something_for_any_sizes(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    lines = [json.dumps({"text": "x" * size}) for size in sizes]
    path.write_text("\n\n".join(lines), encoding="utf-8")  # blank lines are no documents
    if sum(sizes) < 4:
        with pytest.raises(ValueError, match="too short"):
            load_corpus(str(path), BYTES)
        return
    parts = parts_of(path)
    assert min(map(len, parts)) >= 2 and sum(map(len, parts)) == sum(sizes)


def test_a_single_file_gives_its_end_and_a_limit_cuts_between_characters(tmp_path):
    path = tmp_path / "one[1].txt"  # which would be another file as a glob
    path.write_text("0123456789" * 10, encoding="utf-8")
    assert parts_of(path) == ["0123456789" * 9 + "01234", "56789"]
    path.write_text("ä" * 50, encoding="utf-8")
    assert "".join(parts_of(path, limit_bytes=21)) == "ä" * 10


LINE = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", LINE + b'{"text": "cut', r"a\.jsonl:2: no JSON"),
        ("a.jsonl", LINE + b'{"body": "x"}', r"a\.jsonl:2: no string in .*: {'body': 'x'}"),
        ("a.jsonl", LINE + b"\xff\xfe", r"a\.jsonl is not text in UTF-8"),
        ("a.json", b'[{"id": 1}, {"text": "x"}]', r"a\.json:1: no string in field 'text'"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of git-lfs: run"),
        ("empty.txt", b"", "is too short: 0 tokens"),
        ("image.png", b"\x89PNG\0\0", "image.png is not text in UTF-8"),
        ("*.nothing", None, "no file or folder"),
        ("", None, "is too short: 0 tokens"),  # the folder itself, empty
    ],
)
def test_bad_sources(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(str(tmp_path / name), BYTES)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_streamed_dataset(monkeypatch):
    endless, calls = ({"text": f"<{i:04}>"} for i in range(sys.maxsize)), []
    load = lambda *args, **options: calls.append((args, options)) or endless  # noqa: E731
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    corpus = load_corpus("hf:some/name:validation", BYTES, limit_bytes=6_000)
    assert calls == [(("some/name",), dict(split="validation", streaming=True))]
    assert len(corpus.train) + len(corpus.validation) == 6_000
    assert next(endless) == {"text": "<1000>"}  # nothing past the limit was fetched


def test_json_of_documents_is_read_as_documents(tmp_path):
    """Lines or an array, whatever the name. Mutant: the model learns {"text": "."""
    documents = [{"src": "www", "text": f"<{i:03}>", "id": i} for i in range(100)]
    lines = "\n".join(map(json.dumps, documents))
    found = {}
    for name, text in {
        "a.jsonl": lines,
        "a.json": lines + "\n",
        "a.JSONL": "\ufeff" + lines,  # Windows puts a mark before the text
        "a.ndjson": lines,
        "b.json": json.dumps(documents, indent=2),
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        corpus = load_corpus(str(tmp_path / name), BYTES)
        found[name] = sorted(text_of(torch.cat([corpus.train, corpus.validation])).split(">"))
        assert corpus.description.endswith("100 documents")
    assert all(parts == found["a.jsonl"] for parts in found.values())
    for plain in (json.dumps({"rows": documents}), "[1,\n2]", "{not JSON"):  # like all text
        (tmp_path / "e.json").write_text(plain, encoding="utf-8")
        corpus = load_corpus(str(tmp_path / "e.json"), BYTES)
        assert not corpus.description.endswith("documents")
