"""`minipar bench STRATEGY`: strategies of ours, and whom of PyTorch's each races against.

A contender is a function ``field -> step``, called on each rank. How a race is run:
race.py. PyTorch takes part in its fastest form, and beside it as it comes:

- ddp: `DistributedDataParallel` with buckets of 25 and of 5 MB.
- fsdp: `ZeroRedundancyOptimizer`, and `fully_shard` on every block. CUDA streams hide the
  collectives of `fully_shard`; on a CPU each of them blocks. So `fully_shard` also races with
  asynchronous all-gathers, the next block named to every block, and asynchronous reduce-scatters.
- tensor: `parallelize_module` with `loss_parallel`; the input of q, k and v is prepared once.
- context: `context_parallel` refuses CPUs. Its ring is a template that takes any kernel, so the
  ring races with the CPU's FlashAttention, which is the kernel of ours.
- pipeline: `torch.distributed.pipelining` plays the schedule of the same name on the same stages.

Embeddings are not tied where PyTorch cannot tie them across ranks (tensor, pipeline).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minipar.comm.mesh import Axis, Mesh
from minipar.lab.bench import race
from minipar.lab.bench.race import RaceConfig
from minipar.model.llama import PRESETS, Llama, LlamaConfig, loss_of, token_loss
from minipar.parallel import context, ddp, fsdp, tensor, ulysses, zero
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.pipeline import runtime, stages
from minipar.parallel.pipeline.schedules import make

Step = Callable[[], Tensor]
"""A training step: forward, backward, optimizer. It returns the loss in nats per token."""
Contender = Callable[["Field"], Step]
ADAMW: dict[str, Any] = dict(lr=1e-4, fused=True)
"""The optimizer of all contenders."""


class Contest(NamedTuple):
    """One strategy: contenders of ours, each with those of PyTorch's to compare with."""

    axis: str
    seq_len: int
    pairs: Mapping[str, tuple[Contender, Mapping[str, Contender]]]


class Field(NamedTuple):
    """The conditions that all contenders of a race share."""

    config: RaceConfig
    axis: Axis
    shape: LlamaConfig

    def model(self) -> Llama:
        """Return the model, with the same weights on all ranks."""
        return Llama(self.shape, seed=0)

    def tokens(self, sequences: int) -> list[Tensor]:
        """Return inputs and targets [B, T]; only ranks of data parallelism have different ones."""
        stream = torch.Generator().manual_seed(self.axis.rank if self.axis.name == "dp" else 0)
        size = (sequences, self.config.seq_len + 1)
        tokens = torch.randint(self.shape.vocab_size, size, generator=stream)
        return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]

    def training(
        self,
        model: nn.Module,
        finish: Callable[[], None] = lambda: None,
        optimizer: torch.optim.Optimizer | None = None,
        cut: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    ) -> Step:
        """Return a training step on one batch; `cut` chooses the tokens of a rank."""
        inputs, targets = (cut(part).contiguous() for part in self.tokens(self.config.batch_size))
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model)(model(inputs), targets) / targets.numel()
            loss.backward()
            finish()
            optimizer.step()
            return loss.detach()

        return step


def run(config: RaceConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table; return a row for each pair on each link."""
    contest = CONTESTS[config.strategy]
    config = replace(config, seq_len=config.seq_len or contest.seq_len)
    config.check()
    rows = []
    for link_name in config.links:
        with race.pool(config.ranks, link_name) as ranks:
            for name, (_, rivals) in contest.pairs.items():
                measured = ranks.run(measure, config, link_name, name)[0]
                for torchs in rivals:
                    rows.append(race.row(config, link_name, name, torchs, measured))
                    print(f"{rows[-1]['link']}: {name} {rows[-1]['ratio']:.3f}", flush=True)
    print("\n" + race.table(rows))
    race.save(rows, config.json)
    return rows


def measure(config: RaceConfig, link_name: str, name: str) -> dict[str, race.Measured]:
    """Run a contender of ours and its rivals in turns on a link; called on every rank."""
    contest = CONTESTS[config.strategy]
    axis = getattr(Mesh(**{contest.axis: config.ranks}), contest.axis)
    shape = replace(PRESETS[config.preset], tie_embeddings=contest.axis not in ("tp", "pp"))
    if contest.axis == "pp":
        shape = replace(shape, num_layers=4 * config.ranks)
    mine, rivals = contest.pairs[name]
    everybody = {name: mine} | rivals
    steps = {each: make(Field(config, axis, shape)) for each, make in everybody.items()}
    return race.race(steps, axis, link_name, config.rounds)


def ours(apply: Callable[..., Strategy], **options: Any) -> Contender:
    """Return a contender that trains by a strategy of ours."""

    def make(on: Field) -> Step:
        model = on.model()
        strategy = apply(model, on.axis, **options)
        return on.training(model, strategy.finish_backward)

    return make


# ---------------------------------------------------------------------- data parallel
# PyTorch's parts are imported where they are used: they take most of a second.
def torch_ddp(on: Field, bucket_mb: float = 25.0, sharded: bool = False) -> Step:
    """Return a step of `DistributedDataParallel`; `sharded` adds `ZeroRedundancyOptimizer`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    capacity = bucket_mb * 1e6 / 2**20
    model = DistributedDataParallel(
        on.model(), bucket_cap_mb=capacity, gradient_as_bucket_view=True
    )
    optimizer = None
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
        )
    return on.training(model, optimizer=optimizer)


