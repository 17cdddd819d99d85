"""The output of a rank on its way to the parent: line by line, and no more than `max_lines`."""

import io
import math
import threading
from collections import defaultdict
from collections.abc import Callable

WIDTH = 2000  # characters of a line that travel, where the number of lines is bounded


class Output:
    """The standard streams of a rank, call after call.

    `say(stream, text)` carries text to the parent; `name` is the rank's, such as "rank 1". With
    `max_lines`, a call may print so many lines; the rest is only counted. So a rank that prints
    without end does not fill the notebook.
    """

    def __init__(self, say: Callable[[str, str], None], name: str, max_lines: int | None) -> None:
        self._say, self._name, self._lock = say, name, threading.RLock()
        self._max_lines = math.inf if max_lines is None else max_lines
        self._is_bounded = max_lines is not None
        self._begin()

    def _begin(self) -> None:
        self._rest: dict[str, str] = defaultdict(str)  # by stream: the line that has not ended
        self._room, self._left_out = self._max_lines, 0  # in lines

    def write(self, stream: str, text: str) -> None:
        """Take in what was printed; send the lines that are whole now."""
        with self._lock:
            *lines, self._rest[stream] = (self._rest[stream] + text).split("\n")
            lines = [self._cut(line) + "\n" for line in lines if self.make_room()]
            if lines:
                self._say(stream, "".join(lines))

    def flush(self, stream: str) -> None:
        """Send the line that has not ended as it is, such as the state of a progress bar."""
        with self._lock:
            text = self._rest.pop(stream, "")
            if text and self._room:
                self._say(stream, self._cut(text))

    def _cut(self, line: str) -> str:
        if not self._is_bounded or len(line) <= WIDTH:
            return line
        return f"{line[:WIDTH]} ... {len(line) - WIDTH:,} more characters"

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
            for stream, text in self._rest.items():
                if text and self.make_room():
                    self._say(stream, self._cut(text))
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
