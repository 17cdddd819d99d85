"""From text on disk, or from a stream, to two long tensors of tokens.

    corpus = load_corpus("stdlib", ByteTokenizer())

The order of documents, and which of them are kept for validation, depend on their names alone. So
every rank on every machine has the same text. A document is in one part only.
"""

import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.text import one_line
from minipar.train.tokenizer import ByteTokenizer, Tokenizer

MIN_TOKENS = 2  # of each part: one input and its target
STREAM_LIMIT_BYTES = 100_000_000  # a streamed dataset may have no end
WILDCARDS = set("*?[")
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from, and tokens to validate on."""

    train: Tensor  # 1-D; uint8 where the vocabulary fits, else int32
    validation: Tensor  # 1-D, the same dtype
    num_files: int  # 0 for a streamed dataset
    num_bytes: int  # of text, as UTF-8
    description: str  # "618 files, 11.2 MB of the Python standard library"


class Document(NamedTuple):
    """A piece of text of its own."""

    file: str  # "" where it came from no file
    name: str  # relative, so alike on all machines: validation is drawn by it
    text: str | None  # None: a binary file, to be counted and left out
    is_damaged: bool = False  # U+FFFD stands for bytes that are not UTF-8


def load_corpus(
    source: str,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
    limit_bytes: int | None = None,
) -> Corpus:
    """Read and tokenize `source`; the same tokens in the same order on every rank and machine.

    `source` is one of
    - `stdlib`: every .py file of this Python's standard library, without tests and packages;
    - a file, a glob, or a folder: all files below it that are neither hidden nor binary;
    - a .jsonl file, with a document in the field "text" of each line. A .json file of such lines,
      or of an array of such objects, is read alike;
    - `hf:NAME` or `hf:NAME:SPLIT`: streamed by the optional `datasets` package, 100 MB at most
      unless `limit_bytes` says otherwise.

    Documents are drawn for validation by a hash of seed and name until `validation_fraction` of
    the tokens is reached. A single document gives its end. `limit_bytes` reads only so much text.

    Raises `ValueError`, naming the source, where it is missing, empty, malformed or too short.
    """
    if not 0 < validation_fraction <= 0.5:
        raise ValueError(f"validation_fraction={validation_fraction} is not in (0, 0.5]; try 0.05")
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit_bytes={limit_bytes} leaves no text; use a positive number or None")
    if limit_bytes is None and source.startswith("hf:"):
        limit_bytes = STREAM_LIMIT_BYTES

    names: list[str] = []
    tokens: list[Tensor] = []
    files: set[str] = set()
    num_bytes = num_skipped = num_damaged = 0
    try:
        documents, label = _open(source)
        for document in documents:
            if document.text is None:
                num_skipped += 1
                continue
            data = document.text.encode("utf-8", errors="replace")
            data = data if limit_bytes is None else data[: limit_bytes - num_bytes]
            if data:
                text = data.decode("utf-8", errors="ignore")  # the limit may cut a character
                names.append(document.name)
                tokens.append(_tokenize(text, tokenizer))
                files.add(document.file)
                num_bytes += len(data)
                num_damaged += document.is_damaged
            if num_bytes == limit_bytes:
                break
    except OSError as error:
        at = error.filename or source
        raise ValueError(f"cannot read {at}: {error.strerror or one_line(error)}") from error

    if not num_bytes:
        raise ValueError(f"{source} holds no text ({_count(num_skipped, 'binary file')} skipped)")
    num_tokens = sum(map(len, tokens))
    if num_tokens < 2 * MIN_TOKENS:
        raise ValueError(
            f"{source} is too short: {_count(num_tokens, 'token')}; training and validation need "
            f"{MIN_TOKENS} each"
        )
    files.discard("")
    counts = [_count(len(files), "file")] if files else []
    counts += [_count(len(names), "document")] if len(names) != len(files) else []
    notes = {
        f"{_count(num_skipped, 'binary file')} skipped": num_skipped,
        f"{_count(num_damaged, 'file')} not UTF-8": num_damaged,
        f"cut at {size_of(num_bytes)}": num_bytes == limit_bytes,
        "nothing between documents: the tokenizer names no token that ends one": (
            tokenizer.separator is None and not isinstance(tokenizer, ByteTokenizer)
        ),
    }
    told = ", ".join(note for note, holds in notes.items() if holds)
    description = f"{', '.join(counts)}, {size_of(num_bytes)} of {label}"
    description += f" ({told})" if told else ""
    train, validation = _split(names, tokens, validation_fraction, seed)
    return Corpus(train, validation, len(files), num_bytes, description)


# ---------------------------------------------------------------------- documents
def _open(source: str) -> tuple[Iterator[Document], str]:
    """Return the documents of a source in their order, and what to call the source."""
    if source.startswith("hf:"):
        return _stream(source), source
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, NOT_STDLIB) if path.suffix == ".py"]
        return _read(paths, root), "the Python standard library"
    path = Path(os.path.expanduser(source))
    if source and path.is_dir():
        return _read(_walk(path), path), source
    if source and path.is_file():
        return _read([path], path.parent, must_be_text=True), source
    if not WILDCARDS & set(source):
        raise ValueError(
            f"no file or folder {source!r}; --data takes stdlib, a file, a folder, a glob, "
            f"a .jsonl file or hf:NAME"
        )
    found = [path for path in map(Path, glob.glob(str(path), recursive=True)) if path.is_file()]
    if not found:
        raise ValueError(f"no file matches {source!r}")
    # Names begin where the first wildcard stands.
    fixed = itertools.takewhile(lambda part: not WILDCARDS & set(part), path.parent.parts)
    return _read(found, Path(*fixed)), source


def _walk(root: Path, left_out: set[str] = frozenset()) -> list[Path]:
    """Return the files below `root`, without hidden ones and the folders called `left_out`."""

    def unreadable(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, files in os.walk(root, onerror=unreadable):
        # os.walk descends into what is left in this very list.
        folders[:] = [f for f in folders if f[0] != "." and f not in {"__pycache__", *left_out}]
        found += [Path(folder, name) for name in files if name[0] != "."]
    return [path for path in found if path.is_file()]


def _read(paths: list[Path], root: Path, must_be_text: bool = False) -> Iterator[Document]:
    """Yield the documents of files; with `must_be_text`, a file that is not text is refused."""
    files = {path.relative_to(root).as_posix(): path for path in paths}
    for name, path in sorted(files.items()):
        data = path.read_bytes()
        is_text, is_damaged = b"\0" not in data, False
        if not is_text and must_be_text:
            raise ValueError(f"{path} is binary (it holds NUL bytes); expected text")
        try:
            text = data.decode("utf-8") if is_text else None
        except UnicodeDecodeError as error:
            if must_be_text:
                raise ValueError(
                    f"{path} is not UTF-8 ({error}); convert it, as by iconv -f LATIN1 -t UTF-8"
                ) from None
            text, is_damaged = data.decode("utf-8", errors="replace"), True
        rows = _rows(path, text) if text and path.suffix in (".json", ".jsonl") else None
        if rows is None:
            yield Document(name, name, text, is_damaged)
            continue
        for number, row in rows:
            yield Document(name, f"{name}:{number}", _text_of(row, f"{path}:{number}"))


def _rows(path: Path, text: str) -> Iterator[tuple[int, Any]] | None:
    """Return the numbered rows of a file of JSON documents; None for any other JSON."""
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix == ".jsonl" or (len(lines) > 1 and _has_text(_loaded(lines[0][1]))):
        return ((number, _loaded(line, f"{path}:{number}")) for number, line in lines)
    whole = _loaded(text)
    if isinstance(whole, list) and whole and all(map(_has_text, whole)):
        return enumerate(whole, start=1)
    return iter([(1, whole)]) if _has_text(whole) else None


def _loaded(text: str, where: str = "") -> Any:
    """Return what a text of JSON says; None where it is none, or `ValueError` naming `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if where:
            raise ValueError(f"{where}: no JSON: {one_line(error)}") from None
        return None


def _has_text(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("text"), str)


def _text_of(row: Any, where: str) -> str:
    if not _has_text(row):
        fields = ", ".join(map(repr, row))[:200] if isinstance(row, dict) else "none"
        raise ValueError(f"{where}: no string in field 'text' (its fields: {fields})")
    return row["text"]


def _stream(source: str) -> Iterator[Document]:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f'{source} needs the datasets package: pip install "minipar[datasets]"'
        ) from None
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield Document("", str(number), _text_of(row, f"row {number}"))
    except Exception as error:  # an unknown name or split, no network: each has its own type
        raise ValueError(f"cannot read {source}: {one_line(error)}") from error


# ---------------------------------------------------------------------- tokens
def _tokenize(text: str, tokenizer: Tokenizer) -> Tensor:
    dtype = torch.uint8 if tokenizer.vocab_size <= 256 else torch.int32
    ids = tokenizer.encode(text)
    if isinstance(ids, bytes) and ids:  # without a list of Python integers in between
        tokens = torch.frombuffer(bytearray(ids), dtype=torch.uint8).to(dtype)
    else:
        tokens = torch.tensor(list(ids), dtype=dtype)
    if tokenizer.separator is None:
        return tokens
    return torch.cat([tokens, torch.tensor([tokenizer.separator], dtype=dtype)])


def _split(
    names: list[str], tokens: Sequence[Tensor], fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens of training and of validation, each at least `MIN_TOKENS` long."""
    total = sum(map(len, tokens))

    def draw(i: int) -> bytes:
        return hashlib.sha256(f"{seed}/{names[i]}".encode(errors="backslashreplace")).digest()

    chosen: set[int] = set()
    size = 0
    order = sorted(range(len(names)), key=draw)
    # First without the documents that overshoot by much; where all do, up to half of the text.
    for most in (1.2 * fraction * total, total / 2):
        for i in order:
            if size < fraction * total and i not in chosen and size + len(tokens[i]) <= most:
                chosen.add(i)
                size += len(tokens[i])
    if size >= MIN_TOKENS:
        kept = [t for i, t in enumerate(tokens) if i not in chosen]
        return torch.cat(kept), torch.cat([t for i, t in enumerate(tokens) if i in chosen])
    everything = torch.cat(list(tokens))
    cut = total - max(MIN_TOKENS, round(fraction * total))
    return everything[:cut], everything[cut:]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_of(num_bytes: int) -> str:
    """Return a number of bytes for people: "11.2 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return _count(num_bytes, "byte")