# ---------------------------------------------------------------------- ZeRO and FSDP
def our_zero(on: Field, stage: int) -> Step:
    """Return a step of `minipar.parallel.zero`."""
    model = on.model()
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, on.axis, **ADAMW)
    strategy = zero.apply(model, on.axis, optimizer=optimizer, stage=stage)
    return on.training(model, strategy.finish_backward, optimizer)


def torch_fsdp(on: Field, asynchronous: bool = False) -> Step:
    """Return a step of `fully_shard` on every block and the root.

    With `asynchronous` no collective blocks: the optimizer is the first to wait for gradients.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    works: list[dist.Work] = []

    class AsyncReduceScatter(DefaultReduceScatter):
        def __call__(self, **call: Any) -> None:
            works.append(super().__call__(**call | dict(async_op=True)))

    def finish() -> None:
        while works:
            works.pop(0).wait()

    model = on.model()
    blocks = list(model.model.layers)
    for module in (*blocks, model):
        fully_shard(module, mesh=grid_of(on.axis))
    if asynchronous:
        model._set_unshard_async_op(True)
        for here, following in zip((model, *blocks), blocks, strict=False):
            here.set_modules_to_forward_prefetch([following])
        for here, following in zip((model, *reversed(blocks)), reversed(blocks), strict=False):
            here.set_modules_to_backward_prefetch([following])
        for module in (model, *blocks):
            module.set_custom_reduce_scatter(AsyncReduceScatter())
    return on.training(model, finish)


def grid_of(axis: Axis) -> Any:
    """Return PyTorch's name for an axis, a `DeviceMesh`."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(axis.group, "cpu", mesh_dim_names=(axis.name,))


# ---------------------------------------------------------------------- tensor parallel
def torch_tensor(on: Field, sequence: bool = False) -> Step:
    """Return a step of `parallelize_module`, with or without its `SequenceParallel`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = on.model()
    parallelize_module(model, grid_of(on.axis), tensor_plan(sequence))
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    # A fused optimizer takes DTensors and tensors in parameter groups of their own.
    groups = [dict(params=params) for params in kinds.values() if params]
    step = on.training(model, optimizer=torch.optim.AdamW(groups, **ADAMW))

    def with_loss_parallel() -> Tensor:
        with loss_parallel():
            return step().to_local()

    return with_loss_parallel


def tensor_plan(sequence: bool) -> dict[str, Any]:
    """Return the plan of a Llama for `parallelize_module`: which style for which module."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    outside = Shard(1) if sequence else Replicate()  # of activations [B, T, D], between matrices
    layer, whole = "model.layers.*", Replicate()
    first, second = styles.ColwiseParallel(), styles.RowwiseParallel(output_layouts=outside)
    plan: dict[str, Any] = {
        f"{layer}.self_attn": styles.PrepareModuleInput(
            input_layouts=(outside, None, None), desired_input_layouts=(whole, None, None)
        ),
        f"{layer}.mlp": styles.PrepareModuleInput(
            input_layouts=outside, desired_input_layouts=whole
        ),
        **{f"{layer}.self_attn.{name}_proj": first for name in "qkv"},
        **{f"{layer}.mlp.{name}_proj": first for name in ("gate", "up")},
        f"{layer}.self_attn.o_proj": second,
        f"{layer}.mlp.down_proj": second,
        "model.embed_tokens": styles.RowwiseParallel(input_layouts=whole, output_layouts=outside),
        "lm_head": styles.ColwiseParallel(input_layouts=outside, use_local_output=False),
    }
    if sequence:
        norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
        plan |= dict.fromkeys(norms, styles.SequenceParallel())
    return plan


# ---------------------------------------------------------------------- context parallel
def our_context(on: Field, kind: str, ring: str = "ours") -> Step:
    """Return a step of "ring", "gather" or "ulysses"; `ring` may be PyTorch's, in place of ours."""
    model = on.model()
    if kind == "ulysses":
        strategy = ulysses.apply(model, on.axis)
    else:
        strategy = context.apply(model, on.axis, exchange=kind)
    if ring == "torch":
        strategy.attention = torch_ring()
    data = ddp.apply(model, on.axis)  # sums the gradients of all tokens
    return on.training(model, data.finish_backward, cut=strategy.own_tokens)


