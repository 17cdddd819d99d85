"""ZeRO, stages 1 and 2: every rank keeps and updates one n-th of the optimizer's state.

Idea.   Under data parallelism all ranks hold the same optimizer state and compute the same update.
        Instead, each owns one n-th of the numbers: it needs the gradient of these alone, updates
        these alone, and hands them out. Adam's state is twice the model, and now n times less.
        Stage 2 frees gradients as well, as soon as their owners have them.
Math.   On rank r, whose slice of all parameters is w_r: g_r = slice r of sum_s g^(s) (divided by n
        with ``average=True``); w_r <- w_r - update(g_r, state_r); w = [w_0 ... w_(n-1)]. An update
        that acts on each number alone (SGD, Adam and their kin) gives what one device computes.
Shapes. A bucket of N numbers, one flat buffer: weights R@dp; gradients P@dp, reduce-scattered to
        [N/n] V@dp; weights [N/n] V@dp, gathered to [N] R@dp. The n slices cut through parameters
        wherever they fall: this rank's part of a parameter is a *piece*, to the optimizer a
        parameter like any other. Every rank owns as many bytes, give or take one number per bucket.
Comms.  P bytes of parameters: reduce-scatter (n-1)/n P during backward and all-gather (n-1)/n P
        during the next forward, 2 (n-1)/n P in all: not more than `ddp`. Besides, one byte for each
        of N parameters (did any rank use it?): 2 (n-1)/n N. Stage 1 reduces the sum of the
        microbatches; stage 2 each of m, and says before each whether it is the last, in another
        byte: m (n-1)/n (P + 2 N + 2) + (n-1)/n P. If weights work in bf16 and the slices are
        float32 masters, the all-gather is half: (n-1)/n P / 2.
Memory. Bytes per rank at the highest point, for gradients G and optimizer state O (Adam: 2 P):
          ddp      P + G + O
          stage 1  P + G + O/n               gradients are whole until the end of backward
          stage 2  P + G/n + O/n             and two buckets: one on its way, one being filled
        On a CPU slices arrive beside what is on its way, to be added up: 3 more buckets, and 2;
        in a pipeline stage 1 has all of them on their way at once.
Costs you. Optimizers that look at whole matrices (Muon, Adafactor) or at all parameters at once
        (LBFGS) are refused. After `finish_backward` gradients lie in the pieces, ``p.grad`` is
        None. Parameters are whole only after `ShardedOptimizer.synchronize`, or where a forward
        uses them.
Source. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models" (arXiv 1910.02054), sections 5.1, 5.2 and 7.
In torch: `torch.distributed.optim.ZeroRedundancyOptimizer` for stage 1, on top of `ddp`: 3 P bytes.
Proved by tests/parallel/test_zero.py and tests/parity/test_zero.py.

Three versions, each one idea further: `Naive`, `Stage1`, `Stage2`. Use::

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh.dp, lr=1e-3)
    strategy = zero.apply(model, mesh.dp, optimizer=optimizer, stage=2)
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.collectives import Pending, all_reduce
from minipar.comm.mesh import Axis
from minipar.comm.values import look, send_to_host
from minipar.parallel.base.optimizer_state import Members
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import master_of
from minipar.parallel.base.strategy import Strategy, claim, flags
from minipar.parallel.sharded_optimizer import Bucket, ShardedOptimizer


def apply(
    model: nn.Module,
    axis: Axis,
    *,
    optimizer: ShardedOptimizer,
    stage: int = 1,
    average: bool = True,
    working_dtype: torch.dtype | None = None,
) -> Strategy:
    """Make `model` (any `nn.Module`) data parallel along `axis`, at the traffic of `ddp`.

    Args:
        optimizer: holds all trainable parameters of `model`, and is sharded along `axis`.
        stage: 1: gradients are whole until the end of backward; 2: they never are.
        average: divide the sum of the gradients by the number of ranks.
        working_dtype: compute in this dtype, and gather weights in it. The slices stay as they are,
            and are the master weights of masters.py; gradients are added up and sent in their
            dtype. Frozen parameters are cast and have no master; those of whole or complex numbers
            stay as they are.

    After `finish_backward` the gradients of the batch lie in the pieces that the optimizer's
    `param_groups` list, cut over `axis`, and ``p.grad`` is None. A piece that no rank used has no
    gradient, as on one device. Stage 2 sends under `no_sync`, too: gradients that wait to be sent
    would have to be kept. After a backward that an exception cut short, call `finish_backward` and
    ``optimizer.zero_grad()`` on all ranks.

    Weights arrive during the next forward, each before the module that owns it runs. What reads one
    before (an average of weights, a clamp, a compiled model) waits for it there and then; only a
    tensor that shares its memory, such as a ``p.data`` taken earlier, is read as it is.

    Raises `ValueError` for another stage, an optimizer that does not fit or holds parameters of
    others, a model with sparse gradients, one that torch.jit runs, or one that a strategy trains
    already.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage} is not one of ZeRO's here; use 1 or 2, or fsdp for 3")
    if not isinstance(optimizer, ShardedOptimizer) or optimizer.axis != axis:
        raise ValueError(
            f"optimizer= must be a ShardedOptimizer along {axis.name}={axis.size}, "
            f"not {type(optimizer).__name__} along {getattr(optimizer, 'axis', None)}"
        )
    left_out = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.numel() and p not in optimizer.bucket_of
    ]
    if left_out:
        raise ValueError(
            f"{left_out[0]} (one of {len(left_out)} parameters) is trainable but not in the "
            f"optimizer; hand it over, or freeze it with requires_grad_(False)"
        )
    others = optimizer.bucket_of.keys() - set(model.parameters())
    if others:
        raise ValueError(
            f"the optimizer holds {len(others)} parameters that are not of the model, such as of a "
            f"loss, and no rank would know the others' gradients of them; give them another "
            f"optimizer, or hand over one model that has both"
        )
    claim(model, f"zero {stage}", axis)
    replicate(model, axis, is_data=True)
    if working_dtype is not None:
        optimizer.work_in(model, working_dtype)
    return STAGES[stage](model, axis, optimizer, average)


