"""Work beside a rank's own: in order, and in nobody's way."""

from minipar.comm import rounds
from minipar.comm.background import Background
from minipar.comm.values import lane
from tests.streams import GPU, Stream, Streams


def test_on_a_gpu_kernels_are_beside_those_of_the_rank_too(monkeypatch):
    """Mutants: on the stream of its backward; before what it sends is there; nobody waits; one
    stream for dp and tp, to which ranks come in different orders; not after what is before it."""
    streams = Streams(monkeypatch)
    lane.cache_clear()

    def begin(name: str, before: list[Background], purpose: str) -> Background:
        work = lambda: streams.log.append(f"{name} on {streams.now}")  # noqa: E731
        begun = Background(work, before, GPU, purpose)
        begun._thread.join()
        return begun

    first = begin("first", [], "dp")
    second = begin("second", [first], "dp")
    begin("third", [second], "dp+tp").wait()
    lane.cache_clear()
    begins = "lane 0 waits for computing"
    assert streams.log == [
        *(begins, "first on lane 0", begins, "lane 0 waits for lane 0", "second on lane 0"),
        *("lane 1 waits for computing", "lane 1 waits for lane 0", "third on lane 1"),
        "computing waits for lane 1",
    ]


class _OfGpu:
    """In the place of a tensor there: notes who uses its memory."""

    is_cuda, device = True, GPU

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"{self.name} is used on {stream.name}")


def test_on_a_gpu_memory_is_not_reused_while_the_other_stream_needs_it(monkeypatch):
    """A call works on a copy that nobody else holds, and returns what its own stream has made.
    Mutants: either is given to others while kernels that read it are still to run."""
    streams = Streams(monkeypatch)
    lane.cache_clear()
    given, made = _OfGpu("the copy", streams.log), _OfGpu("the result", streams.log)
    assert rounds.start(lambda: made, [], True, given).wait() is made
    lane.cache_clear()
    assert {"the copy is used on lane 0", "the result is used on computing"} <= {*streams.log}
