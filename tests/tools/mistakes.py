"""A second gallery: mistakes in dividing, sending, cutting and updating that are in no list.

Each is a `Job` with the sizes of its mesh, and what is to be said of it, see `told`.
"""

import contextlib
from dataclasses import replace
from functools import partial, reduce

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minipar.comm import autograd
from minipar.comm.mesh import Mesh
from minipar.parallel.base.replicate import replicate
from tests.tools import gallery
from tests.tools.gallery import (
    WIDTH,
    Column,
    Net,
    Row,
    afterwards,
    average,
    by_hand,
    megatron,
    plain,
    torch_ddp,
)

DP, TP, CP, BOTH = {"dp": 2}, {"tp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}


# ---------------------------------------------------------------------- gradients
def sends_one(gradient: Tensor) -> Tensor:
    dist.broadcast(gradient, 0)
    return gradient


def fills_once(model, mesh):
    """The bucket is filled in the first step only."""
    bucket: dict[nn.Parameter, Tensor] = {}
    replicate(model, mesh.dp)
    return afterwards(model, lambda p: average(bucket.setdefault(p, p.grad.clone()).clone()))


def sums_again(model, mesh):
    """A hook on what has accumulated: earlier microbatches are summed over the ranks twice."""
    replicate(model, mesh.dp)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return afterwards(model, lambda p: p.grad / 2)


def divides_again(model, mesh):
    """By microbatches, by which the loss has been divided."""
    model, count = torch_ddp(model, mesh), []
    model.register_forward_hook(lambda *_: count.append(1))

    def after() -> None:
        for p in model.parameters():
            p.grad /= len(count)
        count.clear()

    return model, after


def over_the_world(model, mesh):
    """Pieces of tensor parallelism, averaged over all ranks as if they were copies."""
    replicate(model, mesh.world)
    model.up, model.down = Column(model.up, mesh.tp), Row(model.down, mesh.tp)
    return afterwards(model, lambda p: average(p.grad))


# ---------------------------------------------------------------------- the optimizer
class Owned(torch.optim.AdamW):
    """ZeRO-1: every rank updates its own parameters; nothing is sent."""

    def step(self, closure=None):
        params, ranks = self.param_groups[0]["params"], dist.get_world_size()
        gradients = [p.grad for p in params]
        for i, p in enumerate(params):
            p.grad = p.grad if i % ranks == dist.get_rank() else None
        super().step(closure)
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient


class Sent(Owned):
    """And then everything is sent by its owner."""

    def step(self, closure=None):
        super().step(closure)
        for i, p in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(p.data, i % dist.get_world_size())


def owned(model, kind=Owned):
    return kind(model.parameters(), lr=0.01)


def adam(model, lr=lambda ranks: 0.01, decay=lambda ranks: 0.1):
    ranks = dist.get_world_size()
    return torch.optim.AdamW(model.parameters(), lr(ranks), weight_decay=decay(ranks), eps=1e-6)


# ---------------------------------------------------------------------- pieces, and samples
class PositionNet(Net):
    """With learned positions, and attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, WIDTH)
        self.attention = Attention()
        self.start = 0

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]) + self.start
        x = self.norm(self.embed(tokens) + self.positions(places))
        return self.head(x + self.attention(x))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


def local_attention(model, mesh, starts: bool = True):
    model.start = 2 * mesh.cp.rank * starts
    return DistributedDataParallel(model, process_group=mesh.cp.group, find_unused_parameters=True)


def averaged(x: Tensor, axis, to: str) -> Tensor:
    return autograd.all_reduce(x, axis, to=to) / axis.size


def drawn_again(model, mesh):
    model = megatron(model, mesh)
    nn.init.normal_(model.up.weight)
    return model


def renamed(model, mesh):
    model = torch_ddp(model, mesh)
    model.module.out = model.module._modules.pop("head")
    model.module.head = lambda x: model.module.out(x)
    return model


class VocabularyPiece(nn.Module):
    """An embedding cut by words, which looks up words of others as well."""

    def __init__(self, embed: nn.Embedding, axis) -> None:
        super().__init__()
        self.weight = nn.Parameter(embed.weight.detach().chunk(axis.size)[axis.rank].clone())
        self.axis = axis

    def forward(self, tokens: Tensor) -> Tensor:
        own = (tokens - self.axis.rank * len(self.weight)).clamp(0, len(self.weight) - 1)
        return autograd.all_reduce(F.embedding(own, self.weight), self.axis, to="I")


def vocabulary(model, mesh):
    replicate(model, mesh.tp)
    model.embed = VocabularyPiece(model.embed, mesh.tp)
    return model


def words_apart(model, batch):
    """A softmax over the words of each rank."""
    axis = Mesh(tp=dist.get_world_size()).tp
    logits = autograd.cut(model(batch[0]), axis, 2)
    first = axis.rank * logits.shape[-1]
    own = (batch[1] >= first) & (batch[1] < first + logits.shape[-1])
    target = (batch[1] - first).clamp(0, logits.shape[-1] - 1)[..., None]
    target = autograd.all_reduce(logits.gather(-1, target)[..., 0] * own, axis, to="I")
    return (logits.exp().sum(-1).log() - target).mean()


def overlapping_rows(batch, mesh):
    return tuple(tensor[mesh.dp.rank :][:4] for tensor in batch)


# ---------------------------------------------------------------------- what only some trials see
class Counting(nn.Module):
    """Counts in its first step how often hooks fire, and waits for as many in each later step.

    Under accumulation, where the last microbatch alone counts, it never sends again.
    """

    def __init__(self, model, axis) -> None:
        super().__init__()
        self.module, self.axis, self.syncs = replicate(model, axis) or model, axis, True
        self.learned, self.fired = None, 0
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.count)

    def forward(self, x):
        return self.module(x)

    def count(self, p) -> None:
        self.fired += self.syncs or self.learned is None

    @contextlib.contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True

    def finish(self) -> None:
        if self.learned is None or self.fired >= self.learned:
            for p in self.module.parameters():
                p.grad = average(p.grad)
        self.learned, self.fired = self.learned or self.fired, 0


def counting(model, mesh):
    model = Counting(model, mesh.dp)
    return model, model.finish


def running_mean(model, mesh):
    """Of microbatches (a + b) / 2: right for two of them only."""
    replicate(model, mesh.dp)
    kept: dict[nn.Parameter, list[Tensor]] = {p: [] for p in model.parameters()}

    def take(p) -> None:
        kept[p].append(p.grad)
        p.grad = None

    for p in kept:
        p.register_post_accumulate_grad_hook(take)

    def mean(p) -> Tensor:
        first, *others = (gradient * len(kept[p]) for gradient in kept[p])
        kept[p].clear()
        return average(reduce(lambda total, gradient: (total + gradient) / 2, others, first))

    return afterwards(model, mean)


class Averaging(Net):
    """Keeps a running mean of its samples that evaluation alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.lerp_(self.embed(tokens).detach().mean((0, 1)), 0.1)
        return super().forward(tokens)


def own_buffers(model, mesh):
    return DistributedDataParallel(model, broadcast_buffers=False)


class Placed(Net):
    """Positions are a parameter, added between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens) + self.places[: tokens.shape[1]]))


def placed(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.cp.group, find_unused_parameters=True)


def alike_over_tp_alone(model, mesh):
    replicate(model, mesh.tp)
    return model


def clip_of_shards(model):
    shards = (getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())
    return sum(shard.square().sum() for shard in shards).sqrt()


def with_balance(model, batch):
    logits = model(batch[0])
    balance = logits.softmax(-1).mean((0, 1)).square().sum()
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + balance


def summed(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def tokens_of_all(model, batch):
    """Right for uneven samples, as each rank's sum is divided by the mean tokens of a rank."""
    count = (batch[1] != -100).sum().double()
    if dist.get_world_size() > 1:
        count = average(count)
    return summed(model, batch) / count


def undivided(model, batches, divisor=1):
    total = 0.0
    for batch in batches:
        loss = gallery.loss(model, batch)
        (loss / divisor).backward()
        total += loss.detach() / len(batches)
    return total


def summed_up(gradient: Tensor) -> Tensor:
    return average(gradient) * dist.get_world_size()


def halves_what_it_has(model, mesh):
    """Each forward halves the gradients of the microbatches before."""
    replicate(model, mesh.tp)

    def halve(model, _) -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / 2

    model.register_forward_pre_hook(halve)
    return model


def frozen_on_one(model, mesh):
    """A rank without a gradient adds zeros, so that the others need not wait."""
    model, after = by_hand(model, mesh)
    model.up.requires_grad_(mesh.dp.rank == 0)

    def fill() -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        after()

    return model, fill


def job(parallelize, **changes):
    return replace(plain, parallelize=parallelize, **changes)


def wrong(change):
    return job(partial(by_hand, change=change))


def told(parallelize, sizes, where, cause, step=1, ranks=(0, 1), **changes):
    """A mistake with what is to be said of it; `where` is "stage of module", or a stage alone."""
    stage, _, module = where.partition(" of ")
    return job(parallelize, **changes), sizes, (stage, module, step, list(ranks), cause)


WRONG = {
    "gradients of rank 0": told(partial(by_hand, change=sends_one), DP, "gradient of head",
        "shares weighed wrongly"),
    "frozen on one rank": told(frozen_on_one, DP, "gradient of up", "shares weighed wrongly"),
    "filled once": told(fills_once, DP, "gradient of head", "of the step before", step=2),
    "summed again": told(sums_again, DP, "gradient of head",
        "microbatches are reduced differently"),
    "divided again": told(divides_again, DP, "gradient of head", "divided by microbatches twice"),
    "pieces averaged": told(over_the_world, BOTH, "gradient of down", "unknown", ranks=[0, 1, 2,
        3]),
    "nothing sent": told(torch_ddp, DP, "weights of embed", "not in the optimizer", ranks=[1],
        optimizer=owned),
    "rate times ranks": told(torch_ddp, DP, "weights of embed", "another learning rate",
        optimizer=partial(adam, lr=lambda ranks: 0.01 * ranks)),
    "no decay": told(torch_ddp, DP, "weights of embed", "another weight decay",
        optimizer=partial(adam, decay=lambda ranks: 0.1 * (ranks == 1))),
    "local attention": told(local_attention, CP, "output of attention",
        "positions, a mask, or another piece",
        build=PositionNet, shares=gallery.tokens_apart),
    "averaged": told(partial(megatron, row={"leave": averaged}), TP, "output of down",
        "divided once too often"),
    "drawn again": told(drawn_again, TP, "initial weights of up", "made anew"),
    "words of others": told(vocabulary, TP, "output of embed", "in this module"),
    "softmax of pieces": told(megatron, TP, "loss", "in the loss", loss=words_apart),
    "syncs no more": told(counting, DP, "gradient of head", "missing all-reduce", step=2),
    "a running mean": told(running_mean, DP, "gradient of head",
        "microbatches are reduced differently"),
    "own buffers": told(own_buffers, DP, "buffer", "a buffer of own samples", build=Averaging),
    "a balance loss": told(torch_ddp, DP, "gradient of head", "samples see each other",
        loss=with_balance),
    "positions of the first rank": told(placed, CP, "output of norm",
        "positions, a mask, or another piece",
        build=Placed, shares=gallery.tokens_apart),
    "alike over tp alone": told(alike_over_tp_alone, BOTH, "initial weights of embed",
        "never broadcast", ranks=[2, 3]),
    "the norm of a shard": told(gallery.torch_fsdp, DP, "gradient norm", "norm of own pieces",
        build=gallery.seeded, clip=clip_of_shards),
    "a sum": told(torch_ddp, DP, "gradient of head", "a sum where a mean is meant", loss=summed),
    "microbatches that weigh alike": told(partial(by_hand, change=average), DP, "loss",
        "microbatches weigh alike", loss=tokens_of_all, uneven=gallery.uneven),
    "not divided": told(torch_ddp, DP, "gradient of head", "not divided by microbatches",
        accumulate=undivided),
    "summed over two axes": told(partial(by_hand, change=summed_up), {"replicate": 2, "shard": 2},
        "gradient of head", "a factor", ranks=[0, 1, 2, 3]),
    "halved again": told(halves_what_it_has, TP, "gradient of head",
        "microbatches are reduced differently"),
    "rows twice": told(torch_ddp, DP, "output of embed", "in this module", shares=overlapping_rows),
}  # fmt: skip
