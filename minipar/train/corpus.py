"""From text on disk, or from a stream, to two long tensors of tokens.

    corpus = load_corpus("stdlib", ByteTokenizer())

The order of documents, and which of them are kept for validation, depend on their names alone: the
same on every rank and on every machine. A file (or document) is in one part only.
"""

import codecs
import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.text import one_line
from minipar.train.tokenizer import Tokenizer, count_of, size_of

MOST_FILES = 1_000_000
MOST_BYTES = 20_000_000_000  # of text, which every rank holds
MIN_TOKENS = 2  # per part: one input and its target
STREAM_LIMIT_BYTES = 100_000_000  # a streamed dataset may have no end
WILDCARDS = set("*?[")
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from and tokens to be judged by; no file (or document) is in both."""

    train: Tensor  # 1-D; uint8 when the vocabulary fits, else int32
    validation: Tensor  # 1-D, same dtype
    num_files: int  # files read; 0 for a streamed dataset
    num_bytes: int  # of text, as UTF-8
    description: str  # "618 files, 11.2 MB of the Python standard library"


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
    - `stdlib`: every .py file of this Python's standard library, without its tests and without
      installed packages (tests are more than half of it, and much of them tables of data);
    - a file, a glob, or a folder (all files below it that are neither hidden nor binary; links to
      folders are followed, into each folder once);
    - `.jsonl` (named, in a glob or in a folder): one document per line, in the field `text`;
    - `hf:NAME` or `hf:NAME:SPLIT`: streamed by the optional `datasets` package, at most
      100 MB unless `limit_bytes` says otherwise.

    Documents are drawn for validation by a hash of seed and relative name until
    `validation_fraction` of the tokens is reached, but never past half of them; a single document
    gives its end. `limit_bytes` reads only the first bytes of the text.

    Raises ValueError, naming the source, when it is missing, empty, binary, malformed, too short,
    or beyond `MOST_FILES` and `MOST_BYTES`.
    """
    if not 0 < validation_fraction <= 0.5:
        raise ValueError(f"validation_fraction={validation_fraction} is not in (0, 0.5]; try 0.05")
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit_bytes={limit_bytes} leaves no text; use a positive number or None")
    if limit_bytes is None and source.startswith("hf:"):
        limit_bytes = STREAM_LIMIT_BYTES

    dtype = torch.uint8 if tokenizer.vocab_size <= 256 else torch.int32
    names: list[str] = []
    tokens: list[Tensor] = []
    files: set[str] = set()
    num_bytes = num_skipped = num_foreign = 0
    try:
        documents, label = _open(source, limit_bytes)
        for document in documents:
            if document.text is None:
                num_skipped += 1
                continue
            data = document.text.encode("utf-8", errors="replace")
            data = data if limit_bytes is None else data[: limit_bytes - num_bytes]
            if data:
                text = data.decode("utf-8", errors="ignore")  # the limit may cut a character
                names.append(document.name)
                tokens.append(_tokenize(text, tokenizer, dtype))
                files.add(document.file)
                num_bytes += len(data)
                num_foreign += not document.is_utf8
            if num_bytes == limit_bytes:
                break
    except OSError as error:  # no permission, a name that is too long, a broken disk ...
        at = error.filename or source
        raise ValueError(f"cannot read {at}: {error.strerror or one_line(error)}") from error

    files.discard("")
    skipped = count_of(num_skipped, "binary file") + " skipped"
    if not num_bytes:
        raise ValueError(f"{source} holds no text" + (f" ({skipped})" if num_skipped else ""))
    num_tokens = sum(map(len, tokens))
    if num_tokens < 2 * MIN_TOKENS:
        raise ValueError(
            f"{source} is too short: {count_of(num_tokens, 'token')}; training and validation "
            f"need at least {MIN_TOKENS} each"
        )
    train, validation = _split(names, tokens, validation_fraction, seed)

    counts = [count_of(len(files), "file")] if files else []
    counts += [count_of(len(names), "document")] if len(names) != len(files) else []
    notes = [skipped] if num_skipped else []
    notes += [f"{count_of(num_foreign, 'file')} not UTF-8"] if num_foreign else []
    notes += [f"cut at {size_of(num_bytes)}"] if num_bytes == limit_bytes else []
    description = f"{', '.join(counts)}, {size_of(num_bytes)} of {label}"
    description += f" ({', '.join(notes)})" if notes else ""
    return Corpus(train, validation, len(files), num_bytes, description)


class _Document(NamedTuple):
    file: str  # "" when it came from no file
    name: str  # relative, so the same on every machine: the split is drawn from it
    text: str | None  # None: a binary file, to be counted and left out
    is_utf8: bool = True  # or U+FFFD stands for what is not


def _open(source: str, limit_bytes: int | None) -> tuple[Iterator[_Document], str]:
    """The documents of a source in their order, and what to call it in a sentence."""
    if source.startswith("hf:"):
        return _stream(source), source
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, NOT_STDLIB) if path.suffix == ".py"]
        return _read(paths, root, limit_bytes), "the Python standard library"
    path = Path(os.path.expanduser(source))
    if source and path.is_file():
        return _read([path], path.parent, limit_bytes, must_be_text=True), source
    if source and path.is_dir():
        return _read(list(_walk(path)), path, limit_bytes), source
    if source and path.exists():
        raise ValueError(f"{source} is a device, a pipe or a socket; --data takes regular files")
    if not WILDCARDS & set(source):
        raise ValueError(
            f"no file or folder {source!r}; --data takes stdlib, a file, a folder, a glob, "
            "a .jsonl file or hf:NAME"
        )
    paths = list(_limited(filter(Path.is_file, _glob(path.parts)), source))
    if not paths:
        raise ValueError(f"no file matches {source!r}")
    # names begin where the first wildcard stands
    fixed = itertools.takewhile(lambda part: not WILDCARDS & set(part), path.parent.parts)
    root = Path(*fixed)
    return _read(paths, root, limit_bytes), source


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    """The files below `root`, without hidden ones and without the folders called `left_out`."""
    found = (Path(folder, name) for folder, files in _folders(root, left_out) for name in files)
    yield from _limited((path for path in found if path.name[0] != "."), root)


