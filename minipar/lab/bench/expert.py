"""`minipar bench expert`: our expert parallelism beside plain torch, on the same model and link.

How the race is run and what is counted: see `race.py`. A step is forward, loss, backward and AdamW
of a mixture whose experts are spread over all ranks; the dense part is summed by our ddp for all
contenders, which differ in how tokens meet experts alone.

PyTorch itself has no expert parallelism. So ours is compared with what its users write by hand:
`all_to_all_single` with counts exchanged before, and the form that gathers all tokens; and with
torchtitan's dispatcher, where that is installed. The fastest one counts. Beside torch for CPUs,
`pip install torchtitan` alone is not enough ("No module named 'triton'"): it needs triton, too, and
then it runs on gloo (tried: 0.3.0 with triton 3.9.0). Its own experts compute in bfloat16 alone; so
all contenders have ours.

Routing is forced to an *imbalance*: slots of the busiest expert over the mean. 1 is perfect; at E/k
every token chooses the same expert first.

Beside the race: the four ways to hide what travels, on emulated devices (`expert_overlap`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.mesh import Axis, Mesh
from minipar.lab.bench import expert_overlap, race
from minipar.lab.bench.race import ADAMW, Attached, StepConfig
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.model.moe import MoE, MoEConfig, Routing, mixtures
from minipar.parallel import ddp, expert

OURS = ("gather", "all_to_all", "halves")
TITAN = "torchtitan's dispatcher"
COLUMNS = (
    ("imbalance", "{imbalance:g}"),
    *race.STEPS,
    ("tokens/s", "{tokens_per_second:,.0f}"),
    *race.SENT,
)


@dataclass(frozen=True)
class ExpertConfig(StepConfig):
    """Compare our expert parallelism with plain torch: time of a training step, and bytes."""

    preset: str = "tiny-moe"
    """The model: tiny-moe or small-moe."""
    seq_len: int = 256
    """Tokens per sequence."""
    imbalance: tuple[int, ...] = (1, 2, 4)
    """Slots of the busiest expert, over the mean."""
    overlap_ranks: tuple[int, ...] = (2, 4)
    """Emulated devices on which to compare ways to hide what travels."""
    whole_steps: int = 0
    """Compare them in whole steps of DualPipeV, too, of so many microbatches; takes minutes."""

    least = {"whole_steps": 0}

    def check(self) -> None:
        super().check()
        moe = check_shape(self)
        if self.ranks < 2:
            raise ValueError(f"--ranks {self.ranks}: it takes 2 to share experts")
        for one in self.overlap_ranks:
            if one not in (2, 4, 8):
                raise ValueError(f"--overlap-ranks {one}: these share 8 experts; use 2, 4 or 8")
        if self.whole_steps:
            expert_overlap.plan_of("paired", self.whole_steps).check(expert_overlap.shape_of(8))
        for one in self.imbalance:
            if not 1 <= one <= moe.num_experts // moe.top_k:
                raise ValueError(
                    f"--imbalance {one}: with {moe.num_experts} experts, {moe.top_k} for a token, "
                    f"the busiest has 1 to {moe.num_experts // moe.top_k} times the mean"
                )


def check_shape(config: race.ModelConfig) -> MoEConfig:
    """Return the experts of the preset; raise `ValueError` unless all ranks can share them."""
    moe = PRESETS[config.preset].moe
    if moe is None:
        good = [name for name, shape in PRESETS.items() if shape.moe is not None]
        raise ValueError(f"--preset {config.preset} has no experts; use {' or '.join(good)}")
    expert.check_sizes(moe, config.ranks, "--ranks")
    return moe


def run(config: ExpertConfig) -> list[dict[str, Any]]:
    """Run the comparison, print its table, and return a row for each of ours on each link."""
    config.check()
    rows = []
    for name in config.links:
        for imbalance in config.imbalance:
            measured = race.on_ranks(measure, config, name, imbalance)
            found = [race.row(config, "expert", name, ours, rivals(), measured) for ours in OURS]
            num_tokens = config.ranks * config.batch_size * config.seq_len
            for row in found:
                row |= {"imbalance": imbalance}
                row |= {"tokens_per_second": num_tokens / row["ours_ms"] * 1e3}
            race.announce(found, f", imbalance {imbalance}")
            rows += found
    print("\n" + race.table(rows, COLUMNS))
    hidden = [row for n in config.overlap_ranks for row in expert_overlap.rows(n)]
    print("\n" + race.table(hidden, expert_overlap.COLUMNS))
    print(f"({hidden[-1]['link']} and the like)")
    if config.whole_steps:
        whole = expert_overlap.whole_steps(config.whole_steps)
        print("\n" + race.table(whole, expert_overlap.COLUMNS))
        hidden += whole
    race.save(rows + hidden, config.json)
    return rows + hidden


def measure(config: ExpertConfig, link_name: str, imbalance: int) -> dict[str, race.Measured]:
    """Let all contenders take turns; called on every rank."""
    mesh, shape = Mesh(dp=1, ep=config.ranks), PRESETS[config.preset]
    steps = {n: contender(config, mesh, n, shape, imbalance) for n in (*OURS, *rivals())}
    return race.race(steps, mesh.ep, link_name, config.rounds)


def rivals() -> tuple[str, ...]:
    """Whom ours are compared with here."""
    has_titan = all(find_spec(name) for name in ("torchtitan", "triton"))
    return tuple(name for name in BY_OTHERS if has_titan or name != TITAN)


def contender(
    config: ExpertConfig, mesh: Mesh, name: str, shape: LlamaConfig, imbalance: int
) -> Callable[[], Tensor]:
    """The training step of the contender called `name`; it returns the loss in nats per token."""
    # A router that is forced learns no balance.
    model = Llama(replace(shape, moe=replace(shape.moe, balance="none")), seed=0)
    expert.apply(model, mesh.ep, dispatch=name if name in OURS else "all_to_all")
    for _, moe in mixtures(model):
        moe.gate._choose = partial(skewed, shape.moe.num_experts, shape.moe.top_k, imbalance)
        if name not in OURS:
            moe.core = partial(BY_OTHERS[name], moe, mesh.ep)
    strategy = ddp.apply(model, mesh.joint("dp", "ep"), average=False)
    inputs, targets = config.tokens(shape, seed=mesh.rank)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    attached = Attached(model, optimizer, strategy.finish_backward, config.ranks)
    return race.training(attached, inputs, targets)


def skewed(num_experts: int, top_k: int, imbalance: int, scores: Tensor) -> Tensor:
    """Choose for scores [N, E] so that expert 0 has `imbalance` times the mean load -> [N, k]."""
    num_tokens = len(scores)
    token = torch.arange(num_tokens, device=scores.device)[:, None]
    turn = (token * top_k + torch.arange(top_k, device=scores.device)) % (num_experts - 1)
    experts = 1 + turn  # everybody but expert 0, in turn
    chosen = token[:, 0] % num_experts < imbalance * top_k  # of as many tokens, the first choice
    experts[:, 0] = torch.where(chosen, 0, experts[:, 0])
    return experts


# ---------------------------------------------------------------------- what others write
class _Linear(torch.autograd.Function):
    """A linear map of rows `there`; `back` is the one that gradients take."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Linear.apply(grad, ctx.back, ctx.there), None, None


