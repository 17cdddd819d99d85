"""Four ways to hide all-to-alls of experts, on emulated devices and a link that makes them dear.

The same work each time: forward of one microbatch and backward of another, through a few layers
with experts. The link is declared so slow that, with nothing hidden, all-to-alls take `SHARE` of
the time. No way can be faster than computing alone, or sending alone: that is the `ideal`.
"""

from typing import Any, NamedTuple

import torch

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Axis, Mesh
from minipar.emulate import device, link
from minipar.lab.bench import race
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe.timeline import Timeline, record, span
from minipar.parallel import expert
from minipar.parallel.pipeline import stages
from minipar.parallel.pipeline.pairs import side_by_side
from minipar.parallel.plan import Plan
from minipar.sim import emulate

WAYS = {
    "all_to_all": "(a) nothing beside",
    "overlapped": "(b) shared experts",
    "halves": "(c) halves of a batch",
    "paired": "(d) a forward beside a backward",
}
"""What `expert.apply` calls them, and how they are known."""
SHARE, LAYERS = 0.4, 4
DEVICE, MAGNIFY = "h100/30", 32  # 64 tokens of width 64 stand for 2,048 of 2,048
COLUMNS = (
    ("ranks", "{ranks}"),
    ("hidden how", "{way}"),
    ("ms", "{ms:.1f}"),
    ("all-to-alls hidden", "{hidden:.0%}"),
    ("of the ideal", "{ratio:.2f}"),
)


class Overlaps(NamedTuple):
    """A timeline of each way, and the seconds that computing and all-to-alls take alone."""

    timelines: dict[str, Timeline]
    computing: float
    sending: float

    @property
    def ideal(self) -> float:
        """Seconds that no way can be below."""
        return max(self.computing, self.sending)

    def hidden(self, way: str) -> float:
        """The share of all-to-alls during which rank 0 computes."""
        return _journeys(self.timelines[way]).hidden_fraction


def _journeys(timeline: Timeline) -> Timeline:
    """Rank 0 without what else it sends: counts, activations of a pipeline, gradients."""
    own = timeline.select(rank=0)
    return Timeline(s for s in own if s.kind != "comm" or s.name == "all_to_all")


def shape_of(num_layers: int) -> LlamaConfig:
    """A Llama of so many layers, all with experts."""
    moe = MoEConfig(8, 2, 172, num_shared=1, forced=True)  # 8 experts in turn: all are balanced
    return LlamaConfig(61, 64, 256, num_layers=num_layers, num_heads=4, num_kv_heads=4, moe=moe)


def play(axis: Axis, dispatch: str) -> Timeline:
    """One forward and one backward, each way; on every rank of `axis`, with an emulated device."""
    with device.paused():
        model = Llama(shape_of(LAYERS), seed=0)
        expert.apply(model, axis, dispatch=dispatch)
        layers = stages.part_of(model, range(LAYERS))
        x, before = torch.randn(2, 1, 64, 64).requires_grad_().unbind()
        made = layers(before)
        gradient = torch.randn_like(made)

    def forward() -> None:
        with span("forward", "forward"):
            layers(x)

    def backward() -> None:
        with span("backward", "backward"):
            torch.autograd.backward(made, gradient)

    barrier(axis)
    with record(label=device.label(link.current().label)) as timeline:
        if dispatch == "paired":
            side_by_side(forward, backward)
        else:
            forward()
            backward()
    return timeline.gather(axis).shifted()


def compare(axis: Axis) -> Overlaps:
    """Play all ways on the link on which all-to-alls take `SHARE`; called on every rank."""
    _use("none")
    computing, slow = _slow_link(play(axis, "all_to_all"))
    _use(slow)
    sending = computing * SHARE / (1 - SHARE)
    return Overlaps({way: play(axis, way) for way in WAYS}, computing, sending)


def _slow_link(alone: Timeline) -> tuple[float, link.Link]:
    """Seconds that rank 0 computes in `alone`, and the link on which all-to-alls take `SHARE`."""
    own = alone.select(rank=0)
    computing = sum(s.duration for s in own if s.kind != "comm")
    num_bytes = sum(s.num_bytes for s in own.select(name="all_to_all"))
    bandwidth = num_bytes / (computing * SHARE / (1 - SHARE))
    return computing, link.Link(f"link of {bandwidth / 1e9:.0f} GB/s", 2e-6, bandwidth)


def _use(wire: link.Link | str) -> None:
    link.check_calls(False)  # checks would be waited for, too
    link.use(wire)


def rows(num_ranks: int) -> list[dict[str, Any]]:
    """A row for each way, on as many ranks."""
    with race.pool(num_ranks, "none", device=emulate.device(DEVICE, MAGNIFY)) as ranks:
        found = ranks.run(_on_rank, num_ranks)[0]
    return [
        _row("expert overlap", num_ranks, way, timeline, timeline.duration, found.ideal)
        for way, timeline in found.timelines.items()
    ]


def _on_rank(num_ranks: int) -> Overlaps:
    return compare(Mesh(dp=1, ep=num_ranks).ep)


def _row(
    bench: str, num_ranks: int, way: str, timeline: Timeline, seconds: float, ideal: float
) -> dict[str, Any]:
    return {
        "bench": bench,
        "ranks": num_ranks,
        "way": WAYS[way],
        "ms": 1e3 * seconds,
        "hidden": _journeys(timeline).hidden_fraction,
        "ratio": seconds / ideal,
        "link": timeline.label,
    }


def plan_of(way: str, microbatches: int) -> Plan:
    """DualPipeV on two stages, each on two ranks that share experts."""
    schedule = f"schedule=dualpipe_v,microbatches={microbatches}"
    return Plan.parse(f"pp=2,ep=2,{schedule},dispatch={way}")


def whole_steps(microbatches: int) -> list[dict[str, Any]]:
    """A row for each way in whole training steps: see `plan_of`.

    Not every slot of the schedule is a pair, and there is a bubble: so (d) hides less than of one
    pair alone. The ideal is what rank 0 computes, as its all-to-alls take less, without the bubble.
    """
    with race.pool(4, "none", device=emulate.device(DEVICE, MAGNIFY)) as ranks:

        def ran(way: str) -> emulate.Ran:
            plan = plan_of(way, microbatches)
            return emulate.step(ranks, shape_of(2 * LAYERS), plan, seq_len=64)

        computing, slow = _slow_link(ran("all_to_all").timeline)
        ranks.run(_use, slow)
        found = {way: ran(way) for way in WAYS}
    return [
        _row("expert overlap, whole steps", 4, way, step.timeline, step.seconds, computing)
        for way, step in found.items()
    ]
