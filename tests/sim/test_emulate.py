"""A step simulated beside the same step emulated: real ranks on the same devices and links."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from minipar.comm import clock
from minipar.comm.collectives import all_reduce, barrier
from minipar.comm.mesh import Mesh
from minipar.emulate import device as devices
from minipar.emulate import link
from minipar.model.llama import LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.observe.spans import clipped
from minipar.observe.timeline import Timeline
from minipar.parallel import context
from minipar.parallel.plan import Plan
from minipar.ranks.launch import Ranks
from minipar.sim import emulate
from minipar.sim.replay import Simulated, replay
from minipar.sim.trace import Actor, trace
from tests.sim.jobs import flops

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(256, 64, 192, num_layers=4, num_heads=8, num_kv_heads=4)
MOE = replace(CONFIG, moe=MoEConfig(8, 2, 66, num_shared=1, forced=True))
"""Experts in turn, so that each has as many tokens; of widths that no grouped product takes, which
is not traced."""
SEQ_LEN = 64
DEVICE = emulate.device("h100/8", magnify=32)  # a step of about 100 ms, for a second
LINKS = {name: link.LINKS[name] for name in ("nvlink4", "ib-ndr", "100gbe")}

SAMPLE = (
    "dp=4,zero=1",
    "dp=2,zero=3,microbatches=2,tp=2,sequence_parallel",
    "pp=4,microbatches=6,schedule=zb_h1",
    "cp=2,pp=2,microbatches=2",
    "cp=4",
    "cp=4,context=ulysses",
    "tp=4,sequence_parallel,tp_overlap",
    "dp=4,compression=powersgd",
    "pp=2,microbatches=4,schedule=dualpipe_v,precision=bf16",
)


# ---------------------------------------------------------------------- the same step, emulated
@dataclass(frozen=True)
class Emulated:
    """An emulated device and an emulated link as the machine of `replay`."""

    device: devices.Device
    link: link.Link
    has_lanes = True  # where messages do not queue behind collectives
    gpus = 1 << 30

    def seconds_of_collective(self, verb, num_bytes, ranks, nodes=1) -> float:
        """Return the seconds of `verb`; `num_bytes` is the whole tensor's, in the large model."""
        return link.seconds(verb, num_bytes, ranks, self.link)


class Ran(NamedTuple):
    """A training step that did happen, in declared seconds: from the end of the one before."""

    seconds: float
    timeline: Timeline  # of the step, all ranks
    late: float  # seconds that a rank was late at most, for want of processors here


def step(ranks: Ranks, config: LlamaConfig, plan: Plan, *, sequences: int = 1, seq_len: int) -> Ran:
    """Run training steps of a Llama under `plan` on `ranks`, and tell the second.

    As in `trace`: `sequences` of a microbatch, `seq_len` tokens each. Without an emulated device,
    seconds are measured. A step before them, on the device as it is, warms up.
    """
    found = ranks.run(_step, config, plan, sequences, seq_len)
    begins, ends = ({r: own[i] for r, own in enumerate(found)} for i in (0, 1))
    every = found[0][3]
    timeline = Timeline(clipped(every.spans, begins, ends), every.label).shifted()
    seconds = max(ends.values()) - max(begins.values())
    return Ran(seconds, timeline, max(own[2] for own in found))


def _step(config: LlamaConfig, plan: Plan, sequences: int, seq_len: int) -> tuple:
    """Return begin and end of the step, how late the rank was, and all spans."""
    mesh = Mesh(**plan.mesh_sizes())
    with devices.paused():
        actor = Actor(config, plan, mesh, sequences, seq_len, "cpu")
        actor.step()
    barrier(mesh.world)
    label = devices.label(f"{link.current().label}, {plan}")
    with timeline.record(actor.model, label) as recorded:
        ends = []
        for _ in range(2):
            actor.step()
            ends.append(clock.now() / devices.current().slowdown)
        late = devices._clock.latest
        with devices.paused():
            actor.step()  # what the second has left in flight arrives, and is recorded
    return *ends, late, recorded.gather(mesh.world)


@dataclass(frozen=True)
class Both:
    """The same step twice."""

    emulated: Ran
    simulated: Simulated
    wall: float  # seconds that the emulated one took, with those around it

    def check(self) -> None:
        """Seconds within 3 %, hidden share within 3 points, bytes equal."""
        ran, sim = self.emulated, self.simulated
        what = ran.timeline.label
        assert ran.seconds == pytest.approx(sim.seconds, rel=0.03), what
        hidden = [t.hidden_fraction for t in (ran.timeline, sim.timeline)]
        assert hidden[0] == pytest.approx(hidden[1], abs=0.03), what
        assert sim.timeline.bytes_by_axis(), what
        for rank in sim.timeline.ranks:
            sent = [t.select(rank=rank).bytes_by_axis() for t in (ran.timeline, sim.timeline)]
            assert sent[0] == sent[1], f"{what}, rank {rank}"