def _swap(rows: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """`all_to_all_single` of rows, so many to and from each rank."""

    def swap(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, axis.group)
        return arrived

    there = partial(swap, sent=sent, received=received)
    return _Linear.apply(rows, there, partial(swap, sent=received, received=sent))


def exchange_by_hand(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Sort by expert, exchange counts, exchange rows, sort by local expert; and back."""
    num_experts, top_k = moe.config.num_experts, moe.config.top_k
    order = routing.experts.flatten().argsort(stable=True)
    counts = routing.experts.flatten().bincount(minlength=num_experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=axis.group)
    there, here = (c.view(axis.size, -1).sum(1).tolist() for c in (counts, theirs))
    arrived = _swap(x[order // top_k], there, here, axis)
    local = torch.arange(len(theirs) // axis.size).repeat(axis.size).repeat_interleave(theirs)
    by_expert = local.argsort(stable=True)
    computed = moe.experts(arrived[by_expert], theirs.view(axis.size, -1).sum(0))
    unsorted = torch.empty_like(computed).index_copy(0, by_expert, computed)
    back = _swap(unsorted, here, there, axis)
    weighed = back * routing.weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // top_k, weighed.to(x.dtype))


def _gather(x: Tensor, axis: Axis) -> Tensor:
    """`all_gather_single` along the first dim."""
    whole = x.new_empty(axis.size * len(x), *x.shape[1:])
    dist.all_gather_single(whole, x.contiguous(), axis.group)
    return whole


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    """`reduce_scatter_single` along the first dim."""
    own = x.new_empty(len(x) // axis.size, *x.shape[1:])
    dist.reduce_scatter_single(own, x.contiguous(), group=axis.group)
    return own


def gather_by_hand(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Gather tokens, choices and weights; compute the own experts; reduce-scatter the results."""
    per_rank = moe.config.num_experts // axis.size
    gather, scatter = partial(_gather, axis=axis), partial(_scatter, axis=axis)
    tokens, weights = (_Linear.apply(t, gather, scatter) for t in (x, routing.weights))
    experts = gather(routing.experts).flatten() - axis.rank * per_rank
    slots = torch.nonzero((experts >= 0) & (experts < per_rank))[:, 0]
    order = slots[experts[slots].argsort(stable=True)]
    counts = experts[slots].bincount(minlength=per_rank)
    computed = moe.experts(tokens[order // moe.config.top_k], counts)
    weighed = (computed * weights.flatten()[order, None]).to(x.dtype)
    sums = torch.zeros_like(tokens).index_add(0, order // moe.config.top_k, weighed)
    return _Linear.apply(sums, scatter, gather)


@cache
def _titan(num_experts: int, top_k: int, axis: Axis) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    set_spmd_backend("default")
    config = AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=top_k)
    dispatcher = AllToAllTokenDispatcher(config)
    dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(axis.group, "cpu"))
    return dispatcher


def exchange_by_titan(moe: MoE, axis: Axis, x: Tensor, routing: Routing) -> Tensor:
    """Dispatch and combine as in torchtitan's `RoutedExperts`."""
    dispatcher = _titan(moe.config.num_experts, moe.config.top_k, axis)
    counts = routing.experts.flatten().bincount(minlength=moe.config.num_experts)
    rows, own, known = dispatcher.dispatch(x, routing.weights, routing.experts, counts)
    return dispatcher.combine(moe.experts(rows, own), known, x)


BY_OTHERS = {
    "all_to_all_single by hand": exchange_by_hand,
    "all_gather by hand": gather_by_hand,
    TITAN: exchange_by_titan,
}
