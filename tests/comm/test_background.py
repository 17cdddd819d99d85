"""Work beside a rank's own: in order, and in nobody's way."""

from minipar.comm.background import Background
from minipar.comm.values import lane
from tests.streams import GPU, Streams


def test_on_a_gpu_kernels_are_beside_those_of_the_rank_too(monkeypatch):
    """Mutants: on the stream of its backward; before what it sends is there; nobody waits."""
    streams = Streams(monkeypatch)
    lane.cache_clear()
    first = Background(lambda: streams.log.append(f"first on {streams.now}"), [], GPU)
    first._thread.join()
    second = Background(lambda: streams.log.append(f"second on {streams.now}"), [first], GPU)
    second.wait()
    lane.cache_clear()
    begins = "lane 0 waits for computing"
    assert streams.log == [
        *(begins, "first on lane 0", begins, "second on lane 0"),
        "computing waits for lane 0",
    ]