# ---------------------------------------------------------------------- 1. state cut n ways
class Naive(Strategy):
    """Stage 1 at its simplest: after backward, one reduce-scatter per bucket.

    The optimizer then updates this rank's slices and gathers all of them, `ShardedOptimizer.step`.
    """

    def __init__(
        self, model: nn.Module, axis: Axis, optimizer: ShardedOptimizer, average: bool = True
    ) -> None:
        super().__init__(model, axis)
        self.shard_axes = (axis,)
        self.optimizer, self.op = optimizer, "avg" if average else "sum"
        self.rows = self.buckets = optimizer.buckets
        self.bucket_of = optimizer.bucket_of
        self.used = optimizer.used
        optimizer.attach(model)
        self.watch(optimizer.pieces.values())
        self.hook_gradients(self.bucket_of)
        self.replaced(
            self.bucket_of, "zero keeps the gradients in its ShardedOptimizer; step that one"
        )
        for module in model.modules():
            own = module.parameters(recurse=False)
            if buckets := {self.bucket_of[p] for p in own if p in self.bucket_of}:
                module.register_forward_pre_hook(_waits_for(buckets))

    def with_gradients(self) -> Iterable[nn.Parameter]:
        return self.optimizer.pieces.values()

    def members(self, optimizer: torch.optim.Optimizer) -> Members:
        return self.optimizer.members()

    def full_masters(self) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = {}
        for row in self.rows:
            if row.has_masters:
                joined = row.join({p.piece: master_of(p) for p in row.parameters}, row.shard.dtype)
                found |= {p: joined[p.piece] for p in row.parameters}
        return found

    def load_masters(self, whole: Mapping[nn.Parameter, Tensor]) -> None:
        for row in self.rows:
            for p in row.parameters if row.has_masters else ():
                p.piece.copy_(row.part_of(p.piece, whole[p]))

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        self.optimizer.load_state_dict(state)

    def finish_backward(self) -> None:
        super().finish_backward()
        for bucket in self.buckets:
            self._reduce(bucket)
            bucket.wait_for_reduce()
        told = self._tell()
        told.wait()  # also where no one looks at it
        self._hand_out(told)

    def _reduce(self, bucket: Bucket) -> None:
        if self.optimizer.stepped:
            raise RuntimeError(
                "the gradients of the last step are still here: call zero_grad() of the optimizer, "
                "as that of the model does not reach the pieces"
            )
        self.used.update(bucket.reduce(self.op))

    def _tell(self, more: bool = False) -> Pending:
        """Tell all ranks which parameters this one has used, and whether `more` is to come."""
        used = flags([*(p in self.used for p in self.bucket_of), more], self.device)
        return all_reduce(used, self.axis, "max", out=used, async_op=True)

    def _hand_out(self, told: Pending) -> None:
        """Give each piece its gradient, unless no rank has used its parameter."""
        used = self.used
        if len(used) < len(self.bucket_of):  # look only where the others' flags matter
            by_any = look(told.wait(), on_meta=())  # where all ranks are alike
            pairs = zip(self.bucket_of, by_any, strict=False)  # the last is no parameter
            used = used | {p for p, is_used in pairs if is_used}
        for bucket in self.buckets:
            bucket.hand_out(used)
        self.used.clear()
        self.note_reduced()


