"""A rank made slow on purpose: what it costs the others, and that nothing but time changes."""

import time

import pytest
import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.observe import timeline
from minipar.parallel import ddp
from minipar.train.step import train_step
from minipar.train.straggler import Pace, parse_slow
from tests.streams import GPU, Streams

SLOW = "slowed on purpose"
WORK = 0.02  # seconds of forward, and of backward


class _Work(torch.autograd.Function):
    """Takes WORK seconds each way, on a machine under any load."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(WORK)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(WORK)
        return grad


class Worker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, tokens):
        return self.head(_Work.apply(self.embedding(tokens)))


def one_step(factor: float):
    """Rank 1 of 2 is slowed; return the step's timeline of all ranks, the seconds, the loss."""
    mesh = Mesh(dp=2)
    torch.manual_seed(0)
    model = Worker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(6).reshape(2, 3)
    with Pace(model, factor if mesh.rank == 1 else 1.0) as pace:
        strategies = [ddp.apply(model, mesh.dp, average=False)]
        for _ in range(2):  # the first is ddp's rehearsal
            pace.seconds = 0.0
            with timeline.record(model) as recorded:
                batch = [(tokens, tokens)]
                result = train_step(model, strategies, optimizer, batch, mesh.dp)
    return recorded.gather(mesh.world), pace.seconds, result.loss.item()


def test_a_rank_takes_as_many_times_as_long_as_was_asked(monkeypatch):
    """By a clock that only sleeping moves on. Mutant: one time too many is slept."""
    clock = [0.0]
    monkeypatch.setattr(Pace, "_now", lambda self: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    model = Worker()
    with Pace(model, 5.0) as pace:
        model(torch.arange(6)).sum().backward()
    assert pace.seconds == pytest.approx(5 * 2 * WORK)


def test_the_others_wait_for_a_slow_rank(ranks):
    """Their communication is exposed, as it takes until the slow rank joins in.

    Mutants: sleeping after communication was launched, or where the timeline sees idle time.
    """
    (plain, _, loss), _ = ranks(2).run(one_step, 1.0)
    (slowed, fast_seconds, same_loss), (_, slow_seconds, _) = ranks(2).run(one_step, 5.0)
    assert same_loss == loss
    assert not plain.select(name=SLOW).spans and not slowed.select(name=SLOW, rank=0).spans
    asleep = slowed.select(name=SLOW, rank=1)
    assert {span.kind for span in asleep} == {"compute"}
    slept = sum(span.duration for span in asleep)
    assert slept >= 4 * 2 * WORK * 0.9
    assert slow_seconds >= 5 * 2 * WORK * 0.9 and fast_seconds >= 2 * WORK
    # The fast rank waits while the slow one sleeps, less what both need for other things.
    exposed = {row.rank: row.exposed for row in slowed.overlap()}
    assert exposed[0] > 0.6 * slept
    before = {row.rank: row.exposed for row in plain.overlap()}
    assert exposed[0] > before[0] + 0.5 * slept
    assert exposed[1] < 0.5 * exposed[0]


def test_seconds_are_those_of_training_and_do_not_include_waiting():
    model = Worker()
    pace = Pace(model)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)  # validation
    assert pace.seconds == 0
    loss = model(tokens).sum()
    forward = pace.seconds
    assert forward >= WORK
    time.sleep(10 * WORK)  # such as a wait for other ranks
    start = time.perf_counter()
    loss.backward()
    backward = time.perf_counter() - start
    assert 2 * WORK <= pace.seconds <= forward + backward  # without the wait
    pace.close()
    seconds = pace.seconds
    model(tokens).sum().backward()
    assert pace.seconds == seconds


def test_slowing_changes_no_bit():
    gradients = []
    for factor in (1.0, 3.0):
        torch.manual_seed(0)
        model = Worker()
        with Pace(model, factor):
            model(torch.arange(5)[None]).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))


def test_slow_is_read_and_checked():
    assert parse_slow("", 2) == {}
    assert parse_slow("1=2.5, 3=4", 4) == {1: 2.5, 3: 4.0}
    for text in ("1", "1=", "=2", "4=2", "-1=2", "1=0.5", "1=nan", "1=inf", "1=2,1=3", "1=2,"):
        with pytest.raises(ValueError, match=r"--slow .* from 0 to 3 and a factor .* try 3=2"):
            parse_slow(text, 4)
    for factor in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="use a factor from 1 up"):
            Pace(nn.Linear(1, 1), factor)


def test_on_a_gpu_it_waits_for_what_computes_alone(monkeypatch):
    """Mutant: for the whole device, whose collectives end when the slowest rank has joined."""
    streams, model = Streams(monkeypatch), Worker()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited for all"))
    with Pace(model) as pace:
        pace._device = GPU
        model(torch.arange(6)).sum().backward()
    assert set(streams.log) == {"the host waits for computing"} and pace.seconds > 0
