"""What a rank prints: whole lines, and no more than fits."""

import pytest

from minipar.ranks.output import WIDTH, Output, Stream


class Heard(list):
    """An output and what it has said."""

    def __init__(self, max_lines: int | None) -> None:
        self.output = Output(lambda *what: self.append(what), "rank 3", max_lines)
        self.out, self.err = (Stream(name, self.output) for name in ("stdout", "stderr"))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self)


@pytest.mark.parametrize("max_lines", [None, 10])
def test_lines_travel_whole_and_in_order(max_lines):
    heard = Heard(max_lines)
    print("half ", end="", file=heard.out)
    print("an error", file=heard.err)
    print("and half\n\nrest", end="", file=heard.out)
    assert heard == [("stderr", "an error\n"), ("stdout", "half and half\n\n")]
    print("\r1 %", end="", flush=True, file=heard.err)
    heard.output.end()
    assert heard[2:] == [("stderr", "\r1 %"), ("stdout", "rest")]


def test_beyond_the_last_line_there_is_only_a_count():
    """Streams share the lines; each call has its own; a line that has not ended counts as one."""
    heard = Heard(3)
    heard.out.write("a\nb\n")
    heard.err.write("c\nd\ne")
    for _ in range(1000):
        print("x", file=heard.out)
    print("y", end="", file=heard.out)
    assert not heard.output.make_room()
    heard.output.end()
    assert heard.text == "a\nb\nc\n... 1,004 more lines of rank 3\n"
    heard.out.write("y" * 2 * WIDTH + "\n")  # the next call; too long for a notebook
    heard.output.end()
    assert heard.text.endswith("rank 3\n" + "y" * WIDTH + " ... 2,000 more characters\n")
