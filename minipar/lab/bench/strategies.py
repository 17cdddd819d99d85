"""`minipar bench STRATEGY`: our strategies, and PyTorch's strategy that each is compared with.

A contender is a function ``field -> step``, called on each rank. Our contenders train by a plan, as
`minipar train` does; only the tuned buckets of ddp are in no plan. How a race is run: race.py.

- ddp: `DistributedDataParallel`.
- fsdp: `ZeroRedundancyOptimizer`, and `fully_shard` on every block. CUDA streams hide the
  collectives of `fully_shard`; on a CPU each of them blocks. So its collectives are asynchronous
  here, and every block prefetches the next one.
- tensor: `parallelize_module` with `SequenceParallel` and `loss_parallel`; the input of q, k and v
  is prepared once.
- context: `context_parallel` refuses CPUs. Its ring is a template that takes any kernel. So this
  ring runs with the CPU's FlashAttention, which is also the kernel of our ring.
- pipeline: `torch.distributed.pipelining` plays the schedule of the same name on the same stages.

Embeddings are not tied where PyTorch cannot tie them across ranks (tensor, pipeline).
"""

from collections.abc import Callable
from contextlib import nullcontext
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
from minipar.parallel import compose, ddp
from minipar.parallel.pipeline import stages
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.plan import Plan
from minipar.train.config import check_numbers
from minipar.train.step import forward_backward

Step = Callable[[], Tensor]
"""A training step: forward, backward, optimizer. It returns the loss in nats per token."""
Contender = Callable[["Field"], Step]
RANKS = 2
ADAMW: dict[str, Any] = dict(lr=1e-4, fused=True)
"""The optimizer of all contenders."""


