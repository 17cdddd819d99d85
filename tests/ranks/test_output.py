"""What a rank prints: whole lines, no more than fits, in time proportional to its length."""

import time

import pytest

from minipar.ranks.output import WIDTH, Output, Stream, last_state


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
    heard.output.end()
    assert heard[2:] == [("stdout", "rest")]


def test_beyond_the_last_line_there_is_only_a_count():
    """Streams share the lines; each call has its own; a line that has not ended counts as one."""
    heard = Heard(3)
    heard.out.write("a\nb\n")
    heard.err.write("c\nd\ne")
    for _ in range(1000):
        print("x", file=heard.out)
    print("y", end="", file=heard.out)
    heard.out.flush()
    assert not heard.output.make_room()
    heard.output.end()
    assert heard.text == "a\nb\nc\n... 1,004 more lines of rank 3\n"
    print("again", file=heard.out)
    heard.output.end()
    assert heard.text.endswith("rank 3\nagain\n")
    heard.out.write("a\nb\nc\nd\ne\n")  # three have room, two are left out at once
    heard.output.end()
    assert heard.text.endswith("again\na\nb\nc\n... 2 more lines of rank 3\n")


def test_a_long_line_is_cut():
    heard = Heard(3)
    for _ in range(3 * WIDTH):
        print(".", end="", file=heard.out)
    print(file=heard.out)
    heard.out.write("=" * (WIDTH + 1))
    heard.output.end()
    first, second = heard.text.split("\n")
    assert first == "." * WIDTH + f" ... {2 * WIDTH:,} more characters"
    assert second == "=" * WIDTH + " ... 1 more characters"


def test_of_a_progress_bar_few_states_travel_and_the_last():
    heard = Heard(3)
    for i in range(20_000):
        print(f"\r{i} %", end="", flush=True, file=heard.err)
    heard.output.end()
    assert heard.text.startswith("\r0 %") and heard.text.endswith("\r19999 %")
    assert len(heard) < 30
    assert list(map(last_state, ("1\r2\r3", "1\r2\r", "1", "\r", ""))) == [
        "\r3",
        "\r2\r",
        "1",
        "\r",
        "",
    ]


@pytest.mark.parametrize("max_lines", [None, 200])
@pytest.mark.parametrize(
    "write",
    [
        lambda out, size: [out.write(".") for _ in range(size // 10)],
        lambda out, size: out.write("x" * 20 * size),
        lambda out, size: out.write("a\r" * size + "b"),
        lambda out, size: [print("hello", file=out) for _ in range(size // 20)],
    ],
    ids=["dots", "long", "carriage returns", "lines"],
)
def test_time_is_proportional_to_the_length(max_lines, write):
    """Mutant: text += ..., or a pattern that starts anew at every character: minutes."""

    def seconds(size: int) -> float:
        heard, start = Heard(max_lines), time.process_time()
        write(heard.out, size)
        heard.output.end()
        return time.process_time() - start

    seconds(10_000)
    few = min(seconds(50_000) for _ in range(3))
    assert seconds(800_000) < 16 * 4 * max(few, 0.002)  # quadratic: 256 times as long
