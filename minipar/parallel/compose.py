"""All strategies together: `apply` puts the strategies of a `Plan` on a model, in order.

Idea.   Every strategy works along an axis of its own and keeps the names of parameters. So
        strategies stack: each works on the parameters that the one before it left.
Order.  Experts, tensor, context, pipeline, data: `apply` says why. After backward the data strategy
        (ddp, zero or fsdp) finishes first, because tensor parallelism sums finished gradients.
Sums.   An axis decides over which ranks a gradient is summed:

          axis      what ranks have         the gradient of a parameter is summed
          dp, cp    other tokens            over both at once, for every parameter
          ep        other tokens, experts   as over dp, but for experts: each is on one rank of ep
          tp        other heads, words      for norms under sequence parallelism, which see T/n
                                            tokens, and keys and values that several ranks share
          pp        other layers            for tied embeddings on two stages, and for all
                                            parameters where a schedule has two copies of the model

        `explain` prints this for each parameter, with bytes.
Whole.  Weights, gradients and optimizer state all have the shape of a parameter. A parameter knows
        its region of the serial parameter, after the cuts of all strategies. So one sum joins each
        tensor, and then the stages of a pipeline exchange their tensors.
Source. Narayanan et al. 2021 (arXiv 2104.04473), section 3; Grattafiori et al. 2024, "The Llama 3
        Herd of Models" (arXiv 2407.21783), section 3.3.2, for the order of the axes.
In torch: `torchtitan`, `parallelize.py` of each model.
Proved by tests/parallel/test_compose.py and tests/law/test_plans.py.

Use::

    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,microbatches=4")
    composed = apply(model, Mesh(**plan.mesh_sizes()), plan, make_optimizer)
    batch = [composed.shard(microbatch) for microbatch in batch]
    train_step(model, [composed], composed.optimizer, batch, composed.axis)
"""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import AXES, Mesh
from minipar.model.llama import IGNORE_INDEX, Llama
from minipar.model.recompute import checkpoint_activations
from minipar.parallel import context, ddp, expert, fsdp, tensor, ulysses, zero
from minipar.parallel.base import masters
from minipar.parallel.base.optimizer_state import Members, pack, unpack
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.pipeline import runtime
from minipar.parallel.plan import Plan

Microbatch = tuple[Tensor, ...]  # inputs [B, T], targets [B, T]; positions and mask if any
MakeOptimizer = Callable[..., torch.optim.Optimizer]  # (model, make=class) -> optimizer
WORKING_DTYPES = {"bf16": torch.bfloat16}
"""The dtype of weights that compute, by `Plan.precision`; the optimizer steps float32 masters.
Under the other precisions weights stay as they are."""


