"""Replay traces of ranks on a machine: the result is a Timeline like a measured one.

Idea.   A rank is a list of events (`trace.py`). A machine says how long each event takes
        (`hardware.py`). A rank computes one event after the other. A call begins when all of its
        ranks have made it. A wait lasts until its call is over.
Streams. A device has a stream for computing, and one for each process group, where calls run in the
        order in which they were launched. Messages from one rank to another queue up; they leave
        when both ends have called (rendezvous). An exchange is a message with each neighbour, and
        waits for no other rank. It runs in the stream of its group's collectives, as with NCCL; on
        the emulated link it runs beside them.
Host.   The host launches kernels ahead of the device. No layer ends before its host has launched
        it. A launch takes `host` seconds for each forward, recomputation and backward.
Ranks.  One rank for each place on the pipeline is played. The other ranks of its dp, cp and tp do
        the same at the same time.
Steps.  Two are played, and the second is returned: it waits for calls of the first.

Limits: a machine's links are not shared between groups; nothing fails or is slow by chance.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import groups_along
from minipar.emulate import operations
from minipar.observe.spans import Span, clipped
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.messages import AHEAD
from minipar.sim import cost
from minipar.sim.hardware import Machine
from minipar.sim.job import Job
from minipar.sim.trace import Trace, Traces, trace
from minipar.sim.tracer import Compute, Launch, Memory, Segment


@dataclass(frozen=True)
class Simulated:
    """A training step that did not happen."""

    traces: Traces
    seconds: float  # of the step
    stage: "_Stage" = field(repr=False)

    @cached_property
    def timeline(self) -> Timeline:
        """The step of all ranks that were played."""
        spans = clipped(self.stage.spans(), *self.stage.ends)
        return Timeline(spans, f"simulated, {self.traces.plan}").shifted()

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication, by axis, beside which nothing computes: `Timeline.overlap`."""
        totals: dict[str, float] = defaultdict(float)
        for row in self.timeline.overlap():
            totals[row.axis] += row.exposed / len(self.timeline.ranks)
        return dict(totals)

    @cached_property
    def peak_bytes(self) -> int:
        """The most that tensors of a rank hold at one moment; allocators need more."""
        return sum(self.traces.at_peak().values())


def replay(
    traces: Traces, machine: Machine, *, host: float = 0.0, attention: float = 1.0
) -> Simulated:
    """Play a step on `machine`.

    Args:
        host: seconds that a host needs to launch a layer in one direction, such as 0.6 ms.
        attention: seconds of attention in training, as a multiple of the kernel's alone.
    """
    stage = _Stage(traces, machine, host, attention)
    stage.play(2)
    first, last = stage.ends
    return Simulated(traces, max(last.values()) - max(first.values()), stage)


def shorter(job: Job) -> Job:
    """Return the job with so few microbatches that the rest of the step only repeats them."""
    some = min(job.plan.microbatches, 2 * job.plan.pp if job.plan.pp > 1 else 4)
    return replace(job, plan=replace(job.plan, microbatches=some))


def simulate(job: Job) -> Simulated:
    """Trace minipar's own code under a plan, and replay it on the machine: no closed form.

    Buckets, hosts and the efficiency of attention in training are the software's. Raises
    `ValueError` for a plan that cannot be traced.
    """
    sizes = dict(sequences=job.microbatch, seq_len=job.seq_len, bucket_mb=4 * job.bucket / 1e6)
    traces = trace(job.config, job.plan, **sizes)
    return replay(traces, job.machine, host=cost.host(job), attention=job.software.attention)


# ---------------------------------------------------------------------- ranks at play
@dataclass(eq=False, slots=True)
class _Call:
    """A collective or a message: it begins when all that take part have made it, and are free."""

    missing: int  # ranks that have yet to make it
    ready: float = 0.0  # when the last of them has
    seconds: float = 0.0
    before: list["_Call"] = field(default_factory=list)  # in its streams: they end before it begins
    span: tuple[float, float] | None = None  # once it is known

    def is_known(self) -> bool:
        """True if it is known when the call is over."""
        if self.span is None and not self.missing and all(c.is_known() for c in self.before):
            start = max([self.ready, *(call.span[1] for call in self.before)])
            self.span, self.before = (start, start + self.seconds), []
        return self.span is not None


