"""From text on disk, or from a stream, to two long tensors of tokens.

    corpus = load_corpus("stdlib", ByteTokenizer())

The order of documents, and which of them are kept for validation, depend on their names alone. So
every rank on every machine has the same text.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipar.text import one_line
from minipar.train.tokenizer import ByteTokenizer, Tokenizer

VALIDATION = 0.05  # of the tokens
MIN_TOKENS = 2  # of each part: one input and its target
STREAM_LIMIT_BYTES = 100_000_000  # a streamed dataset may have no end
JSON_LINES = ".jsonl", ".ndjson"
LEFT_OUT = {"__pycache__"}
NOT_STDLIB = LEFT_OUT | {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from, and tokens to validate on."""

    train: Tensor  # 1-D; uint8 where the vocabulary fits, else int32
    validation: Tensor  # 1-D, the same dtype
    description: str  # "11.2 MB of stdlib, 618 documents"


# A hash of the name selects validation. Names are relative paths, so equal on all machines.
# A document without text (None) is a file that is not text.
Documents = Iterator[tuple[str, str | None]]


def load_corpus(source: str, tokenizer: Tokenizer, *, limit_bytes: int | None = None) -> Corpus:
    """Read and tokenize `source`; the same tokens in the same order on every rank and machine.

    `source` is one of
    - `stdlib`: every .py file of this Python's standard library, without tests and packages;
    - a file, a glob, or a folder: all files below it that are neither hidden nor binary;
    - a .jsonl or .ndjson file, with a document in the field "text" of each line. A .json file of
      such lines, or of an array of such objects, is read alike;
    - `hf:NAME` or `hf:NAME:SPLIT`: streamed by the optional `datasets` package, 100 MB at most.

    Documents are drawn for validation by a hash of their names until `VALIDATION` of the tokens is
    reached. Where all documents are too long for this, validation is the end of the text.
    At most `limit_bytes` of text are read.

    Raises `ValueError`, naming the source, where it is missing, empty, malformed or too short.
    """
    is_stream = source.startswith("hf:")
    if is_stream and limit_bytes is None:
        limit_bytes = STREAM_LIMIT_BYTES
    names: list[str] = []
    tokens: list[Tensor] = []
    num_bytes = num_skipped = 0
    for name, text in _stream(source) if is_stream else _read(source):
        if text is None:
            num_skipped += 1
            continue
        data = text.encode("utf-8", errors="replace")
        data = data if limit_bytes is None else data[: limit_bytes - num_bytes]
        if data:
            names.append(name)
            # The limit may cut a character.
            tokens.append(_tokenize(data.decode("utf-8", errors="ignore"), tokenizer))
            num_bytes += len(data)
        if num_bytes == limit_bytes:
            break
    notes = [f"{num_bytes / 1e6:.3g} MB of {source}"]
    notes += [f"{len(names):,} documents"] if len(names) > 1 else []
    notes += [f"{num_skipped} files without text skipped"] if num_skipped else []
    notes += ["cut at the limit"] if num_bytes == limit_bytes else []
    if tokenizer.separator is None and not isinstance(tokenizer, ByteTokenizer):
        notes.append("nothing between documents: the tokenizer names no token that ends one")
    num_tokens, description = sum(map(len, tokens)), ", ".join(notes)
    if num_tokens < 2 * MIN_TOKENS:
        raise ValueError(f"{source} is too short: {num_tokens} tokens ({description})")
    return Corpus(*_split(names, tokens), description)