def apply(
    model: Llama,
    mesh: Mesh,
    plan: Plan,
    make_optimizer: MakeOptimizer,
    *,
    bucket_mb: float | None = None,
    init: Callable[[str], Tensor] | None = None,
) -> "Composed":
    """Put the strategies of `plan` on `model`, in place; the weights come from rank 0.

    Args:
        mesh: has the sizes of the plan, its axes in any order.
        make_optimizer: called as ``make_optimizer(model, make=...)`` once the parameters are final.
            It passes parameters to `make` in the order of the model. `make` is AdamW, or a class
            with the same arguments that shards its state (ZeRO 1 and 2).
        bucket_mb: as in `ddp.apply`; ZeRO has such buckets, too.
        init: for a model on "meta" under ZeRO 3: returns the whole first value of a weight by its
            serial name. `apply` asks for one weight at a time, so no rank ever has all.

    Raises `ValueError` on every rank, before the first collective, for a plan that breaks a rule
    or for another mesh.
    """
    plan.check(model.config)
    if any(mesh[axis].size != getattr(plan, axis, 1) for axis in AXES):
        raise ValueError(f"plan {plan} is for the mesh {plan.mesh_sizes()}, not {mesh.sizes}")
    data_axis = mesh.joint(*plan.data_axes)
    checkpoint_activations(model, plan.checkpointing)
    parts = Parts()

    # 1. Experts: while all ranks still have whole ones. Ranks of ep hold other tokens, as those of
    #    dp do; over tp, experts may be apart as well. What the balance counts is known here.
    if model.config.has_experts:
        cut = ("cp", "tp") if plan.sequence_parallel else ("cp",)  # over these, sequences are
        over = plan.expert_axes
        parts.expert = expert.apply(
            model,
            mesh.joint(*over),
            copies=mesh.joint(*(name for name in plan.data_axes if name not in over)),
            dispatch=plan.dispatch,
            nodes=plan.expert_nodes,
            batch=mesh.joint(*dict.fromkeys((*plan.data_axes, *cut))),
            pieces=mesh.joint(*cut),
        )
    # 2. Tensor: cuts matrices by their names and shapes, so before data parallelism flattens
    #    them; and before the pipeline, whose stages then are parts of a model that is cut already.
    if plan.tp > 1:
        parts.tensor = tensor.apply(
            model,
            mesh.tp,
            sequence=plan.sequence_parallel,
            overlap=plan.tp_overlap,
            experts=plan.expert_tensor_parallel,
        )
    # 3. Context: wraps attention as it is now, with the heads of this rank; on the whole model,
    #    because every stage of a pipeline has to know positions.
    if plan.cp > 1:
        if plan.context == "ulysses":
            parts.context = ulysses.apply(model, mesh.cp)
        else:
            parts.context = context.apply(model, mesh.cp, exchange=plan.context)
    # 4. Pipeline: keeps the layers of this rank. From here on, parameters are those that stay.
    if plan.pp > 1:
        parts.pipeline = runtime.apply(
            model,
            mesh.pp,
            plan.make_schedule(),
            token_shards=plan.tp if plan.sequence_parallel else 1,
            paired=plan.dispatch == "paired",
        )
    # 5. Data last: it sums gradients of the parameters that are left, and may cut them once more.
    #    Ranks of cp hold other tokens, as those of dp do: to gradients, both are one axis.
    #    Only now are weights cast, so that masters begin with all digits.
    dtype = WORKING_DTYPES.get(plan.precision)
    if parts.pipeline is not None:
        parts.pipeline.dtype = dtype  # of what stages send
    if plan.zero == 3:
        # A large table is gathered and freed like a layer; a small table is not worth a call.
        ends = model.model.embed_tokens, model.lm_head
        whole = [m for m in ends if type(m) in (nn.Embedding, nn.Linear)]  # on this rank of pp, tp
        tables = [m for m in whole if m.weight.numel() >= 2**20]
        parts.data = fsdp.apply(
            model,
            data_axis,
            blocks=[*fsdp.find_blocks(model), *tables],
            compute_dtype=dtype,
            # Gradients are still summed in float32.
            reduce_dtype=torch.float32 if dtype else None,
            average=False,
            init=None if init is None else lambda name, _: init(name),
        )
        optimizer = make_optimizer(model, make=torch.optim.AdamW)  # steps the pieces
    elif plan.zero:
        sharded = dict(optimizer_class=torch.optim.AdamW, axis=data_axis, bucket_mb=bucket_mb)
        optimizer = make_optimizer(model, make=partial(zero.ShardedOptimizer, **sharded))
        how = dict(stage=plan.zero, average=False, working_dtype=dtype)
        parts.data = zero.apply(model, data_axis, optimizer=optimizer, **how)
        if plan.zero == 1 and plan.pp > 1:  # else backward, and the stage before, wait for a reduce
            parts.data.most_in_flight = len(parts.data.buckets)
    else:
        parts.data = ddp.apply(model, data_axis, bucket_mb=bucket_mb, average=False)
        optimizer = make_optimizer(model, make=torch.optim.AdamW)
        if dtype is not None:
            masters.keep(model, optimizer, dtype)
    return Composed(model, mesh, plan, parts, optimizer)


@dataclass
class Parts:
    """The strategies of a plan, in the order in which they finish a backward.

    None where an axis has one rank. Tensor parallelism comes after data parallelism: it must not
    sum a gradient that data parallelism still sends.
    """

    data: Strategy | None = None
    expert: "expert.ExpertParallel | None" = None
    tensor: "tensor.TensorParallel | None" = None
    context: Strategy | None = None
    pipeline: runtime.Pipeline | None = None


