"""From text on disk, or from a stream, to two long tensors of tokens.

    corpus = load_corpus("stdlib", ByteTokenizer())

The order of documents, and which of them are kept for validation, depend on their names alone. So
every rank on every machine has the same text. A document is in one part only.
"""

import glob
import hashlib
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

VALIDATION = 0.05  # of the tokens
MIN_TOKENS = 2  # of each part: one input and its target
STREAM_LIMIT_BYTES = 100_000_000  # a streamed dataset may have no end
LEFT_OUT = {"__pycache__"}
NOT_STDLIB = LEFT_OUT | {"test", "tests", "idle_test", "site-packages", "dist-packages"}


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
    text: str | None  # None: a file that is no text, to be counted and left out


def load_corpus(source: str, tokenizer: Tokenizer, *, limit_bytes: int | None = None) -> Corpus:
    """Read and tokenize `source`; the same tokens in the same order on every rank and machine.

    `source` is one of
    - `stdlib`: every .py file of this Python's standard library, without tests and packages;
    - a file, a glob, or a folder: all files below it that are neither hidden nor binary;
    - a .jsonl file, with a document in the field "text" of each line. A .json file of such lines,
      or of an array of such objects, is read alike;
    - `hf:NAME` or `hf:NAME:SPLIT`: streamed by the optional `datasets` package, 100 MB at most.

    Documents are drawn for validation by a hash of their names until `VALIDATION` of the tokens is
    reached. A single document gives its end. `limit_bytes` reads only so much text.

    Raises `ValueError`, naming the source, where it is missing, empty, malformed or too short.
    """
    if limit_bytes is None and source.startswith("hf:"):
        limit_bytes = STREAM_LIMIT_BYTES
    names: list[str] = []
    tokens: list[Tensor] = []
    files: set[str] = set()
    num_bytes = num_skipped = 0
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
            if num_bytes == limit_bytes:
                break
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or source}: {one_line(error)}") from error

    skipped = f"{_count(num_skipped, 'file')} without text skipped"
    if not num_bytes:
        raise ValueError(f"{source} holds no text ({skipped})")
    num_tokens = sum(map(len, tokens))
    if num_tokens < 2 * MIN_TOKENS:
        raise ValueError(
            f"{source} is too short: {_count(num_tokens, 'token')}; training and validation need "
            f"{MIN_TOKENS} each"
        )
    files.discard("")
    counts = [_count(len(files), "file")] if files else []
    counts += [_count(len(names), "document")] if len(names) != len(files) else []
    notes = [skipped] if num_skipped else []
    notes += [f"cut at {size_of(num_bytes)}"] if num_bytes == limit_bytes else []
    if tokenizer.separator is None and not isinstance(tokenizer, ByteTokenizer):
        notes.append("nothing between documents: the tokenizer names no token that ends one")
    description = f"{', '.join(counts)}, {size_of(num_bytes)} of {label}"
    description += f" ({', '.join(notes)})" if notes else ""
    return Corpus(*_split(names, tokens), len(files), num_bytes, description)


# ---------------------------------------------------------------------- documents
def _open(source: str) -> tuple[Iterator[Document], str]:
    """Return the documents of a source in their order, and what to call the source."""
    if source.startswith("hf:"):
        return _stream(source), source
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, NOT_STDLIB) if path.suffix == ".py"]
        return _read(paths, root), "the Python standard library"
    path = Path(source).expanduser()
    if source and path.is_dir():
        return _read(_walk(path, LEFT_OUT), path), source
    if source and path.is_file():
        return _read([path], path.parent), source
    found = [path for path in map(Path, glob.glob(str(path), recursive=True)) if path.is_file()]
    if not found:
        raise ValueError(
            f"no file or folder {source!r}; --data takes stdlib, a file, a folder, a glob, "
            f"a .jsonl file or hf:NAME"
        )
    return _read(found, Path(os.path.commonpath([path.parent for path in found]))), source


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    """Return the files below `root`, without hidden ones and the folders called `left_out`."""
    found = []
    for folder, folders, files in os.walk(root):
        # os.walk descends into what is left in this very list.
        folders[:] = [f for f in folders if f[0] != "." and f not in left_out]
        found += [Path(folder, name) for name in files if name[0] != "."]
    return [path for path in found if path.is_file()]


def _read(paths: list[Path], root: Path) -> Iterator[Document]:
    """Yield the documents of files. Of several, one that is no text is left out."""
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            text = path.read_bytes().decode("utf-8")
            if "\0" in text:
                raise ValueError("it holds NUL bytes")
        except ValueError as error:
            if len(paths) == 1:
                raise ValueError(f"{path} is no text in UTF-8: {one_line(error)}") from None
            text = None
        rows = _rows(path, text) if text and path.suffix in (".json", ".jsonl") else None
        if rows is None:
            yield Document(name, name, text)
        else:
            for number, row in rows:
                yield Document(name, f"{name}:{number}", _text_of(row, f"{path}:{number}"))


def _rows(path: Path, text: str) -> list[tuple[int, Any]] | None:
    """Return the numbered rows of a file of JSON documents; None for any other JSON."""
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows: list[tuple[int, Any]] = []
    try:
        for number, line in lines:
            rows.append((number, json.loads(line)))
    except ValueError as error:
        if path.suffix == ".jsonl":
            raise ValueError(f"{path}:{number}: no JSON: {one_line(error)}") from None
        try:
            rows = list(enumerate(json.loads(text), start=1))  # an array on many lines
        except (TypeError, ValueError):
            return None
    if path.suffix == ".json" and len(rows) == 1 and isinstance(rows[0][1], list):
        rows = list(enumerate(rows[0][1], start=1))
    has_text = rows and isinstance(rows[0][1], dict) and "text" in rows[0][1]
    return rows if has_text or path.suffix == ".jsonl" else None


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: no string in field 'text': {str(row)[:100]}")
    return text


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


def _split(names: list[str], tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tokens of training and of validation, each at least `MIN_TOKENS` long."""
    total = sum(map(len, tokens))
    wanted = VALIDATION * total

    def draw(i: int) -> bytes:
        return hashlib.sha256(f"0/{names[i]}".encode(errors="backslashreplace")).digest()

    chosen: set[int] = set()
    size = 0
    order = sorted(range(len(names)), key=draw)
    # First without the documents that overshoot by much; where all do, up to half of the text.
    for most in (1.2 * wanted, total / 2):
        for i in order:
            if size < wanted and i not in chosen and size + len(tokens[i]) <= most:
                chosen.add(i)
                size += len(tokens[i])
    if size >= MIN_TOKENS:
        kept = [t for i, t in enumerate(tokens) if i not in chosen]
        return torch.cat(kept), torch.cat([t for i, t in enumerate(tokens) if i in chosen])
    everything = torch.cat(list(tokens))
    cut = total - max(MIN_TOKENS, round(wanted))
    return everything[:cut], everything[cut:]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_of(num_bytes: int) -> str:
    """Return a number of bytes for people: "11.2 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return _count(num_bytes, "byte")
