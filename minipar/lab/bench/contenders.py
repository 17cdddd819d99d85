"""Who races in `minipar bench`: strategies of ours, and PyTorch's own. The table: strategies.py.

A contender is a function ``(config, axis, shape) -> step`` on each rank. PyTorch takes part in its
fastest forms, not only as it comes:

- ddp: `DistributedDataParallel` with buckets of 25, 5 and 1 MB.
- fsdp: `ZeroRedundancyOptimizer`, and `fully_shard` on every block. CUDA streams hide its
  collectives; on a CPU each of them blocks. So it also races with asynchronous all-gathers, the
  next block named to every block, and asynchronous reduce-scatters (`AsyncReduceScatter`).
- tensor: `parallelize_module` with `loss_parallel`. In the tutorial's plan q, k and v each receive
  their input; a plan that prepares the input once races, too.
- context: `context_parallel` refuses CPUs. Its ring is a template that takes any kernel, so it
  races with the CPU's FlashAttention, which is the kernel of ours.
- pipeline: `torch.distributed.pipelining` plays the schedule of the same name on the same stages.

Embeddings are not tied where PyTorch cannot tie them across ranks (tensor, pipeline).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minipar.comm.mesh import Axis
from minipar.lab.bench.race import RaceConfig, Step
from minipar.model.llama import Llama, LlamaConfig, loss_of, token_loss
from minipar.parallel import context, ddp, fsdp, tensor, ulysses, zero
from minipar.parallel.pipeline import runtime, stages
from minipar.parallel.pipeline.schedules import make

ADAMW: dict[str, Any] = dict(lr=1e-4, fused=True)
"""The optimizer of all contenders."""


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Tensor],
    finish: Callable[[], None] = lambda: None,
    divide: int = 1,
) -> Step:
    """Return a training step on one batch; the loss is divided where gradients are summed."""
    inputs, targets = batch

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model)(model(inputs), targets) / targets.numel()
        (loss / divide).backward()
        finish()
        optimizer.step()
        return loss.detach()

    return step


# ---------------------------------------------------------------------- data parallel
def our_ddp(config: RaceConfig, axis: Axis, shape: LlamaConfig, version: ddp.Version) -> Step:
    """Return a step of `minipar.parallel.ddp`, as in the trainer."""
    model = Llama(shape)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    strategy = ddp.apply(model, axis, average=False, version=version)
    batch = config.tokens(shape, seed=axis.rank)
    return training(model, optimizer, batch, strategy.finish_backward, axis.size)


def torch_ddp(config: RaceConfig, axis: Axis, shape: LlamaConfig, bucket_mb: float) -> Step:
    """Return a step of `DistributedDataParallel` with buckets of that size."""
    model = Llama(shape)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return training(wrapped(model, bucket_mb), optimizer, config.tokens(shape, seed=axis.rank))


def wrapped(model: Llama, bucket_mb: float = 25.0) -> DistributedDataParallel:
    """Wrap a model in PyTorch's data parallelism."""
    capacity = bucket_mb * 1e6 / 2**20
    return DistributedDataParallel(model, bucket_cap_mb=capacity, gradient_as_bucket_view=True)


# ---------------------------------------------------------------------- ZeRO and FSDP
def our_zero(config: RaceConfig, axis: Axis, shape: LlamaConfig, stage: int) -> Step:
    """Return a step of `minipar.parallel.zero`."""
    model = Llama(shape)
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, axis, **ADAMW)
    strategy = zero.apply(model, axis, optimizer=optimizer, stage=stage, average=False)
    batch = config.tokens(shape, seed=axis.rank)
    return training(model, optimizer, batch, strategy.finish_backward, axis.size)