@pytest.fixture
def both(ranks, monkeypatch):
    """``both(plan, link)`` runs a plan on emulated ranks, and simulates it.

    Rings in 16 bits multiply a block with another kernel on a GPU, for which "meta" stands, than on
    the CPU on which these ranks are: both are to do what ranks on a CPU do.
    """
    monkeypatch.setattr(context, "best_kernel", lambda q, mask: "fused")

    @contextmanager
    def emulated(size, wire):
        pool = ranks(size, "link")
        for use, what in ((devices.use, DEVICE), (link.use, wire), (link.check_calls, False)):
            pool.run(use, what)
        try:
            yield pool
        finally:
            for use, what in ((devices.use, None), (link.use, "none"), (link.check_calls, True)):
                pool.run(use, what)

    def run(plan, name="nvlink4", slower=1, config=CONFIG):
        wire = LINKS[name]
        with emulated(plan.num_ranks, wire) as pool:
            start = time.monotonic()
            ran = step(pool, config, plan, seq_len=SEQ_LEN)
            wall = time.monotonic() - start
        machine = Emulated(DEVICE, wire.scaled(slower))
        sim = replay(trace(config, plan, seq_len=SEQ_LEN), machine)
        return Both(ran, sim, wall)

    return run


@pytest.mark.parametrize("text", SAMPLE)
def test_simulated_is_emulated(both, text):
    """Mutants: a simulator in which calls of a group do not queue, or an exchange waits for all."""
    found = both(Plan.parse(text))
    found.check()
    assert found.wall > 2 * DEVICE.slowdown * found.emulated.seconds  # it has been slept


@pytest.mark.parametrize("text", ["ep=4", "dp=2,ep=2,zero=1,dispatch=halves"])
def test_experts_simulated_are_emulated(both, text):
    """Tokens that travel to experts and back. Mutant: all-to-alls of another size, or that hide."""
    found = both(Plan.parse(text), "ib-ndr", config=MOE)
    found.check()
    assert found.simulated.timeline.bytes_by_axis()["ep"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "pp=4,schedule=dualpipe,microbatches=4",
        "pp=4,schedule=dualpipe,microbatches=2",
        "pp=2,schedule=dualpipe_v,microbatches=6",
        "dp=4,compression=random-k,microbatches=2",
    ],
)
def test_every_schedule_is_replayed_to_its_end(text):
    """Stages without microbatches, two kinds of backward, twins that exchange, calls by a thread.

    Mutant: the last microbatch repeated for one in the middle, which would reduce gradients twice.
    """
    plan = Plan.parse(text)
    step = replay(trace(CONFIG, plan, seq_len=SEQ_LEN), Emulated(DEVICE, LINKS["ib-ndr"]))
    serial = trace(CONFIG, Plan(microbatches=plan.microbatches), seq_len=SEQ_LEN)
    found = sum(flops(rank) for rank in step.traces.ranks.values())
    assert step.seconds > step.computing > 0
    assert found == pytest.approx(flops(serial.ranks[0]), rel=0.02)


@pytest.mark.parametrize("text", ["tp=4,sequence_parallel", "pp=2,microbatches=4"])
def test_a_small_model_stands_for_a_large_one(text):
    """Eight times as wide on sequences eight times as long: the same step, by traces of both.

    Mutant: attention's heads magnified as well.
    """
    large = replace(CONFIG, vocab_size=2048, hidden_size=512, intermediate_size=1536, head_dim=64)
    plan, wire = Plan.parse(text), LINKS["100gbe"]
    machines = [Emulated(emulate.device("h100", k), wire) for k in (8, 1)]
    small = replay(trace(CONFIG, plan, seq_len=SEQ_LEN), machines[0])
    whole = replay(trace(large, plan, seq_len=8 * SEQ_LEN), machines[1])
    assert small.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert small.computing == pytest.approx(whole.computing, rel=0.02)
    sent = [step.timeline.bytes_by_axis() for step in (small, whole)]
    assert sent[0] == pytest.approx(sent[1], rel=0.02)


def test_a_simulator_that_is_wrong_is_found_out(both):
    """The control: on a link half as fast, the same comparison fails."""
    with pytest.raises(AssertionError):
        both(Plan.parse("tp=4"), "100gbe", slower=2).check()


def _filmed():
    mesh, model = Mesh(dp=2), torch.nn.Linear(64, 64)

    def step():
        if mesh.rank:
            time.sleep(0.3)  # a busy machine
        all_reduce(model(torch.ones(64, 64)), mesh.dp)

    film = emulate.film(step, model, mesh.dp, device=DEVICE, wire="ib-ndr")
    return film, devices.current(), link.current().name


def test_a_film_is_reckoned_and_leaves_devices_and_links_as_they_were(ranks):
    """However late a rank is: its clock stands still while it is not the device that works."""
    (film, device, wire), _ = ranks(2, "link").run(_filmed)
    assert device is None and wire == link.LINKS["none"].name
    begins = [min(s.start for s in film.select(rank=rank)) for rank in range(2)]
    assert begins[0] == begins[1] and film.ranks == [0, 1]
    (sent,) = film.select(rank=0, kind="comm")
    assert 0 < film.duration < 0.01 and sent.duration > 0
