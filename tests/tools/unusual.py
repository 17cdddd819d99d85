"""Trainings that are right, and unusual: their files say so in a word, or need none."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Mesh
from minipar.parallel.base.replicate import replicate
from tests.tools import gallery
from tests.tools.gallery import HIDDEN, WIDTH, WORDS, Net, afterwards, average, by_hand, torch_ddp
from tests.tools.mistakes import (
    DP,
    Sent,
    job,
    owned,
    summed,
    tokens_of_all,
    told,
    undivided,
    with_balance,
)


def dealt_rows(batch, mesh):
    """Right: as a DistributedSampler has it."""
    return tuple(tensor[mesh.dp.rank :: mesh.dp.size] for tensor in batch)


def all_microbatches(model, batches):
    """Right for uneven microbatches: all of them are divided by one number."""
    count = average(sum((batch[1] != -100).sum() for batch in batches).double())
    losses = [summed(model, batch) / count for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(losses)


class Hand(torch.autograd.Function):
    """What rank 0 has goes to rank 1, and the gradient back."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.broadcast(x, 0)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.broadcast(gradient, 1)
        return gradient


class Stage(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        if hasattr(self, "head"):
            return self.head(Hand.apply(torch.zeros(*tokens.shape, WIDTH, requires_grad=True)))
        x = self.embed(tokens)
        return Hand.apply(x + self.down(self.act(self.up(self.norm(x)))))


def stages(model, mesh):
    """Each rank has its stage of the model, and nothing else."""
    replicate(model, mesh.pp)
    for name in ("embed", "norm", "up", "act", "down") if mesh.pp.rank else ("head",):
        delattr(model, name)
    model.__class__ = Stage
    return model


def loss_of_stage(model, batch):
    logits = model(batch[0])
    if not hasattr(model, "head"):
        return (logits * 0).sum()
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def owners(model, mesh):
    """ZeRO-2 by hand: each gradient goes to its owner, and is gone elsewhere."""
    replicate(model, mesh.dp)
    owner = {p: i % mesh.dp.size for i, p in enumerate(model.parameters())}

    def send(p) -> Tensor | None:
        total = average(p.grad)
        return total if owner[p] == mesh.dp.rank else None

    return afterwards(model, send)


class Reducing(torch.optim.AdamW):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = average(p.grad)
        super().step(closure)


def reducing(model):
    return Reducing(model.parameters(), lr=0.01)


def alike(model, mesh):
    replicate(model, mesh.world)
    return model


class Wrapper(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def wrapped(model, mesh):
    inner, after = by_hand(model, mesh, average)
    return Wrapper(inner), after


def fsdp_1(model, mesh):
    replicate(model, mesh.dp)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


SHAPES = {name: p.shape for name, p in Net().named_parameters()}


def from_flat_shards(name: str, tensor: Tensor | None, mesh: Mesh) -> Tensor:
    """The `gather` of FSDP1, where a rank may have nothing of a parameter."""
    shards = [shard for shard in all_gather_object(tensor, mesh.world) if shard is not None]
    return torch.cat([shard.flatten() for shard in shards]).view(SHAPES[name])


def divided_by_the_file(model, batches):
    return undivided(model, batches, len(batches))


def targets_of_one_row(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of the first half have an eighth of the targets."""
    inputs, targets = gallery.batch(seed)
    targets = targets.clone()
    targets[1:, :2] = -100
    return inputs, targets


def weighed(loss):
    """What a rank of cp has: 2 targets of 18, or 16; the gradients are summed."""
    (loss * (2, 16)[dist.get_rank()] / 18).backward()


def summed_over_tokens(model, mesh):
    replicate(model, mesh.cp)
    return afterwards(model, lambda p: 2 * average(p.grad))


def sparse():
    model = Net()
    model.embed.sparse = True
    return model


def descent(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def kept_elsewhere(model, mesh):
    """As Megatron's main_grad: `grad` is None until the optimizer's step."""
    model, after = by_hand(model, mesh, average)

    def hide() -> None:
        after()
        for p in model.parameters():
            p.main_grad, p.grad = p.grad, None

    return model, hide


class FromElsewhere(torch.optim.AdamW):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = getattr(p, "main_grad", p.grad)
        super().step(closure)


def from_elsewhere(model):
    return FromElsewhere(model.parameters(), lr=0.01)


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(WORDS // 2 + 1, dtype=torch.cfloat))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(super().forward(tokens)) * self.spectrum, n=WORDS)


class Shifted(Net):
    """Adds one number to all logits of a position, which no softmax sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.shift[: tokens.shape[1]]


def of_any_size(model):
    return torch.optim.AdamW(model.parameters(), eps=1e-20)


def on_one_stage(model):
    return torch.optim.SGD(model.parameters(), lr=0.1 * hasattr(model, "head"))


RIGHT = {
    "a shift that no softmax sees, by hand": (job(gallery.megatron, build=Shifted,
        optimizer=of_any_size), {"tp": 2}),
    "gradients elsewhere by hand": (job(kept_elsewhere, optimizer=from_elsewhere), DP),
    "complex weights": (job(torch_ddp, build=Complex), DP),
    "rows dealt like cards": (job(torch_ddp, shares=dealt_rows), DP),
    "ZeRO-1 by hand": (job(torch_ddp, optimizer=partial(owned, kind=Sent)), DP),
    "ZeRO-2 by hand": (job(owners, optimizer=partial(owned, kind=Sent)), DP),
    "a stage on each rank": (job(stages, loss=loss_of_stage), {"pp": 2}),
    "FSDP1": (job(fsdp_1, gather=from_flat_shards), DP),
    "a wrapper": (job(wrapped), DP),
    "reduced in the step": (job(alike, optimizer=reducing, reduced_in_step=True), DP),
    "backward in the file": (job(torch_ddp, backward=lambda loss: loss.backward()), DP),
    "its own division": (job(torch_ddp, accumulate=divided_by_the_file), DP),
    "an axis that the file names": (job(partial(by_hand, change=average), shares=["gpus"]),
        {"gpus": 2}),
    "ranks that weigh differently": (job(summed_over_tokens, backward=weighed,
        batch=targets_of_one_row, shares=gallery.tokens_apart), {"cp": 2}),
    "sparse gradients": (job(partial(by_hand, change=average), build=sparse, optimizer=descent),
        DP),
}  # fmt: skip


# ---------------------------------------------------------------------- mistakes
class Scaled(Net):
    """With a parameter of a few numbers, which are some mix of any shares."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(count))

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return (x.unflatten(-1, (len(self.scale), -1)) * self.scale[:, None]).flatten(-2)


def adds_to_few(gradient: Tensor) -> Tensor:
    return average(gradient) + (gradient.numel() < 3)


def with_spare():
    model = Net()
    model.spare = nn.Linear(2, 2)
    return model


def zeros_for_none(model, mesh):
    replicate(model, mesh.dp)
    return afterwards(model, lambda p: torch.zeros_like(p) if p.grad is None else average(p.grad))


def over_shards(model, mesh):
    """Replicas of the shards are forgotten."""
    replicate(model, mesh.world)
    return afterwards(model, lambda p: average(p.grad, mesh.fsdp.group))


class Summing(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
        super().step(closure)


def summing(model):
    return Summing(model.parameters(), lr=0.1)


class Branched(Net):
    """A layer more for a few rows; it gives zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(gallery.WIDTH, gallery.WORDS, bias=False)
        nn.init.zeros_(self.extra.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        few = self.extra(self.embed(tokens)) if len(tokens) < 8 else 0
        return super().forward(tokens) + few


class Counted(Net):
    """Counts steps, once for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += dist.get_world_size()
        return super().forward(tokens)


class Gated(Net):
    """Gate and up are one weight, so halves of it do not belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.down = nn.GLU(), nn.Linear(HIDDEN // 2, WIDTH)


WRONG = {
    "two numbers": told(partial(by_hand, change=adds_to_few), DP, "gradient of ", "unknown",
        build=partial(Scaled, 2)),
    "one number": told(partial(by_hand, change=adds_to_few), DP, "gradient of ", "unknown",
        build=partial(Scaled, 1)),
    "a balance loss beside one number": told(torch_ddp, DP, "gradient of head",
        "samples see each other", build=partial(Scaled, 1), loss=with_balance),
    "a tie of two stages": told(stages, {"pp": 2}, "gradient of embed", "unknown", ranks=[0],
        build=partial(Net, tied=True), loss=loss_of_stage),
    "a stage that stays": told(stages, {"pp": 2}, "weights of embed", "not in the optimizer",
        ranks=[0], loss=loss_of_stage, optimizer=on_one_stage),
    "zeros for None": told(zeros_for_none, DP, "gradient of ", "a gradient that one device has not",
        build=with_spare),
    "over shards alone": told(over_shards, {"dp": 2, "fsdp": 2}, "gradient of head",
        "shares weighed wrongly", ranks=range(4)),
    "summed in the step": told(alike, DP, "weights of embed", "another update",
        optimizer=summing, reduced_in_step=True),
    "steps of all ranks": told(torch_ddp, DP, "buffer", "summed, not averaged", build=Counted),
    "a branch for few rows": told(torch_ddp, DP, "gradient",
        "a gradient that one device has not", build=Branched),
    "tokens never reduced": told(alike, {"cp": 2}, "gradient of head",
        "missing all-reduce", shares=gallery.tokens_apart),
    "a mean of own tokens": told(gallery.context_parallel, {"cp": 2}, "gradient of head",
        "unknown", batch=targets_of_one_row, shares=gallery.tokens_apart),
    "batch norm of rows dealt like cards": told(torch_ddp, DP, "output of 2", "in this module",
        build=gallery.with_batch_norm, shares=dealt_rows),
    "gate and up in one": told(gallery.megatron, {"tp": 2}, "output of act",
        "positions, a mask, or another piece",
        build=Gated),
}  # fmt: skip


UNEVEN = job(
    partial(by_hand, change=average),
    uneven=gallery.uneven,
    loss=tokens_of_all,
    accumulate=all_microbatches,
)
