"""The output of a rank on its way to the parent: line by line, and no more than fits.

A line travels when it is whole. With `max_lines`, a call may print so many lines of `WIDTH`
characters; the rest is only counted. A line that is written again and again behind "\\r" (a
progress bar), or flushed in pieces, travels ten times a second at most. So a rank that prints
without end fills neither the pipe nor the notebook.
"""

import io
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable

WIDTH = 2000  # characters of a line that travel, where the number of lines is bounded
PAUSE = 0.1  # seconds between two flushes of a line that has not ended, likewise
CHUNK = 1 << 13  # characters of such a line that wait at most


def last_state(line: str) -> str:
    """Return what a terminal would still show of "1 %\\r2 %\\r3 %": "\\r3 %"."""
    _, start, state = line.rstrip("\r").rpartition("\r")
    return start + state + "\r" * line.endswith("\r")


class _Line:
    """A line that has not ended: the text that waits, and how much has travelled or is left out."""

    def __init__(self) -> None:
        self.text, self.shown, self.left_out = "", 0, 0

    def add(self, text: str, width: float) -> None:
        if "\r" in text and width == WIDTH:  # overwrites what stood there
            text = last_state(self.text + text)
            self.__init__()
        fits = text[: int(min(width - self.shown - len(self.text), len(text)))]
        self.text += fits
        self.left_out += len(text) - len(fits)

    def take(self) -> str:
        text, self.text = self.text, ""
        self.shown += len(text)
        return text

    def end(self) -> str:
        return self.take() + f" ... {self.left_out:,} more characters" * (self.left_out > 0)


class Output:
    """The standard streams of a rank, call after call.

    `say(stream, text)` carries text to the parent; `name` is the rank's, such as "rank 1".
    """

    def __init__(self, say: Callable[[str, str], None], name: str, max_lines: int | None) -> None:
        self._say, self._name, self._lock = say, name, threading.RLock()
        self._max_lines = math.inf if max_lines is None else max_lines
        self._width, self._pause = (math.inf, 0) if max_lines is None else (WIDTH, PAUSE)
        self._flushed = -math.inf
        self._begin()

    def _begin(self) -> None:
        self._lines: dict[str, _Line] = defaultdict(_Line)  # by stream
        self._room, self._left_out = self._max_lines, 0  # in lines

    def write(self, stream: str, text: str) -> None:
        """Take in what was printed; send the lines that are whole now."""
        with self._lock:
            *whole, rest = text.split("\n")
            done = []
            for piece in whole:
                self._lines[stream].add(piece, self._width)
                line = self._lines.pop(stream).end()
                if self.make_room():
                    done.append(line + "\n")
            if done:
                self._say(stream, "".join(done))
            self._lines[stream].add(rest, self._width)
            if rest.endswith("\r") or len(self._lines[stream].text) > CHUNK:
                self.flush(stream)

    def flush(self, stream: str) -> None:
        """Send the line that has not ended as it is, unless it was sent just now."""
        with self._lock:
            if self._room and time.monotonic() - self._flushed >= self._pause:
                self._flushed = time.monotonic()
                if text := self._lines[stream].take():
                    self._say(stream, text)

    def make_room(self) -> bool:
        """Take the room of one line, or of a picture; False, and count it, if there is none."""
        with self._lock:
            has_room = self._room > 0
            self._room -= has_room
            self._left_out += not has_room
            return has_room

    def end(self) -> None:
        """The call is over: send the rest, and the number of lines left out."""
        with self._lock:
            for stream, line in self._lines.items():
                if (text := line.end()) and self.make_room():
                    self._say(stream, text)
            if self._left_out:
                self._say("stdout", f"... {self._left_out:,} more lines of {self._name}\n")
            self._begin()


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

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("the output of a rank goes through a pipe of its own")
