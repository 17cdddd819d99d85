"""What ranks did when, on one clock, and how many bytes they sent; arithmetic on intervals."""

import gzip
import io
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

NOT_COMPUTE = {"comm", "copy"}  # every other kind keeps the rank's processor busy

Interval = tuple[float, float]


@dataclass(slots=True)
class Span:
    """One piece of work of one rank: `start` and `end` in seconds, `num_bytes` this rank sends."""

    # forward, backward, weight_gradient, optimizer, compute (anything else), comm or copy
    kind: str
    name: str
    rank: int
    start: float
    end: float
    axis: str = ""  # comm only: the axis of the mesh, or the name of the process group
    num_bytes: int = 0  # comm only; see `collectives.wire_bytes`
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


def moved(spans: list[Span], by: float) -> list[Span]:
    """The same spans, `by` seconds later."""
    return [replace(s, start=s.start + by, end=s.end + by) for s in spans] if by else spans


def clipped(
    spans: Iterable[Span], begins: Mapping[int, float], ends: Mapping[int, float]
) -> list[Span]:
    """Cut spans to the time from ``begins[rank]`` to ``ends[rank]``: to one step of several.

    The bytes of a span that began earlier belong to the step before.
    """
    found = []
    for s in spans:
        begin, end = begins[s.rank], ends[s.rank]
        if s.start < end and s.end > begin:
            num_bytes = s.num_bytes if s.start >= begin else 0
            words = {"start": max(s.start, begin), "end": min(s.end, end)}
            found.append(replace(s, num_bytes=num_bytes, **words))
    return found


# ---------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of points as disjoint intervals in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif start < end:
            result.append((start, end))
    return result


def covered(spans: Iterable[Span]) -> list[Interval]:
    """The time in which at least one of `spans` runs."""
    return union((span.start, span.end) for span in spans)


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Points in both; `a` and `b` are disjoint and in order, as `union` returns them."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Points of `a` that are not in `b`; both disjoint and in order."""
    result = []
    for start, end in a:
        first = max(0, bisect_right(b, (start, float("inf"))) - 1)
        for hole_start, hole_end in b[first : bisect_left(b, (end,))]:
            if hole_end <= start:
                continue
            if hole_start > start:
                result.append((start, hole_start))
            start = hole_end
        if start < end:
            result.append((start, end))
    return result


def measure(disjoint: list[Interval]) -> float:
    """Summed length."""
    return sum(end - start for start, end in disjoint)


# ---------------------------------------------------------------------- files


LARGEST_TRACE = 4 << 30
"""Characters of JSON: what would unpack to more is refused."""
MOST_EVENTS = 10_000_000
"""Some hundreds of bytes each; a small file can unpack to many more."""
LARGEST_VALUE = 8 << 20
"""Characters of one event, or of all process groups: as objects they take 25 times as much."""
LARGEST_TEXT = 64 << 20
"""Bytes of a manifest, a table or a description, which are held as a whole."""


def bounded_text(path: Any, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a file of at most `LARGEST_TEXT` bytes.

    Raises `ValueError` for a larger one, and for what is no file: a pipe or a device might never
    end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no file")
    with path.open("rb") as file:
        if len(content := file.read(LARGEST_TEXT + 1)) > LARGEST_TEXT:
            raise ValueError(f"{path.name} holds over {LARGEST_TEXT >> 20} MiB")
    return content.decode(encoding, errors)


def read_json(path: str | Path, keep: Callable[[dict], Any] | None = None) -> dict[str, Any]:
    """A chrome trace, plain or gzipped, as a dict with `traceEvents`; `keep` thins its objects out.

    The file is read piece by piece: held is what `keep` returns, and never the text of the whole.
    Raises ValueError, which names the file, for any other, and for one above `LARGEST_TRACE`.
    """
    try:
        with _open(path) as file:
            text = _Text(io.TextIOWrapper(file, "utf-8-sig"), keep)
            document = {"traceEvents": text.items()} if text.peek() == "[" else text.members()
            if text.peek():
                raise ValueError("something follows the end of its JSON")
    except RecursionError:
        raise ValueError(f"{path} is no readable trace: it is nested too deeply") from None
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is no readable trace: {error}") from error
    if not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path} is JSON, but no chrome trace: it has no list `traceEvents`")
    return document