def _limited(paths: Iterable[Path], source: Any) -> Iterator[Path]:
    for number, path in enumerate(paths):
        if number == MOST_FILES:
            raise ValueError(f"{source} holds more than {MOST_FILES:,} files; name a part of it")
        yield path


def _folders(root: Path, left_out: Collection[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files) for `root` and what is below it, each folder once.

    Links may lead to a folder twice, or in a circle.
    """
    seen = {str(folder) for folder in root.resolve().parents}

    def unreadable(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, onerror=unreadable, followlinks=True):
        is_new = (real := os.path.realpath(folder)) not in seen
        seen.add(real)
        hidden = {name for name in subfolders if name[0] == "." or name == "__pycache__"}
        # os.walk goes on with what is left in this very list
        subfolders[:] = sorted(set(subfolders) - hidden - set(left_out)) if is_new else []
        if is_new:
            yield folder, files


def _glob(parts: Sequence[str]) -> Iterator[Path]:
    """What `glob.glob` finds for the pattern, except that `**` goes into each folder once."""
    if "**" not in parts:
        yield from map(Path, glob.iglob(os.path.join(*parts)))
        return
    deep = parts.index("**")
    rest = list(itertools.dropwhile("**".__eq__, parts[deep:])) or ["*"]
    for root in glob.iglob(os.path.join(*parts[:deep])) if deep else ["."]:
        for folder, _ in _folders(Path(root)) if os.path.isdir(root) else ():
            yield from _glob([glob.escape(folder), *rest])


def _read(
    paths: list[Path], root: Path, limit_bytes: int | None, *, must_be_text: bool = False
) -> Iterator[_Document]:
    files = {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    num_bytes = 0
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        if not size:
            continue  # such as those of /proc, which may go on for ever
        with path.open("rb") as file:
            data = file.read(1 << 16 if limit_bytes is None else limit_bytes)
            if limit_bytes is None and b"\0" not in data:
                num_bytes += size
                if num_bytes > MOST_BYTES:
                    raise ValueError(
                        f"{root} holds more text than the {size_of(MOST_BYTES)} that a rank should "
                        f"hold, of which {path} has {size_of(size)}; name a part of it"
                    )
                if path.suffix != ".jsonl":
                    data += file.read(size - len(data))
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path, name)
            continue
        is_binary = b"\0" in data
        if is_binary and must_be_text:
            raise ValueError(f"{path} is binary (it holds NUL bytes); expected text")
        decode = codecs.getincrementaldecoder("utf-8-sig")  # drops a byte-order mark
        is_cut = limit_bytes is not None and size > len(data)  # perhaps within a character
        try:
            yield _Document(name, name, None if is_binary else decode().decode(data, not is_cut))
        except UnicodeDecodeError as error:
            if must_be_text:
                at = len(data) - len(error.object) + error.start  # it leaves out a mark in front
                raise ValueError(
                    f"{path} is not UTF-8: its byte {at} is 0x{data[at]:02x}; "
                    f"convert it, as by iconv -f LATIN1 -t UTF-8"
                ) from None
            yield _Document(name, name, decode("replace").decode(data, not is_cut), False)


def _read_jsonl(path: Path, name: str) -> Iterator[_Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: no JSON: {one_line(error)}") from error
            yield _Document(name, f"{name}:{number}", _text_of(row, f"{path}:{number}"))


def _stream(source: str) -> Iterator[_Document]:
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
            yield _Document("", str(number), _text_of(row, f"row {number}"))
    except Exception as error:  # unknown name or split, no network, ... each of its own type
        raise ValueError(f"cannot read {source}: {one_line(error)}") from error


def _text_of(row: Any, where: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with a field 'text'")
    if not isinstance(row.get("text"), str):
        fields = ", ".join(map(repr, itertools.islice(row, 8)))[:200] or "none"
        raise ValueError(f"{where}: no string in field 'text' (its fields: {fields})")
    return row["text"]


def _tokenize(text: str, tokenizer: Tokenizer, dtype: torch.dtype) -> Tensor:
    ids = tokenizer.encode(text)
    if isinstance(ids, bytes) and ids:  # no detour over a list of Python integers
        tokens = torch.frombuffer(bytearray(ids), dtype=torch.uint8).to(dtype)
    else:
        tokens = torch.tensor(list(ids), dtype=dtype)
    if tokenizer.separator is None:
        return tokens
    return torch.cat([tokens, torch.tensor([tokenizer.separator], dtype=dtype)])


def _split(
    names: list[str], tokens: list[Tensor], fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Train and validation tokens, each at least MIN_TOKENS long (the whole holds enough)."""
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
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, document in enumerate(tokens):
            parts[i in chosen].append(document)
        return torch.cat(parts[0]), torch.cat(parts[1])
    everything = torch.cat(tokens)
    cut = total - max(MIN_TOKENS, round(fraction * total))
    return everything[:cut], everything[cut:]
