"""Tokenizers: one token per byte, or a Hugging Face `tokenizer.json`."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from torch import Tensor

from minipar.text import one_line
from minipar.train.metrics import write_whole

ENDS = "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]"
"""Usual names of the token that ends a document, for a tokenizer whose files name none."""


class ByteTokenizer:
    """One token per UTF-8 byte: nothing to train, nothing to download, any text fits.

    Documents follow each other without a separator: text takes all 256 ids.
    """

    vocab_size = 256
    separator = None  # the id put after each document

    def encode(self, text: str) -> bytes:
        """Return the bytes of `text`."""
        return text.encode("utf-8", errors="replace")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8, and ids above 255, become U+FFFD."""
        return bytes(min(i, 0xFF) for i in _plain(ids)).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write a vocabulary of 256 bytes that Hugging Face's libraries read."""
        _save(path, self._as_file(), None)

    @classmethod
    def wrote(cls, path: Path, vocab_size: int = vocab_size) -> bool:
        """True if the tokenizer at `path`, of a model of `vocab_size`, is this one.

        So is the tokenizer of a model without a tokenizer.json. Raises `ValueError` if this model
        has more words than there are bytes.
        """
        if path.is_file():
            return path.read_bytes() == cls._as_file().encode()
        if vocab_size > cls.vocab_size:
            model = f"a model of {vocab_size:,} words does not read bytes; add --tokenizer"
            raise ValueError(f"no tokenizer.json in {path.parent}, and {model}")
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

    The token that ends a document is the `eos_token` of the tokenizer_config.json beside the file,
    else one of the usual `ENDS`. A text is encoded whole: truncation, padding and dropout, which
    the file may ask for, are for single sentences. Raises `ValueError` for a missing or bad file.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(self._text)
        except Exception as error:  # the package raises no type of its own
            raise ValueError(f"{path} is no tokenizer.json: {one_line(error)}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        names = (_told_end(path.with_name("tokenizer_config.json")), *ENDS)
        self._end = next((name for name in names if name in vocabulary), None)
        self.separator = vocabulary.get(self._end)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens around them."""
        text = text.encode("utf-8", errors="replace").decode()  # a prompt may be no UTF-8
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(_plain(ids))

    def save(self, path: Path) -> None:
        """Write the file as it was, and the name of the end token beside it."""
        _save(path, self._text, self._end)


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, or of the folder that holds one; None: bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def _told_end(config: Path) -> str | None:
    """Return the `eos_token` that a tokenizer_config.json names: a word, or an object with one."""
    try:
        end = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _save(path: Path, text: str, end: str | None) -> None:
    write_whole(path, text)
    # Without a class, transformers takes the tokenizer of a Llama, with other rules for blanks.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": end} if end else {}
    write_whole(path.with_name("tokenizer_config.json"), json.dumps(config) + "\n")


def _plain(ids: Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)