def our_fsdp(config: RaceConfig, axis: Axis, shape: LlamaConfig, reshard: bool = True) -> Step:
    """Return a step of `minipar.parallel.fsdp`, with or without `reshard_after_forward`."""
    model = Llama(shape)
    strategy = fsdp.apply(model, axis, reshard_after_forward=reshard, average=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    batch = config.tokens(shape, seed=axis.rank)
    return training(model, optimizer, batch, strategy.finish_backward, axis.size)


# PyTorch's parts are imported where they are used: they take most of a second.
def torch_zero(config: RaceConfig, axis: Axis, shape: LlamaConfig, bucket_mb: float) -> Step:
    """Return a step of `ZeroRedundancyOptimizer` on top of `DistributedDataParallel`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrapped(Llama(shape), bucket_mb)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return training(model, optimizer, config.tokens(shape, seed=axis.rank))


def torch_fsdp(
    config: RaceConfig,
    axis: Axis,
    shape: LlamaConfig,
    reshard: bool = True,
    prefetch: bool = False,
    async_reduce: bool = False,
) -> Step:
    """Return a step of `fully_shard` on every block and the root."""
    from torch.distributed.fsdp import fully_shard

    model, grid = Llama(shape), grid_of(axis)
    blocks = list(model.model.layers)
    for module in (*blocks, model):
        fully_shard(module, mesh=grid, reshard_after_forward=reshard)
    if prefetch:
        model._set_unshard_async_op(True)
        for here, following in zip((model, *blocks), blocks, strict=False):
            here.set_modules_to_forward_prefetch([following])
        for here, following in zip((model, *reversed(blocks)), reversed(blocks), strict=False):
            here.set_modules_to_backward_prefetch([following])
    reduce_scatter = AsyncReduceScatter()
    if async_reduce:
        for module in (model, *blocks):
            module.set_custom_reduce_scatter(reduce_scatter)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return training(model, optimizer, config.tokens(shape, seed=axis.rank), reduce_scatter.wait)


def grid_of(axis: Axis) -> Any:
    """Return PyTorch's name for an axis, a `DeviceMesh`."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(axis.group, "cpu", mesh_dim_names=(axis.name,))


class AsyncReduceScatter:
    """A reduce-scatter for `set_custom_reduce_scatter` that returns at once; `wait` ends them all.

    PyTorch cuts the output into gradients; the optimizer is the first to read them.
    """

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Start to reduce."""
        work = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=True)
        self.works.append(work)

    def wait(self) -> None:
        """Block until all gradients are there."""
        while self.works:
            self.works.pop(0).wait()


# ---------------------------------------------------------------------- tensor parallel
def our_tensor(config: RaceConfig, axis: Axis, shape: LlamaConfig, **options: bool) -> Step:
    """Return a step of `minipar.parallel.tensor`."""
    model = Llama(shape, seed=0)
    strategy = tensor.apply(model, axis, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return training(model, optimizer, config.tokens(shape), strategy.finish_backward)


def torch_tensor(
    config: RaceConfig, axis: Axis, shape: LlamaConfig, sequence: bool = False, once: bool = True
) -> Step:
    """Return a step of `parallelize_module`; `once`: the input of q, k, v is prepared once."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = Llama(shape, seed=0)
    parallelize_module(model, grid_of(axis), tensor_plan(shape.num_layers, sequence, once))
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    # A fused optimizer takes DTensors and tensors in parameter groups of their own.
    groups = [dict(params=params) for params in kinds.values() if params]
    step = training(model, torch.optim.AdamW(groups, **ADAMW), config.tokens(shape))

    def with_loss_parallel() -> Tensor:
        with loss_parallel():
            return step().to_local()

    return with_loss_parallel


def tensor_plan(num_layers: int, sequence: bool, once: bool) -> dict[str, Any]:
    """Return the plan of a Llama for `parallelize_module`: which style for which module."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outside = Shard(1) if sequence else Replicate()  # of activations [B, T, D], between matrices
    first = ColwiseParallel(input_layouts=Replicate() if once else outside)
    second = RowwiseParallel(output_layouts=outside)
    block: dict[str, Any] = {
        "self_attn.o_proj": second,
        "mlp.down_proj": second,
        **{f"self_attn.{name}_proj": first for name in "qkv"},
        **{f"mlp.{name}_proj": first for name in ("gate", "up")},
    }
    styles: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, use_local_output=False),
    }
    if once:
        block["self_attn"] = PrepareModuleInput(
            input_layouts=(outside, None, None), desired_input_layouts=(Replicate(), None, None)
        )
        block["mlp"] = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    if sequence:
        block["input_layernorm"] = block["post_attention_layernorm"] = SequenceParallel()
        styles["model.norm"] = SequenceParallel()
    for i in range(num_layers):
        styles |= {f"model.layers.{i}.{name}": style for name, style in block.items()}
    return styles


# ---------------------------------------------------------------------- context parallel
def our_context(
    config: RaceConfig, axis: Axis, shape: LlamaConfig, rotate: str = "", **options: str
) -> Step:
    """`minipar.parallel.context`; with `rotate`, around PyTorch's ring instead of ours."""
    model = Llama(shape, seed=0)
    strategy = context.apply(model, axis, **options)
    if rotate:
        strategy.attention = torch_ring(rotate)
    return cut_sequences(config, axis, model, strategy)


def our_ulysses(config: RaceConfig, axis: Axis, shape: LlamaConfig) -> Step:
    """`minipar.parallel.ulysses`."""
    model = Llama(shape, seed=0)
    return cut_sequences(config, axis, model, ulysses.apply(model, axis))


def cut_sequences(config: RaceConfig, axis: Axis, model: Llama, strategy: Any) -> Step:
    """Return a step on this rank's tokens; our data parallelism sums the gradients."""
    data = ddp.apply(model, axis, average=False)
    batch = [strategy.own_tokens(x).contiguous() for x in config.tokens(model.config)]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return training(model, optimizer, batch, data.finish_backward, axis.size)


def torch_ring(rotate: str) -> type[torch.autograd.Function]:
    """Return PyTorch's ring around the CPU's kernel; it takes the arguments of `RingAttention`."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    aten, seq_dim, options = torch.ops.aten, 2, dict(is_causal=True, dropout_p=0.0)

    class TorchRing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            _, axis, *_ = others
            theirs.set_rotate_method(rotate)
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = theirs._templated_ring_attention(
                axis.group, seq_dim, kernel, q, k, v, **options
            )
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.group, ctx.num_others = axis.group, len(others)
            return out

        @staticmethod
        def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
            theirs.set_rotate_method(rotate)
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


def our_pipeline(config: RaceConfig, axis: Axis, shape: LlamaConfig, name: str) -> Step:
    """Return a step of `minipar.parallel.pipeline`."""
    m = MICROBATCHES * axis.size
    model = Llama(shape, seed=0)
    pipeline = runtime.apply(model, axis, make(name, axis.size, m))
    inputs, targets = config.tokens(shape, sequences=m * config.batch_size)
    microbatches = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = pipeline.run(model, [pipeline], microbatches, weigh=lambda x: x / targets.numel())
        pipeline.finish_backward()
        optimizer.step()
        return loss / targets.numel()

    return step


def torch_pipeline(config: RaceConfig, axis: Axis, shape: LlamaConfig, name: str) -> Step:
    """Return a step of `torch.distributed.pipelining` on the stages of ours."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as theirs

    m = MICROBATCHES * axis.size
    model, schedule = Llama(shape, seed=0), make(name, axis.size, m)
    inputs, targets = config.tokens(shape, sequences=m * config.batch_size)
    last, own = schedule.num_stages - 1, schedule.stages_on(axis.rank)
    cut = stages.balance(stages.estimate_costs(shape), schedule.num_stages)
    parts = []
    for stage in own:
        part = stages.part_of(model, stages.layers_of(cut, stage), stage == 0, stage == last)
        parts.append(PipelineStage(part, stage, last + 1, inputs.device, group=axis.group))
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
