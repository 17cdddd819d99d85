"""Messages that bring the result of one stage to the next; receives are posted early."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from minipar.comm.collectives import Pending, recv, send
from minipar.comm.mesh import Axis
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.simulate import lower

AHEAD = 3  # receives posted before their turn, on CPUs
IN_FLIGHT = 8  # sends of a rank that were not waited for yet


class Mail:
    """Carries tensors from stage to stage in one pass: over the axis, or directly within a rank.

    Receives are posted in the order of the list, which is the order in which peers send. Some are
    posted ahead of their turn, so a message that departs finds its buffer ready. `buffer` makes the
    buffer of a microbatch.
    """

    def __init__(
        self, axis: Axis, schedule: Schedule, buffer: Callable[[int], Tensor], device: torch.device
    ) -> None:
        self.axis, self.schedule, self.buffer = axis, schedule, buffer
        row = schedule.actions[axis.rank]
        self._to_post = deque(action for action in row if action.kind in ("RF", "RB"))
        self._posted: dict[Action, Pending] = {}
        self._sent: deque[Pending] = deque()
        self._here: dict[Action, Tensor] = {}  # to be sent, or handed over within this rank
        # NCCL runs the messages of two ranks in order, and asynchronously to this list. So on a GPU
        # it is early enough to post a receive at its turn.
        for _ in range(AHEAD if device.type == "cpu" else 0):
            self.receive()

    def receive(self, _: Action | None = None) -> None:
        """RF, RB: post the next receive of the list, on CPUs `AHEAD` of its turn."""
        if self._to_post:
            message = self._to_post.popleft()
            buffer, peer = self.buffer(message.microbatch), self.schedule.peer(message)
            self._posted[message] = recv(buffer, self.axis, peer, async_op=True)

    def send(self, message: Action) -> None:
        """SF, SB: send what an action has `put` here."""
        if len(self._sent) == IN_FLIGHT:  # so that sent tensors do not pile up
            self._sent.popleft().wait()
        tensor, peer = self._here.pop(message.twin), self.schedule.peer(message)
        self._sent.append(send(tensor, self.axis, peer, async_op=True, name=str(message)))

    def put(self, action: Action, result: Tensor | None) -> None:
        """Keep the result of an action: to be sent at its turn, or taken by an action here."""
        if message := self.schedule.makes(action):
            self._here[message.twin] = result

    def take(self, action: Action) -> Tensor | None:
        """Return the tensor that an action needs, and wait for it; None if it needs none."""
        message = self.schedule.takes(action)
        if message in self._posted:
            return self._posted.pop(message).wait()
        return None if message is None else self._here.pop(message)

    def close(self) -> None:
        """Wait until all has been sent."""
        while self._sent:
            self._sent.popleft().wait()


def forward_only(schedule: Schedule, m: int) -> Schedule:
    """Return a schedule of forwards alone, of any number m of microbatches, in waves."""
    rank_of = schedule.rank_of[: schedule.num_stages]
    waves = sorted((i + s, Action(s, "F", i)) for i in range(m) for s in range(len(rank_of)))
    rows = ([a for _, a in waves if rank_of[a.stage] == r] for r in range(schedule.num_ranks))
    return lower(Schedule("forward", m, rank_of, tuple(map(tuple, rows))))