# ---------------------------------------------------------------------- 2. while computing goes on
class Stage1(Naive):
    """A bucket is reduced as soon as backward has filled it, while backward goes on.

    Buckets go one after the other, as all ranks must send the same in the same order. Sending each
    bucket once is a *round*, at the end of which ranks tell each other which parameters they have
    used, and whether they need another round: in the first step it shows that a parameter receives
    its gradient in several parts (used by two re-entrant checkpoints, say), all of which are waited
    for from then on.

    Backward waits for buckets that have left, so that few are whole. Not in a pipeline: there all
    are whole since the first microbatch, and the stage before waits for the last backward's end.
    """

    every_backward_sends = False  # under `no_sync`, too: then ranks may differ in their rounds
    most_in_flight = 2  # buckets: the link always has the next one to carry, and memory an end

    def __init__(self, model: nn.Module, axis: Axis, *options: Any) -> None:
        super().__init__(model, axis, *options)
        # Gradients come into being from the last layer to the first: a bucket is complete with
        # that of its first parameter. In forward it is needed for that one first, too.
        place = {p: i for i, p in enumerate(model.parameters())}
        self.buckets.sort(key=lambda b: -min(place.get(p, 0) for p in b.parameters))
        self.next = 0  # the bucket whose turn it is
        self.in_flight: deque[Bucket] = deque()
        self.telling: Pending | None = None  # at the end of the last round
        self.learning = True  # in the first step
        self.arrived: Counter[nn.Parameter] = Counter()

    def _on_gradient(self, p: nn.Parameter) -> None:
        super()._on_gradient(p)
        bucket = self.bucket_of[p]
        if bucket.is_sent and self.synchronises and not self.learning:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} received another gradient after its bucket "
                f"was sent, unlike in the first step. Call finish_backward() after each backward "
                f"outside of no_sync(), also after one that was cut short by an exception (and "
                f"zero the gradients then)"
            )
        bucket.take(p)
        if not (self.synchronises or self.every_backward_sends):
            return
        self.arrived[p] += 1
        bucket.missing -= 1
        while self.next < len(self.buckets) and self.buckets[self.next].missing <= 0:
            self._reduce(self.buckets[self.next])

    def _reduce(self, bucket: Bucket) -> None:
        super()._reduce(bucket)
        self.next += 1
        self.in_flight.append(bucket)
        is_full = len(self.in_flight) > self.most_in_flight
        if is_full and (self.every_backward_sends or not self.others_wait):
            self.in_flight.popleft().wait_for_reduce()

    def _end_round(self, more: bool = False) -> Pending:
        """Reduce the buckets that are left, complete or not; `_tell`."""
        for bucket in self.buckets[self.next :]:
            self._reduce(bucket)
        self.next = 0
        for bucket in self.buckets:
            if self.learning:
                parts = sum(max(1, self.arrived[p]) for p in bucket.parameters)
                bucket.expected = max(bucket.expected, parts)
                more |= any(p.grad is not None for p in bucket.parameters)
            bucket.missing, bucket.is_sent = bucket.expected, False
        self.arrived.clear()
        self._end_telling()
        self.telling = self._tell(more)
        return self.telling

    def _end_telling(self) -> None:
        if self.telling is not None:
            self.telling.wait()
            self.telling = None

    def finish_backward(self) -> None:
        Strategy.finish_backward(self)
        more = True
        while more:
            told = self._end_round()
            while self.in_flight:
                self.in_flight.popleft().wait_for_reduce()
            more = self._goes_on(told)
        self._hand_out(told)
        self.learning = False

    def _goes_on(self, told: Pending) -> bool:
        """Whether any rank needs another round; a GPU is waited for in the first step alone."""
        return self.learning and self._is_told(told)

    def _is_told(self, told: Pending) -> bool:
        return bool(look(told.wait()[-1], on_meta=0))