@dataclass(eq=False)
class _Player:
    """One rank on its way through its events."""

    rank: int
    trace: Trace
    clock: float = 0.0
    host: float = 0.0
    turns: list[float] = field(default_factory=list)  # of receives
    counts: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    latest: dict[str, list[list[_Call]]] = field(default_factory=dict)  # by a segment's family


class _Stage:
    """All players, and the calls between them; how long events take is asked for once each."""

    def __init__(self, traces: Traces, machine: Machine, host: float, attention: float) -> None:
        self.machine, self.host, self.attention = machine, host, attention
        # An emulated machine differs: it magnifies, and has lanes for messages.
        # An emulated device counts bytes in the format, and at the size, of its declared model.
        self.counted = getattr(machine.device, "counted", lambda num_bytes, _: int(num_bytes))
        self.has_lanes = getattr(machine, "has_lanes", False)
        self.sizes, self.num_ranks = traces.plan.mesh_sizes(), traces.plan.num_ranks
        self.seconds_of = cache(partial(operations.seconds_of, device=machine.device))
        self.words, self.groups, self.prices = map(cache, (self._words, self._groups, self._prices))
        stride = self.num_ranks // traces.plan.pp
        self.players = {
            place * stride: _Player(place * stride, trace) for place, trace in traces.ranks.items()
        }
        self.calls: dict[Any, _Call] = {}  # by group and number, until all ranks have made it
        self.streams: dict[Any, list[_Call]] = defaultdict(list)  # the latest call in each
        self.launched: list[tuple[int, Launch, list[_Call]]] = []
        self.worked: list[tuple] = []  # the first five words of spans
        self.ends: list[dict[int, float]] = []  # of steps, by rank

    def play(self, steps: int) -> None:
        """Play the step of all ranks, so many times."""
        for _ in range(steps):
            runs = [self._run(player) for player in self.players.values()]
            while runs:
                before = len(runs), len(self.launched)
                runs = [run for run in runs if next(run, None) is not None]
                assert (len(runs), len(self.launched)) != before, "all ranks wait for each other"
            self.ends.append({rank: player.clock for rank, player in self.players.items()})

    def spans(self) -> Iterator[Span]:
        """Yield all that was computed, then all calls."""
        yield from (Span(*words) for words in self.worked)
        for rank, launch, calls in self.launched:
            assert all(call.is_known() for call in calls)
            start, end = min(c.span[0] for c in calls), max(c.span[1] for c in calls)
            num_bytes = self.counted(launch.num_bytes, launch.dtype)
            yield Span("comm", launch.verb, rank, start, end, launch.axis, num_bytes)

    def _run(self, player: _Player) -> Iterator[bool]:
        """Play a step of one rank; yield where other ranks have to move first."""
        player.host = player.clock  # it has read the loss of the step before
        player.turns = [player.clock] * AHEAD
        for segment in player.trace.segments:
            made: list[list[_Call]] = []
            for what, *word in self.words(segment):
                if what == "work":
                    kind, block, seconds = word
                    start, player.clock = player.clock, player.clock + seconds
                    self.worked.append((kind, block, player.rank, start, player.clock))
                elif what == "host":
                    player.host += word[0]
                    player.clock = max(player.clock, player.host)
                elif what == "launch":
                    made.append(self._launch(player, *word))
                else:
                    family, index = word
                    known = player.latest.get(family, []) if family else made
                    for call in known[index] if index < len(known) else ():  # else before the first
                        while not call.is_known():
                            yield True
                        player.clock = max(player.clock, call.span[1])
            player.latest[segment.family] = made

    def _launch(self, player: _Player, launch: Launch) -> list[_Call]:
        """Make the calls of a launch; in an exchange, a message with each neighbour."""
        made, posted = [], player.clock
        if launch.verb == "recv" and self.has_lanes:  # on a CPU, ahead of its turn
            posted = player.turns[-AHEAD]
            player.turns.append(player.clock)
        # Axes of all ranks have one process group, see `comm.mesh`.
        is_of_all = len(self.groups(launch.axis)[player.rank]) == self.num_ranks
        stream = player.rank, launch.purpose, is_of_all or launch.axis
        in_lanes = launch.peers and (launch.verb != "exchange" or self.has_lanes)
        for key, seconds in self.prices(player.rank, launch):
            player.counts[key] += 1
            number = key, player.counts[key]
            played = sum(rank in self.players for rank in key[-1])
            call = self.calls.setdefault(number, _Call(played))
            call.missing -= 1
            call.ready = max(call.ready, posted)
            call.seconds = max(call.seconds, seconds)
            lane = (player.rank, key) if in_lanes else stream
            call.before += self.streams[lane]
            made.append(call)
            if in_lanes:
                self.streams[lane] = [call]
            if not call.missing:
                del self.calls[number]
        if not in_lanes:
            self.streams[stream] = made
        for call in made:
            call.is_known()
        self.launched.append((player.rank, launch, made))
        return made

    # seconds of events
    def _words(self, segment: Segment) -> list[tuple]:
        """Return the words of a segment: consecutive work of one block is one word of seconds."""
        # A block may be left and entered again, as where it is computed again beside its backward.
        last = {event[:2]: at for at, event in enumerate(segment.events) if type(event) is Compute}
        words: list[tuple] = []
        for at, event in enumerate(segment.events):
            if type(event) is Compute:
                block = "work", *event[:2]  # kind and name
                seconds = self.seconds_of(event.work)
                seconds *= self.attention if event.work.work == "attention" else 1
                if words and words[-1][:3] == block:
                    seconds += words.pop()[3]
                words.append((*block, seconds))
                if at == last[event[:2]] and ".layers." in event.name:
                    words.append(("host", self.host))
            elif type(event) is not Memory:
                words.append(("launch", event) if type(event) is Launch else ("wait", *event))
        return words

    def _groups(self, axis: str) -> dict[int, tuple[int, ...]]:
        """Return the group of each rank along an axis, or along several axes joined."""
        groups = groups_along(axis.split("+"), self.sizes)
        return {rank: group for group in groups for rank in group}

    def _prices(self, own: int, launch: Launch) -> list[tuple[tuple, float]]:
        """Return the key, alike on all ranks, and the seconds of each call of a launch by `own`."""
        group = self.groups(launch.axis)[own]
        ends = [(own, group[peer]) for peer in launch.peers]
        if launch.verb == "exchange":  # both ways at once
            ends = [tuple(sorted(pair)) for pair in ends]
        elif launch.verb == "recv":
            ends = [pair[::-1] for pair in ends]
        shared = launch.axis, launch.purpose, launch.verb == "exchange"
        return [((*shared, who), self._seconds(launch, who)) for who in ends or [group]]

    def _seconds(self, launch: Launch, ranks: tuple[int, ...]) -> float:
        """Return the seconds of a collective, or of a message, among `ranks`."""
        num_bytes, size = self.counted(launch.num_bytes, launch.dtype), len(ranks)
        nodes = len({rank // self.machine.gpus for rank in ranks})
        verb = "send" if launch.peers else launch.verb
        if rounds := wire_bytes(verb, size, size):
            num_bytes = num_bytes * size / rounds  # of the whole tensor
        if launch.peers:
            first, second, *_ = self.groups(launch.axis)[ranks[0]]
            return cost.message(self.machine, num_bytes, nodes, second - first)
        return self.machine.seconds_of_collective(verb, num_bytes, size, nodes)
