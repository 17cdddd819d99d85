"""Tokenizers: bytes, or a Hugging Face `tokenizer.json` read with care."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import tokenizers
from torch import Tensor

from minipar.text import one_line
from minipar.train.metrics import write_whole

MOST_TOKENIZER_BYTES = 256_000_000  # ten times the largest of the field
MOST_WORDS = 1 << 22


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    `separator` is the id put after each document, or None for no separator.
    """

    vocab_size: int
    separator: int | None

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, path: Path) -> None:
        """Write a tokenizer.json for Hugging Face's libraries."""


class ByteTokenizer:
    """One token per UTF-8 byte: nothing to train, nothing to download, any text fits.

    No separator: all 256 ids are taken by text, and an extra one would cost a row of the vocabulary
    to say what the text says by itself (a file begins with its own docstring or title).
    """

    vocab_size = 256
    separator = None

    def encode(self, text: str) -> bytes:
        return text.encode("utf-8", errors="replace")

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8 (a young model writes many) become U+FFFD.

        So do ids from 256 up, which a model with more words may write: as 0xFF, never in UTF-8.
        """
        return bytes(min(i, 0xFF) for i in _plain(ids)).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write it as a vocabulary in which no character is known, only its bytes are."""
        write_whole(path, self._as_file())

    @classmethod
    def wrote(cls, path: Path, vocab_size: int = vocab_size) -> bool:
        """Whether the tokenizer of a model of `vocab_size` at `path` is this one: bytes.

        So does no file. Raises `ValueError` where there is none, and the model has more words.
        """
        if path.is_file():
            return path.read_bytes() == cls._as_file().encode()
        if vocab_size > cls.vocab_size:
            raise ValueError(
                f"no tokenizer.json in {path.parent}, and a model of {vocab_size:,} words knows no "
                "bytes; copy it there, or to train add --tokenizer"
            )
        return True

    @staticmethod
    def _as_file() -> str:
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        model = tokenizers.models.BPE(vocabulary, [], byte_fallback=True)
        tokenizer = tokenizers.Tokenizer(model)
        fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
        tokenizer.decoder = tokenizers.decoders.Sequence([fallback, fuse])
        return tokenizer.to_str()


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package.

    A text is encoded whole and always alike: what the file says of truncation, padding and dropout,
    which are for training on single sentences, is left aside.

    Raises ValueError when the file is missing or no tokenizer.
    """

    # The file does not say which special token ends a document, so look for the usual names.
    SEPARATORS = (
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]"),
        *("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "[CLS]"),
    )

    def __init__(self, path: str | Path) -> None:
        self.path = path = tokenizer_file(path)
        with self._says_its_name():
            self._text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(self._text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if getattr(self._tokenizer.model, "dropout", None):
                self._tokenizer.model.dropout = None
            vocabulary = self._tokenizer.get_vocab()
        # ids may have gaps, and an embedding must have a row for the largest one
        self.vocab_size: int = max(vocabulary.values()) + 1 if vocabulary else 0
        if not 0 < self.vocab_size <= MOST_WORDS:
            raise ValueError(
                f"{path} is no tokenizer.json to train with: it has {self.vocab_size:,} ids; "
                f"use 1 to {MOST_WORDS:,}"
            )
        known = (vocabulary[name] for name in self.SEPARATORS if name in vocabulary)
        self.separator: int | None = next(known, None)

    def encode(self, text: str) -> list[int]:
        with self._says_its_name():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        with self._says_its_name():
            return self._tokenizer.decode(_plain(ids))

    def save(self, path: Path) -> None:
        """Write the file as it was."""
        write_whole(path, self._text)

    @contextmanager
    def _says_its_name(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The package raises bare Exception; its panics are not even that.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            why = error.strerror if isinstance(error, OSError) else one_line(error)
            raise ValueError(f"{self.path} is no tokenizer.json: {why}") from None


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json that `path`, the file or its folder, stands for.

    Raises ValueError where there is none, or one that is too large to be one.
    """
    path = Path(os.path.expanduser(path))  # leaves a "~" that it does not know as it is
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no tokenizer at {path}: expected a tokenizer.json")
    if path.stat().st_size > MOST_TOKENIZER_BYTES:
        raise ValueError(f"{path} is no tokenizer.json: it has {size_of(path.stat().st_size)}")
    return path


_TRY_OUT = r"""
import resource, sys
def limit(which, most):
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))
limit(resource.RLIMIT_CPU, 60)
if sys.platform == "linux":
    limit(resource.RLIMIT_AS, 8 << 30)
import tokenizers
try:
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
    tokenizer.decode(tokenizer.encode("a" * 99 + " 1 \u00e4\n").ids)
except BaseException as error:
    sys.exit(" ".join(str(error).split()))
"""


def try_out(path: str | Path) -> None:
    """Raise ValueError where the tokenizer.json at `path` cannot be used.

    In a process of its own: a file that was made up may send the package out of memory, which ends
    its process, or into an endless search.
    """
    path = tokenizer_file(path)
    done = subprocess.run(
        [sys.executable, "-c", _TRY_OUT, str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    if done.returncode:
        why = done.stderr.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
        if done.returncode < 0:  # a signal has ended it
            why = "it takes more memory or time than it should"
        raise ValueError(f"{path} is no tokenizer.json: {why}")
    load_tokenizer(path)


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` (or of the folder that holds one); None: bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def _plain(ids: Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_of(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return count_of(num_bytes, "byte")
