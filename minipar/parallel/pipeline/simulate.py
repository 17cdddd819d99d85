"""Time of a schedule on paper: how long it takes, how long ranks are idle, when messages travel.

Model:  A rank runs its actions in order, each as soon as its inputs are there. Messages travel
        beside computing; the messages from one rank to one other rank queue up. Updates of the
        weights are left out.
Bubble: idle time of a step that starts and ends for all ranks together: (p-1)/M of the work for
        GPipe and 1F1B, the ratio to the ideal time of Narayanan et al. 2021 (2104.04473). Qi et al.
        2023 (2401.10241, 2) count only from a rank's own first action to its own last one, because
        a rank that ends early can start the optimizer. B is always I + W.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import advance, needs

SPAN_KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_gradient"}


@dataclass(frozen=True)
class Costs:
    """Seconds of F, I and W, and of a message on the wire.

    A number is for a rank's whole share, 1/p of the model. A stage, 1/S of the model, takes p/S of
    the number, so schedules of different v are compared on the same model. A sequence has the
    seconds of each part of the model.
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    message: float = 0.0

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """Return the seconds of an action; those of B are those of I and W."""
        costs = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}
        part, share = schedule.part(action.stage), schedule.num_ranks / schedule.num_stages
        found = [costs[kind] for kind in action.kind.replace("B", "IW")]
        return sum(c * share if isinstance(c, int | float) else c[part] for c in found)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Time all computing and all messages. By default, F, I and W of a rank's whole share
    take 1 s, messages nothing.

    A span has the name of its action, and `stage` and `microbatch` in its meta; a message is a span
    of its sender. Raises ValueError for a schedule that deadlocks.
    """
    spans = []
    for (action,), rank, start, end in events(schedule, costs or Costs()):
        meta = {"stage": action.stage, "microbatch": action.microbatch}
        kind = SPAN_KIND.get(action.kind, "comm")
        axis = "" if action.computes else "pp"
        spans.append(Span(kind, str(action), rank, start, end, axis, meta=meta))
    return Timeline(spans, "simulated")


def events(
    schedule: Schedule, costs: Costs, paired: bool = False
) -> Iterator[tuple[tuple[Action, ...], int, float, float]]:
    """Yield (slot, rank, start, end) of all computing and of all messages that take time.

    A slot is an action or, if `paired`, two. A pair starts when both of its actions can start, and
    both end together.
    """
    schedule = schedule.without_messages()
    there: dict[tuple[Action, int], float] = {}  # when a rank has the result of an action
    clock = [0.0] * schedule.num_ranks
    wire: dict[tuple[int, int], float] = defaultdict(float)  # busy until then, by rank and peer
    for slot, rank in advance(schedule, paired):
        inputs = [needed for action in slot for needed in needs(schedule, action)]
        start = max([clock[rank], *(there[needed, rank] for needed in inputs)])
        end = start + sum(costs.seconds(schedule, action) for action in slot)
        clock[rank] = end
        yield slot, rank, start, end
        for action in slot:
            there[action, rank] = end
            send = schedule.makes(action)
            if schedule.travels(send):
                peer = schedule.peer(send)
                departs = max(end, wire[rank, peer])
                there[action, peer] = wire[rank, peer] = departs + costs.message
                if costs.message:
                    yield (send,), rank, departs, wire[rank, peer]


def lower(schedule: Schedule, paired: bool = False) -> Schedule:
    """Add messages: each send right after its action, its receive at the same time.

    All actions are sorted by the time at which they would end. Both ranks of a message place it by
    this one order. So blocking messages cannot deadlock, and messages between two ranks are
    received in the order sent. A receive comes before the action that its rank computes when the
    message departs. If `paired`, an F and a B side by side are one action, after which both send.
    Raises ValueError if the schedule deadlocks.
    """
    rows: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    computing = [(end, rank, slot) for slot, rank, _, end in events(schedule, Costs(), paired)]
    for _, rank, slot in sorted(computing):
        rows[rank] += slot
        for send in filter(schedule.travels, map(schedule.makes, slot)):
            rows[rank].append(send)
            rows[schedule.peer(send)].append(send.twin)
    return replace(schedule, actions=tuple(map(tuple, rows)))


# ---------------------------------------------------------------------- bubble
def bubble(timeline: Timeline) -> float:
    """Return idle time of all ranks / their computing time: (p-1)/M for GPipe and 1F1B.

    Other spans of a measured timeline (messages, the optimizer) do not count.
    """
    work = [span for span in timeline if span.kind in SPAN_KIND.values()]
    whole = max(span.end for span in work) - min(span.start for span in work)
    busy = sum(span.duration for span in work)
    return whole * len({span.rank for span in work}) / busy - 1