# ---------------------------------------------------------------------- documents
def _read(source: str) -> Documents:
    """Yield the documents of files. Of several files, one that is not text is left out."""
    path = Path(source).expanduser()
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, NOT_STDLIB) if path.suffix == ".py"]
    elif source and path.is_dir():
        root, paths = path, _walk(path, LEFT_OUT)
    else:
        found = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
        paths = [path for path in found if path.is_file()]
        if not source or not paths:
            raise ValueError(f"no file or folder {source!r}; --data also takes stdlib or hf:NAME")
        root = Path(os.path.commonpath([path.parent for path in paths]))
    # Links, even circular ones, give a file several names: read it once, by the shortest name.
    by_length = sorted(paths, key=lambda path: (len(path.parts), path), reverse=True)
    paths = [*{path.resolve(): path for path in by_length}.values()]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            text = path.read_bytes().decode("utf-8-sig")  # without the BOM of Windows
            if "\0" in text:
                raise ValueError("it holds NUL bytes")
        except ValueError as error:
            if len(paths) == 1:
                raise ValueError(f"{path} is not text in UTF-8: {one_line(error)}") from None
            text = None
        if text and text.startswith("version https://git-lfs"):
            raise ValueError(f"{path} is a pointer of git-lfs: run git lfs pull in its folder")
        is_json = path.suffix.lower() in (".json", *JSON_LINES)
        rows = _rows(path, text) if text and is_json else None
        if rows is None:
            yield name, text
        else:
            for number, row in rows:
                yield f"{name}:{number}", _text_of(row, f"{path}:{number}")


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    """Return the files below `root`, without hidden ones and the folders called `left_out`."""
    found = []
    for folder, folders, files in os.walk(root):
        # os.walk descends only into the folders that stay in this list.
        folders[:] = [f for f in folders if f[0] != "." and f not in left_out]
        found += [Path(folder, name) for name in files if name[0] != "."]
    return [path for path in found if path.is_file()]


def _rows(path: Path, text: str) -> list[tuple[int, Any]] | None:
    """Return the numbered rows of a file of JSON documents; None for any other .json file."""
    is_lines = path.suffix.lower() in JSON_LINES
    try:
        whole = json.loads(text)  # an array, or a single row
        rows = list(enumerate(whole if isinstance(whole, list) else [whole], start=1))
    except ValueError:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                rows += [(number, json.loads(line))] if line.strip() else []
            except ValueError as error:
                if not is_lines:
                    return None
                raise ValueError(f"{path}:{number}: no JSON: {one_line(error)}") from None
    has_text = any(isinstance(row, dict) and "text" in row for _, row in rows)
    return rows if has_text or is_lines else None


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: no string in field 'text': {str(row)[:100]}")
    return text


def _stream(source: str) -> Documents:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        from datasets import load_dataset
    except ImportError:
        needs = "needs the datasets package: pip install"
        raise ValueError(f'{source} {needs} "minipar[datasets]"') from None
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield str(number), _text_of(row, f"row {number}")
    except Exception as error:  # an unknown name or split, no network: each has its own type
        raise ValueError(f"cannot read {source}: {one_line(error)}") from error


# ---------------------------------------------------------------------- tokens
def _tokenize(text: str, tokenizer: Tokenizer) -> Tensor:
    ids = tokenizer.encode(text)
    if isinstance(ids, bytes):  # without a list of Python integers in between
        return torch.tensor(np.frombuffer(ids, np.uint8))
    end = [] if tokenizer.separator is None else [tokenizer.separator]
    dtype = torch.uint8 if tokenizer.vocab_size <= 256 else torch.int32
    return torch.tensor(ids + end, dtype=dtype)


def _split(names: list[str], tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tokens of training and of validation, each at least `MIN_TOKENS` long."""
    total = sum(map(len, tokens))
    wanted = VALIDATION * total

    def draw(i: int) -> bytes:
        return hashlib.sha256(f"0/{names[i]}".encode(errors="backslashreplace")).digest()

    chosen: set[int] = set()
    size = 0
    for i in sorted(range(len(names)), key=draw):
        if size < wanted and size + len(tokens[i]) <= 1.2 * wanted:  # not one that is too long
            chosen.add(i)
            size += len(tokens[i])
    if size >= MIN_TOKENS:
        kept = [t for i, t in enumerate(tokens) if i not in chosen]
        return torch.cat(kept), torch.cat([t for i, t in enumerate(tokens) if i in chosen])
    everything = torch.cat(tokens)
    cut = total - max(MIN_TOKENS, round(wanted))
    return everything[:cut], everything[cut:]