class Field(NamedTuple):
    """The conditions that all contenders of a race share."""

    mesh: Mesh  # of one axis
    shape: LlamaConfig
    seq_len: int
    batch_size: int = 2  # sequences per rank and step; of a pipeline, per microbatch

    @property
    def axis(self) -> Axis:
        return self.mesh[next(iter(self.mesh.sizes))]

    def model(self) -> Llama:
        """Return the model, with the same weights on all ranks."""
        return Llama(self.shape, seed=0)

    def tokens(self, sequences: int) -> list[Tensor]:
        """Return inputs and targets [B, T]; only ranks of data parallelism have different ones."""
        stream = torch.Generator().manual_seed(self.axis.rank if self.axis.name == "dp" else 0)
        size = (sequences, self.seq_len + 1)
        tokens = torch.randint(self.shape.vocab_size, size, generator=stream)
        return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]

    def training(
        self,
        model: nn.Module,
        finish: Callable[[], None] = lambda: None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Step:
        """Return a training step on one batch."""
        inputs, targets = self.tokens(self.batch_size)

        def backward() -> Tensor:
            loss = loss_of(model)(model(inputs), targets) / targets.numel()
            loss.backward()
            finish()
            return loss

        return stepping(optimizer or torch.optim.AdamW(model.parameters(), **ADAMW), backward)


def stepping(optimizer: torch.optim.Optimizer, backward: Step) -> Step:
    """Return a training step around a forward and backward that return the loss."""

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = backward()
        optimizer.step()
        return loss.detach()

    return step


def run(config: RaceConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table; return a row for each pair on each link."""
    check_numbers(config, {"rounds": 1})
    for link_name in config.links:
        race.label(link_name)  # an error now, and not after the first link
    rows = []
    for link_name in config.links:
        with race.pool(RANKS, link_name) as ranks:
            for ours, (_, torchs, _) in CONTESTS[config.strategy].items():
                seconds = ranks.run(measure, config, link_name, ours)[0]
                rows.append(race.row(link_name, ours, torchs, seconds))
                print(f"{rows[-1]['link']}: {ours} {rows[-1]['ratio']:.3f}", flush=True)
    print("\n" + race.table(rows))
    race.save(rows, config.json)
    return rows


def measure(config: RaceConfig, link_name: str, name: str) -> dict[str, list[float]]:
    """Run a contender of ours and PyTorch's in turns on a link; called on every rank."""
    axis_name, seq_len = AXES[config.strategy]
    shape = replace(PRESETS["small"], tie_embeddings=axis_name not in ("tp", "pp"))
    if axis_name == "pp":
        shape = replace(shape, num_layers=4 * RANKS)
    own, _, rival = CONTESTS[config.strategy][name]
    field = Field(Mesh(**{axis_name: RANKS}), shape, seq_len)
    return race.race(own(field), rival(field), field.axis, link_name, config.rounds)


def ours(on: Field, words: str = "", ring: Callable[[], type] | None = None) -> Step:
    """Return a step by the plan that has these `words`; `ring` makes attention in place of ours."""
    plan = Plan.parse(f"{on.axis.name}={on.axis.size}" + f",{words}" * bool(words))
    model = on.model()
    mine = compose.apply(model, on.mesh, plan, lambda m, make: make(m.parameters(), **ADAMW))
    if ring:
        mine.parts.context.attention = ring()
    whole = (part.chunk(plan.microbatches) for part in on.tokens(plan.microbatches * on.batch_size))
    batch = [mine.shard(microbatch) for microbatch in zip(*whole, strict=True)]
    num_tokens = sum(targets.numel() for _, targets, *_ in batch)

    def backward() -> Tensor:
        run = mine.run or forward_backward
        how = dict(weigh=lambda x: x / (num_tokens * mine.axis.size), autocast=nullcontext)
        loss = run(model, [mine], batch, **how)
        mine.finish_backward()
        return loss / num_tokens

    return stepping(mine.optimizer, backward)


# ---------------------------------------------------------------------- data parallel
def tuned_ddp(on: Field) -> Step:
    """Return a step of ddp with the buckets that it finds best."""
    model = on.model()
    return on.training(model, ddp.apply(model, on.axis, version="tuned").finish_backward)


# PyTorch's parts are imported where they are used: they take most of a second.
def torch_ddp(on: Field, sharded: bool = False) -> Step:
    """Return a step of `DistributedDataParallel`; `sharded` adds `ZeroRedundancyOptimizer`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(on.model(), gradient_as_bucket_view=True)
    if not sharded:
        return on.training(model)
    options = dict(parameters_as_bucket_view=True, **ADAMW)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return on.training(model, optimizer=optimizer)


def torch_fsdp(on: Field) -> Step:
    """Return a step of `fully_shard`: the optimizer is the first to wait for gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    works: list[dist.Work] = []

    class AsyncReduceScatter(DefaultReduceScatter):
        def __call__(self, **call: Any) -> None:
            works.append(super().__call__(**call | dict(async_op=True)))

    def finish() -> None:
        while works:
            works.pop(0).wait()

    model, grid = on.model(), on.mesh.device_mesh()
    blocks = list(model.model.layers)
    for module in (*blocks, model):
        fully_shard(module, mesh=grid)
        module.set_custom_reduce_scatter(AsyncReduceScatter())
    model._set_unshard_async_op(True)
    for here, following in zip((model, *blocks), blocks, strict=False):
        here.set_modules_to_forward_prefetch([following])
    for here, following in zip((model, *reversed(blocks)), reversed(blocks), strict=False):
        here.set_modules_to_backward_prefetch([following])
    return on.training(model, finish)


# ---------------------------------------------------------------------- tensor parallel
def torch_tensor(on: Field) -> Step:
    """Return a step of `parallelize_module`, with its `SequenceParallel`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = on.model()
    parallelize_module(model, on.mesh.device_mesh(), tensor_plan())
    # A fused optimizer takes DTensors and tensors in parameter groups of their own.
    groups = [
        dict(params=[p for p in model.parameters() if isinstance(p, DTensor) is is_cut])
        for is_cut in (True, False)
    ]
    step = on.training(model, optimizer=torch.optim.AdamW(groups, **ADAMW))

    def with_loss_parallel() -> Tensor:
        with loss_parallel():
            return step().to_local()

    return with_loss_parallel


def tensor_plan() -> dict[str, Any]:
    """Return the plan of a Llama for `parallelize_module`: which style for which module."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    outside, whole = Shard(1), Replicate()  # of activations [B, T, D], between matrices and inside
    layer = "model.layers.*"
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
    first, second = styles.ColwiseParallel(), styles.RowwiseParallel(output_layouts=outside)

    def prepared(others: tuple = ()) -> Any:
        given, wanted = (outside, *others), (whole, *others)
        return styles.PrepareModuleInput(input_layouts=given, desired_input_layouts=wanted)

    return {
        f"{layer}.self_attn": prepared((None, None)),
        f"{layer}.mlp": prepared(),
        **{f"{layer}.self_attn.{name}_proj": first for name in "qkv"},
        **{f"{layer}.mlp.{name}_proj": first for name in ("gate", "up")},
        f"{layer}.self_attn.o_proj": second,
        f"{layer}.mlp.down_proj": second,
        "model.embed_tokens": styles.RowwiseParallel(input_layouts=whole, output_layouts=outside),
        "lm_head": styles.ColwiseParallel(input_layouts=outside, use_local_output=False),
        **dict.fromkeys(norms, styles.SequenceParallel()),
    }


# ---------------------------------------------------------------------- context parallel
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
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Schedules of ours, and the class of `torch.distributed.pipelining` that plays the same."""
MICROBATCHES = 4  # per rank


def torch_pipeline(on: Field, name: str) -> Step:
    """Return a step of `torch.distributed.pipelining` on the stages of ours."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as theirs

    m = MICROBATCHES * on.axis.size
    model, schedule = on.model(), make(name, on.axis.size, m)
    inputs, targets = on.tokens(m * on.batch_size)
    last, own = schedule.num_stages - 1, schedule.stages_on(on.axis.rank)
    cut = stages.balance(stages.estimate_costs(on.shape), schedule.num_stages)
    parts = []
    for stage in own:
        part = stages.part_of(model, cut, stage)
        parts.append(PipelineStage(part, stage, last + 1, inputs.device, group=on.axis.group))
    stages.keep_only(model, cut, own)
    kind = getattr(theirs, PIPELINES[name])
    runner = kind(
        parts[0] if issubclass(kind, theirs.PipelineScheduleSingle) else parts,
        m,
        loss_fn=lambda logits, t: token_loss(logits, t) / targets.numel(),
        scale_grads=False,
    )
    given, target = [inputs] * (0 in own), targets if last in own else None

    def backward() -> Tensor:
        losses: list[Tensor] = []
        runner.step(*given, target=target, losses=losses, return_outputs=False)
        return sum(losses, torch.zeros(()))

    return stepping(torch.optim.AdamW(model.parameters(), **ADAMW), backward)


# ---------------------------------------------------------------------- who races
AXES = {
    "ddp": ("dp", 128),
    "fsdp": ("dp", 128),
    "tensor": ("tp", 256),
    "context": ("cp", 2048),
    "pipeline": ("pp", 128),
}
"""The axis of a strategy, and the tokens of a sequence."""
DDP = "DistributedDataParallel", torch_ddp
ZERO = "ZeroRedundancyOptimizer", partial(torch_ddp, sharded=True)
TENSOR = "parallelize_module", torch_tensor
CONTESTS: dict[str, dict[str, tuple[Contender, str, Contender]]] = {
    "ddp": {"overlapped": (ours, *DDP), "tuned": (tuned_ddp, *DDP)},
    "fsdp": {
        "ZeRO-1": (partial(ours, words="zero=1"), *ZERO),
        "ZeRO-2": (partial(ours, words="zero=2"), *ZERO),  # PyTorch has no ZeRO-2
        "FSDP": (partial(ours, words="zero=3"), "fully_shard", torch_fsdp),
    },
    "tensor": {
        "sequence": (partial(ours, words="sequence_parallel"), *TENSOR),
        "overlap": (partial(ours, words="sequence_parallel,tp_overlap"), *TENSOR),
    },
    "context": {"ring": (ours, "PyTorch's ring", partial(ours, ring=torch_ring))},
    "pipeline": {
        name: (
            partial(ours, words=f"schedule={name},microbatches={MICROBATCHES * RANKS}"),
            theirs,
            partial(torch_pipeline, name=name),
        )
        for name, theirs in PIPELINES.items()
    },
}
"""By name: our contender, the name of PyTorch's contender, and PyTorch's contender."""