class Composed(Strategy):
    """Several strategies that look like one; made by `apply`.

    `optimizer` steps the parameters of this rank. `axis` is the data axis: it counts tokens.
    """

    def __init__(
        self, model: Llama, mesh: Mesh, plan: Plan, parts: Parts, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(model, parts.data.axis)
        self.mesh, self.plan, self.parts, self.optimizer = mesh, plan, parts, optimizer
        # No other strategy sends gradients during backward.
        self.no_sync, self.check_finished = parts.data.no_sync, parts.data.check_finished
        if parts.pipeline is not None:
            self.run, self.evaluate = parts.pipeline.run, parts.pipeline.evaluate
            self.join, self.own = parts.pipeline.join, parts.pipeline.own
        self.strategies = [strategy for strategy in vars(parts).values() if strategy is not None]
        for strategy in self.strategies:
            strategy.device = self.device  # a model on "meta" has a device only now
        self.shard_axes = tuple(axis for s in self.strategies for axis in s.shard_axes)
        if parts.expert is not None and plan.zero:
            self.shard_axes += (parts.expert.copies,)
        with torch.device("meta"):
            serial = Llama(model.config)
        self.shapes = {name: tuple(p.shape) for name, p in serial.state_dict().items()}
        self.names = self._serial_names([name for name, _ in serial.named_parameters()])

    # ------------------------------------------------------------------ one step
    def finish_backward(self) -> None:
        for strategy in self.strategies:
            strategy.finish_backward()
        self.note_reduced()

    def shard(self, microbatch: Microbatch) -> Microbatch:
        """Return this rank's tokens of (inputs, targets) [B, T], which are whole sequences.

        If cp or tp cuts tokens, sequences are padded to a length that both divide, and positions
        [T/n] come third. Padding has no targets, and no other token attends to it. If you pass
        positions or a mask, pad yourself. Raises `ValueError` for sequences that are too long.
        """
        plan = self.plan
        if len(microbatch) == 2:
            self.model.config.check_length(microbatch[0].shape[1])
        if plan.cp == 1 and not plan.sequence_parallel:
            return microbatch
        inputs, targets, *rest = microbatch
        chunks = plan.cp * (1 if plan.cp == 1 or plan.context == "ulysses" else 2)
        multiple = chunks * (plan.tp if plan.sequence_parallel else 1)
        if not rest:
            missing = -inputs.shape[1] % multiple
            inputs = F.pad(inputs, (0, missing))
            targets = F.pad(targets, (0, missing), value=IGNORE_INDEX)
        whole = (inputs, targets, *(rest or [torch.arange(inputs.shape[1], device=inputs.device)]))
        if plan.cp == 1:
            return whole
        part = ulysses if plan.context == "ulysses" else context
        return part.shard_batch(whole, self.mesh.cp)

    # ------------------------------------------------------------------ whole tensors, out and in
    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer state as of one device, on the CPU, on all ranks; a collective.

        A serial optimizer can load it, and so can an optimizer under any other plan.
        """
        state = super().full_optimizer_state(self.optimizer)
        own = unpack(state, self.members(self.optimizer))
        whole = ChainMap(*all_gather_object(own, self.mesh.pp))  # rank 0 wins
        return pack(whole, self.names, state["param_groups"])

    def load_full_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a `full_optimizer_state`, of any plan, matched by name.

        Raises `ValueError` for the state of other parameters.
        """
        own = pack(unpack(state, self.names), self.members(self.optimizer), state["param_groups"])
        super().load_full_optimizer_state(self.optimizer, own)

    def members(self, optimizer: torch.optim.Optimizer) -> Members:
        """Return the parameters that `optimizer` steps, by group, each by its serial name."""
        groups = super().members(optimizer)
        return [{self.serial_name(name): p for name, p in group.items()} for group in groups]

    def serial_name(self, name: str) -> str:
        """Return the name in the serial model; a tied head is the embedding there."""
        tied = name == "lm_head.weight" and self.model.config.tie_embeddings
        return "model.embed_tokens.weight" if tied else name

    def _serial_names(self, order: list[str]) -> list[list[str]]:
        """Return the serial names of all ranks' parameters, by groups; a collective along pp."""
        own = [list(group) for group in self.members(self.optimizer)]
        groups = zip(*all_gather_object(own, self.mesh.pp), strict=True)
        return [[name for name in order if any(name in own for own in group)] for group in groups]
