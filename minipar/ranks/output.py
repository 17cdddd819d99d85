"""What a rank prints, on its way to the parent: line by line, and no more of it than fits.

A line travels as soon as it is whole. With `max_lines`, so many lines of `WIDTH` characters travel
per call and the rest is only counted; of a line that is written again and again behind "\\r" (a
progress bar), or flushed in pieces, ten states a second travel at most. So a flood fills neither
the pipe nor the notebook. It costs time in proportion to its length.
"""

import io
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable

WIDTH = 2000  # characters of a line that travel, where the number of lines is bounded
PAUSE = 0.1  # seconds between two states of a line that has not ended, likewise
CHUNK = 1 << 16  # characters of a line that wait at most, where nothing is bounded


def last_state(line: str) -> str:
    """Return what a terminal would still show of "1 %\\r2 %\\r3 %": "\\r3 %". Linear."""
    _, start, state = line.rstrip("\r").rpartition("\r")
    return start + state + "\r" * line.endswith("\r")


class _Line:
    """A line that has not ended: pieces that wait, and how many characters it has and has shown."""

    def __init__(self) -> None:
        self.pieces, self.size, self.shown = [], 0, 0

    def add(self, text: str, width: int) -> None:
        if "\r" in text and width == WIDTH:  # what stood there is overwritten
            text = last_state("".join([*self.pieces, text]))
            self.__init__()
        if self.size < width:
            self.pieces.append(text)
        self.size += len(text)

    def take(self, width: int) -> str:
        """Return what may be shown of that which waits."""
        text = "".join(self.pieces)[: width - self.shown]
        self.pieces, self.shown = [], self.shown + len(text)
        return text

    def end(self, width: int) -> str:
        more = f" ... {self.size - width:,} more characters" if self.size > width else ""
        return self.take(width) + more


class Output:
    """The standard streams of a rank during one call after the other.

    `say(stream, text)` carries text to the parent; `name` is whose it is, such as "rank 1".
    """

    def __init__(self, say: Callable[[str, str], None], name: str, max_lines: int | None) -> None:
        self._say, self._name, self._lock = say, name, threading.RLock()
        self._max_lines = math.inf if max_lines is None else max_lines
        self._width = sys.maxsize if max_lines is None else WIDTH
        self._pause = 0 if max_lines is None else PAUSE
        self._flushed = -math.inf
        self._begin()

    def _begin(self) -> None:
        self._lines: dict[str, _Line] = defaultdict(_Line)  # by stream
        self._room, self._left_out = self._max_lines, 0  # in lines

    def write(self, stream: str, text: str) -> None:
        """Take in what was printed; let it travel if it makes lines whole."""
        if not text:
            return
        with self._lock:
            if not self._room:
                line = self._lines[stream]
                self._left_out += text.count("\n")
                _, newline, rest = text.rpartition("\n")
                line.size = len(rest) + (0 if newline else line.size)
                return
            *whole, rest = text.split("\n")
            done = []
            for i, piece in enumerate(whole):
                if not self._room:
                    self._left_out += len(whole) - i
                    break
                self._lines[stream].add(piece, self._width)
                done.append(self._lines.pop(stream).end(self._width) + "\n")
                self._room -= 1
            if done:
                self._say(stream, "".join(done))
            line = self._lines[stream]
            line.add(rest, self._width)
            if rest.endswith("\r") or line.size - line.shown > CHUNK:
                self.flush(stream)

    def flush(self, stream: str) -> None:
        """Let the line that has not ended travel as it is, unless it has done so just now."""
        with self._lock:
            if self._room and time.monotonic() - self._flushed >= self._pause:
                self._flushed = time.monotonic()
                if text := self._lines[stream].take(self._width):
                    self._say(stream, text)

    def make_room(self) -> bool:
        """Let all that was printed travel; tell if a picture may follow. It counts as a line."""
        with self._lock:
            if not self._room:
                self._left_out += 1
                return False
            for stream, line in self._lines.items():
                if text := line.take(self._width):
                    self._say(stream, text)
            self._room -= 1
            return True

    def end(self) -> None:
        """The call is over: let the rest travel, and the number of lines left out."""
        with self._lock:
            for stream, line in self._lines.items():
                if not self._room:
                    self._left_out += line.size > 0
                elif text := line.end(self._width):
                    self._say(stream, text)
            left_out = self._left_out
            self._begin()
            if left_out:
                self._say("stdout", f"... {left_out:,} more lines of {self._name}\n")


class Stream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a rank."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, name: str, output: Output) -> None:
        self.name, self._output = name, output

    def write(self, text: str) -> int:
        self._output.write(self.name, text)
        return len(text)

    def flush(self) -> None:
        self._output.flush(self.name)

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("the output of a rank goes through a pipe of its own")
