"""How what one stage makes reaches the next: messages of one pass, posted ahead of need."""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from minipar.comm.collectives import Pending, recv, send
from minipar.comm.mesh import Axis
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.simulate import lower

AHEAD = 3  # receives posted before their turn
IN_FLIGHT = 8  # sends of a rank that were not waited for yet


class Mail:
    """What goes from stage to stage in one pass: over the axis, or by hand within a rank.

    Receives are posted in the order of the list, which is the order in which peers send, `ahead` of
    their turn: a message that departs finds its buffer ready. `buffer(message)` makes that.
    """

    def __init__(
        self,
        axis: Axis,
        schedule: Schedule,
        row: Sequence[Action],
        buffer: Callable[[Action], Tensor],
        ahead: int = AHEAD,
    ) -> None:
        self.axis, self.schedule, self.buffer = axis, schedule, buffer
        self._to_post = deque(action for action in row if action.kind in ("RF", "RB"))
        self._posted: dict[Action, Pending] = {}
        self._sent: deque[Pending] = deque()
        self._here: dict[Action, Tensor] = {}  # handed over within this rank, or ready to be sent
        self._post(ahead)

    def _post(self, count: int) -> None:
        for _ in range(min(count, len(self._to_post))):
            message = self._to_post.popleft()
            self._posted[message] = recv(
                self.buffer(message), self.axis, self.schedule.peer(message), async_op=True
            )

    def put(self, message: Action, tensor: Tensor) -> None:
        """What an action made, to be taken by an action here, or sent when it is its turn."""
        own = self.schedule.peer(message) == self.axis.rank
        self._here[message.twin if own else message] = tensor

    def turn(self, message: Action) -> None:
        """The list has come to this message."""
        if message.kind in ("RF", "RB"):
            self._post(1)
            return
        if len(self._sent) == IN_FLIGHT:  # so that tensors which have left do not pile up
            self._sent.popleft().wait()
        tensor, peer = self._here.pop(message), self.schedule.peer(message)
        self._sent.append(send(tensor, self.axis, peer, async_op=True, name=str(message)))

    def take(self, message: Action) -> Tensor:
        """What was received; waits for it."""
        if message in self._posted:
            return self._posted.pop(message).wait()
        return self._here.pop(message)

    def close(self) -> None:
        """Wait until all has been sent."""
        while self._sent:
            self._sent.popleft().wait()


def around(action: Action) -> tuple[Action | None, Action | None]:
    """The messages before and after an action: what it needs, what it makes. None for W."""
    if action.kind == "W":
        return None, None
    letter = "F" if action.kind == "F" else "B"
    stage, i = action.stage, action.microbatch
    return Action(stage, "R" + letter, i), Action(stage, "S" + letter, i)


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The forwards of any number of microbatches through the first copy of the stages, in waves."""
    path = range(schedule.num_stages)
    rank_of = schedule.rank_of[: schedule.num_stages]
    waves = sorted((i + stage, stage, i) for i in range(num_microbatches) for stage in path)
    rows: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    for _, stage, i in waves:
        rows[rank_of[stage]].append(Action(stage, "F", i))
    plan = Schedule("forward", num_microbatches, rank_of, tuple(map(tuple, rows)))
    return lower(plan)