class _Text:
    """JSON out of a stream, of which only the value being read is held."""

    def __init__(self, file: IO[str], keep: Callable[[dict], Any] | None) -> None:
        self.file, self.text, self.at, self.size, self.ended = file, "", 0, 0, False
        self.scan = json.JSONDecoder(object_hook=keep).raw_decode

    def more(self) -> None:
        """Drop what was read, and double what is held of the rest."""
        chunk = self.file.read(max(1 << 18, len(self.text) - self.at))
        self.text, self.at, self.ended = self.text[self.at :] + chunk, 0, not chunk
        self.size += len(chunk)
        if self.size > LARGEST_TRACE:
            raise ValueError(f"it holds over {LARGEST_TRACE >> 20} MiB; profile fewer steps")

    def peek(self) -> str:
        """The next letter that is no blank; empty at the end."""
        while True:
            self.at = _BLANKS.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def value(self) -> Any:
        """The next value, whole."""
        self.peek()
        while True:
            try:
                value, end = self.scan(self.text, self.at)
                if end < len(self.text) or self.ended:  # else a number may go on
                    self.at = end
                    return value
            except ValueError:
                if self.ended:
                    raise ValueError("it ends too early, or holds what is no JSON") from None
                if len(self.text) - self.at >= LARGEST_VALUE:
                    raise ValueError(
                        f"it holds what is no JSON, or a value over {LARGEST_VALUE >> 20} MiB"
                    ) from None
            self.more()

    def _goes_on(self, end: str) -> bool:
        mark = self.peek()
        self.at += 1
        if mark not in (",", end) or not mark:
            raise ValueError(f"a comma or {end} is missing" if mark else "it ends too early")
        return mark == ","

    def items(self) -> list[Any]:
        """The values of the array that begins here."""
        self.at += 1
        result = []
        if self.peek() == "]":
            self.at += 1
            return result
        while True:
            result.append(self.value())
            if len(result) > MOST_EVENTS:
                raise ValueError(f"it holds over {MOST_EVENTS:,} events; profile fewer steps")
            if not self._goes_on("]"):
                return result

    def members(self) -> dict[str, Any]:
        """The object that begins here, its `traceEvents` read one by one."""
        if self.peek() != "{":
            self.value()
            return {}
        self.at += 1
        result: dict[str, Any] = {}
        while self.peek() == '"':
            key = self.value()
            if self.peek() != ":":
                raise ValueError(f"a colon is missing after {printable(key):.50}")
            self.at += 1
            events = key == "traceEvents" and self.peek() == "["
            result[key] = self.items() if events else self.value()
            if not self._goes_on("}"):
                return result
        if result or self.peek() != "}":
            raise ValueError("it ends too early, or the name of a value is missing")
        self.at += 1
        return result


_BLANKS = re.compile(r"[ \t\n\r]*")


def _open(path: str | Path) -> IO[bytes]:
    if not Path(path).is_file():  # a pipe or a device might never end
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else open(path, "rb")


def is_ours(path: str | Path) -> bool:
    """Whether `Timeline.save` wrote this file, by its first bytes."""
    try:
        with _open(path) as file:
            return file.read(32).replace(b" ", b"").lstrip().startswith(b'{"minipar"')
    except (EOFError, OSError, zlib.error, ValueError):
        return False


def is_number(value: Any) -> bool:
    """Whether a value out of a file is a number that one can reckon with: real, finite, sane.

    Microseconds since 1970 are 2e15.
    """
    return type(value) in (int, float) and -1e17 < value < 1e17


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Lines of columns as wide as their widest cell; the first `left` (None: all) flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if left is None or i < left else str.rjust for i in range(len(widths))]
    return [
        "  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def one_line(error: BaseException, most: int = 500) -> str:
    """What an error says, in one line of at most so many letters."""
    return " ".join(str(error).split())[:most]


def printable(text: Any) -> str:
    """A name out of a file, fit for terminals and pictures: what cannot be shown becomes `?`."""
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