# ---------------------------------------------------------------------- 3. gradients cut n ways
LAST, MORE, ASK_AGAIN = 0, 1, 2
"""What ranks say of a round before it; the greatest counts."""


class Stage2(Stage1):
    """Whole gradients are freed while backward goes on, after every microbatch anew.

    When a bucket is sent, the one before it must have arrived: no more than two buckets are whole
    at any moment. Every `no_sync` is a round, and a rank with fewer of them than others takes part
    in theirs with zeros. So all must know whether another round follows. Each rank says so before
    its first gradient of a round: the answer is on the host while a GPU computes the others. Not if
    a backward outside of `no_sync` was not the last, as of a pipeline that has several stages on a
    rank: the first step shows it, and from then on the answer is waited for at the end.
    """

    every_backward_sends = True
    most_in_flight = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_begun = False  # this round
        self.at_last = LAST  # what this rank says outside of `no_sync`
        self.said: Callable[[], Tensor] | None = None  # by all ranks, on the host

    def _begin_round(self) -> None:
        """Tell all ranks whether this one needs another round, unless that was done."""
        if self.has_begun:
            return
        if self.said is not None:
            self.said()  # before the last round: it has long arrived
        says = flags([self.at_last if self.synchronises else MORE], self.device)
        saying = all_reduce(says, self.axis, "max", out=says, async_op=True)
        self.has_begun, self.said = True, send_to_host(saying.wait, self.device)

    def _on_gradient(self, p: nn.Parameter) -> None:
        self._begin_round()
        super()._on_gradient(p)

    def _end_round(self, more: bool = False) -> Pending:
        self._begin_round()  # where no gradient came
        self.has_begun = False
        return super()._end_round(more)

    def _goes_on(self, told: Pending) -> bool:
        [said] = look(self.said(), on_meta=[ASK_AGAIN])
        return self._is_told(told) if self.learning or said == ASK_AGAIN else said == MORE

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.has_begun:
            if not self.learning and self.at_last != ASK_AGAIN:
                raise RuntimeError(
                    "no_sync() came after a backward outside of it, unlike in the first step: "
                    "other ranks were told that none would follow. Leave no_sync() for the last "
                    "backward, and call finish_backward() after it"
                )
            self.at_last = ASK_AGAIN
        with super().no_sync():
            try:
                yield
            finally:
                self._end_round(more=True)


STAGES: dict[int, type[Stage1]] = {1: Stage1, 2: Stage2}


# ---------------------------------------------------------------------- helpers
def _waits_for(buckets: set[Bucket]) -> Callable[[nn.Module, Any], None]:
    """What a module does before it computes; a closure, which a deep copy of the model shares."""

    def before(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # a compiled graph waits where it uses a weight
            for bucket in buckets:
                bucket.arrive()

    return before