def torch_ring() -> type[torch.autograd.Function]:
    """Return PyTorch's ring around the CPU's kernel; it takes the arguments of `RingAttention`."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    aten, seq_dim, options = torch.ops.aten, 2, dict(is_causal=True, dropout_p=0.0)

    class TorchRing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            ctx.group, ctx.num_others = others[1].group, len(others)
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = theirs._templated_ring_attention(
                ctx.group, seq_dim, kernel, q, k, v, **options
            )
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
            grads = theirs._templated_ring_attention_backward(
                ctx.group, seq_dim, kernel, d_out, "grad_out", *ctx.saved_tensors, **options
            )
            return *grads, *[None] * ctx.num_others

    return TorchRing


# ---------------------------------------------------------------------- pipeline parallel
PIPELINES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Schedules of ours, and the class of `torch.distributed.pipelining` that plays the same."""
MICROBATCHES = 4  # per rank


def our_pipeline(on: Field, name: str) -> Step:
    """Return a step of `minipar.parallel.pipeline`."""
    m = MICROBATCHES * on.axis.size
    model = on.model()
    pipeline = runtime.apply(model, on.axis, make(name, on.axis.size, m))
    inputs, targets = on.tokens(m * on.config.batch_size)
    microbatches = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = pipeline.run(model, [pipeline], microbatches, weigh=lambda x: x / targets.numel())
        pipeline.finish_backward()
        optimizer.step()
        return loss / targets.numel()

    return step


def torch_pipeline(on: Field, name: str) -> Step:
    """Return a step of `torch.distributed.pipelining` on the stages of ours."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as theirs

    m = MICROBATCHES * on.axis.size
    model, schedule = on.model(), make(name, on.axis.size, m)
    inputs, targets = on.tokens(m * on.config.batch_size)
    last, own = schedule.num_stages - 1, schedule.stages_on(on.axis.rank)
    cut = stages.balance(stages.estimate_costs(on.shape), schedule.num_stages)
    parts = []
    for stage in own:
        part = stages.part_of(model, stages.layers_of(cut, stage), stage == 0, stage == last)
        parts.append(PipelineStage(part, stage, last + 1, inputs.device, group=on.axis.group))
    stages.keep_only(model, set(own), cut)
    kind = getattr(theirs, PIPELINES[name])
    runner = kind(
        parts[0] if issubclass(kind, theirs.PipelineScheduleSingle) else parts,
        m,
        loss_fn=lambda logits, t: token_loss(logits, t) / targets.numel(),
        scale_grads=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    given = [inputs] if 0 in own else []
    target = targets if last in own else None

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        runner.step(*given, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return sum(losses, torch.zeros(())).detach()

    return step


# ---------------------------------------------------------------------- who races
DDP = {f"{mb} MB": partial(torch_ddp, bucket_mb=mb) for mb in (25, 5)}
ZERO = {"ZeroRedundancyOptimizer": partial(torch_ddp, sharded=True)}
FSDP = {"fully_shard": torch_fsdp, "fully_shard, async": partial(torch_fsdp, asynchronous=True)}
SEQUENCE = {"with SequenceParallel": partial(torch_tensor, sequence=True)}
RING = {"PyTorch's ring": partial(our_context, kind="ring", ring="torch")}
CONTESTS = {
    "ddp": Contest(
        "dp", 128, {v: (ours(ddp.apply, version=v), DDP) for v in ("overlapped", "tuned")}
    ),
    "fsdp": Contest(
        "dp",
        128,
        {
            "ZeRO-1": (partial(our_zero, stage=1), ZERO),
            "ZeRO-2": (partial(our_zero, stage=2), ZERO),  # PyTorch has no ZeRO-2
            "FSDP": (ours(fsdp.apply), FSDP),
        },
    ),
    "tensor": Contest(
        "tp",
        256,
        {
            "plain": (ours(tensor.apply), {"parallelize_module": torch_tensor}),
            "sequence": (ours(tensor.apply, sequence=True), SEQUENCE),
            "overlap": (ours(tensor.apply, sequence=True, overlap=True), SEQUENCE),
        },
    ),
    "context": Contest(
        "cp",
        2048,
        {kind: (partial(our_context, kind=kind), RING) for kind in ("ring", "gather", "ulysses")},
    ),
    "pipeline": Contest(
        "pp",
        128,
        {
            name: (partial(our_pipeline, name=name), {theirs: partial(torch_pipeline, name=name)})
            for name, theirs in PIPELINES.items()
        },
    ),
}
