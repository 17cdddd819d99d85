"""Parallelisations of one small model: right ones, and mistakes that well-known projects made.

T5 and the like are rows of tests/TRAPS.md. All of them are plain torch, as people write it; only
the pairs of collectives that gradients flow through are ours.
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from minipar.comm import autograd
from minipar.comm.mesh import Axis, Mesh
from minipar.model.llama import loss_of
from minipar.parallel import ddp, fsdp, tensor, zero
from minipar.parallel.base.replicate import replicate
from minipar.tools.prove.job import Job
from tests.law import models

WORDS, WIDTH, HIDDEN = 12, 8, 16


class Net(nn.Module):
    """A transformer without attention."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.act(self.up(self.norm(x))))
        return self.head(x)


def seeded() -> nn.Module:
    """For what never sends weights, as `fully_shard`."""
    torch.manual_seed(0)
    return Net()


def with_a_word_more() -> nn.Module:
    """No number of ranks divides this table."""
    model = Net()
    model.embed = nn.Embedding(WORDS + 1, WIDTH)
    return model


def zeroed(part: str) -> nn.Module:
    """With zero weights, as LoRA: what is before them has no gradient in the first step."""
    model = Net()
    nn.init.zeros_(model.down.get_parameter(part))
    return model


def with_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.BatchNorm1d(16))
    return model.append(nn.Linear(16, 4 * WORDS)).append(nn.Unflatten(1, (4, WORDS)))


class WithAttention(nn.Module):
    """torch's own layer: a mask of -inf, and weights of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens % WIDTH, WIDTH).to(self.mask)
        return self.head(self.attend(x, self.mask, is_causal=True))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (8, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def uneven(seed: int) -> tuple[Tensor, Tensor]:
    """The first rows have hardly any targets, more of them in later microbatches."""
    inputs, targets = batch(seed)
    targets = targets.clone()
    targets[: 3 + seed, 1:] = -100
    return inputs, targets


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def parallel_in_name_only(model, mesh):
    return model


plain = Job(Net, batch, loss, parallel_in_name_only, file="gallery.py")


# ---------------------------------------------------------------------- data parallel
def average(gradient: Tensor, group=None) -> Tensor:
    dist.all_reduce(gradient, group=group)
    return gradient / dist.get_world_size(group)


def afterwards(model, change, of=None):
    """After backward, every gradient of `of` is what `change` makes of the parameter."""

    def after() -> None:
        for p in (of or model).parameters():
            p.grad = change(p)

    return model, after


def by_hand(model, mesh, change=average):
    """After backward, every gradient is what `change` makes of it."""
    replicate(model, mesh.world)
    return afterwards(model, lambda p: change(p.grad))


def torch_ddp(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.dp.group)


def torch_fsdp(model, mesh):
    grid = mesh.device_mesh()["dp"]
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=grid)
    return model


def summed_by_hand(model, mesh, factor: float = 1.0):
    return by_hand(model, mesh, lambda gradient: average(gradient) * factor * mesh.dp.size)


def unequal_weights(model, mesh):
    """No broadcast: each rank goes on with the weights it drew."""
    return afterwards(model, lambda p: average(p.grad))


def averages_weights(model, mesh):
    """T3: the hook is given the parameter, not its gradient."""
    replicate(model, mesh.dp)

    def hook(p: nn.Parameter) -> None:
        dist.all_reduce(p.data, group=mesh.dp.group)
        p.data /= 2

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return model


def averages_twice(model, mesh):
    """DDP has averaged; then it is done by hand again."""
    return afterwards(torch_ddp(model, mesh), lambda p: p.grad / mesh.dp.size)


SYNC = {"on": True}


@contextlib.contextmanager
def no_sync(model, inverted=False):
    SYNC["on"] = inverted
    yield
    SYNC["on"] = not inverted


def sends_increments(model, mesh):
    """T5: a tensor hook sees the increment of the last microbatch, not what has accumulated."""
    replicate(model, mesh.dp)
    SYNC["on"] = True

    def hook(gradient: Tensor) -> Tensor:
        if not SYNC["on"]:
            return gradient
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mesh.dp.group)
        return gradient / 2

    for p in model.parameters():
        p.register_hook(hook)
    return model


def forgets_microbatches(model, mesh):
    """The bucket is overwritten by each microbatch, and reduced after the last."""
    replicate(model, mesh.dp)
    latest: dict[nn.Parameter, Tensor] = {}

    def keep(p: nn.Parameter, gradient: Tensor) -> None:
        latest[p] = gradient.clone()

    for p in model.parameters():
        p.register_hook(partial(keep, p))

    return afterwards(model, lambda p: average(latest[p]))


def keeps_its_bucket(model, mesh):
    """Gradients are added to a bucket that is never zeroed."""
    replicate(model, mesh.dp)
    bucket = {p: torch.zeros_like(p) for p in model.parameters()}
    return afterwards(model, lambda p: bucket[p].add_(average(p.grad)).clone())


def forgotten_rank(model, mesh):
    """T29: a rank without tokens for a module has no gradient, and leaves it out."""
    wrapped = torch_ddp(model, mesh)
    return afterwards(wrapped, lambda p: None if mesh.rank == 1 else p.grad, of=model.norm)


class Forgetful(torch.optim.AdamW):
    """A sharded optimizer that makes its state anew in every step."""

    def step(self, closure=None):
        super().step(closure)
        self.state.clear()


def forgetful(model):
    make = Forgetful if dist.get_world_size() > 1 else torch.optim.AdamW
    return make(model.parameters(), lr=0.01)


# ---------------------------------------------------------------------- tensor parallel
class Column(nn.Module):
    """A linear layer whose outputs are cut. `enter` is Megatron's f."""

    def __init__(self, linear: nn.Linear, axis: Axis, enter=autograd.convert, piece=None) -> None:
        super().__init__()
        piece = axis.rank if piece is None else piece
        self.axis, self.enter = axis, enter
        self.weight, self.bias = (
            nn.Parameter(p.detach().chunk(axis.size)[piece].clone())
            for p in (linear.weight, linear.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, self.axis), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer whose inputs are cut. `leave` is Megatron's g."""

    def __init__(self, linear: nn.Linear, axis: Axis, leave=autograd.all_reduce, early=False):
        super().__init__()
        self.axis, self.leave, self.early = axis, leave, early
        self.weight = nn.Parameter(linear.weight.detach().chunk(axis.size, 1)[axis.rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias if self.early else None)
        y = self.leave(y, self.axis, to="I")
        return y if self.early else y + self.bias


def untouched(x: Tensor, axis: Axis, to: str = "") -> Tensor:
    return x


def megatron(model, mesh, column=None, row=None):
    """By hand, and right unless `column` or `row` say otherwise."""
    replicate(model, mesh.tp)
    model.up = Column(model.up, mesh.tp, **(column or {}))
    model.down = Row(model.down, mesh.tp, **(row or {}))
    return model


class Dealt(Column):
    """Rows dealt out like cards."""

    def __init__(self, linear: nn.Linear, axis: Axis) -> None:
        super().__init__(linear, axis)
        own = slice(axis.rank, None, axis.size)
        self.weight.data, self.bias.data = linear.weight.data[own], linear.bias.data[own]


def dealt(model, mesh):
    """Rows of `up` and columns of `down` dealt out like cards: right, but not in rank order."""
    replicate(model, mesh.tp)
    model.up = Dealt(model.up, mesh.tp)
    columns = model.down.weight.data[:, mesh.tp.rank :: mesh.tp.size]
    model.down = Row(model.down, mesh.tp)
    model.down.weight.data = columns.clone()
    return model


def undealt(name: str, tensor: Tensor, mesh: Mesh) -> Tensor:
    """The `gather` of what was dealt."""
    if not name.startswith(("up", "down.weight")):
        return tensor
    dim = 1 if name == "down.weight" else 0
    pieces = [torch.empty_like(tensor) for _ in range(mesh.tp.size)]
    dist.all_gather(pieces, tensor.contiguous(), group=mesh.tp.group)
    return torch.stack(pieces, dim + 1).flatten(dim, dim + 1)


def tokens_apart(batch, mesh):
    """The `shares` of context parallelism, for a model without attention."""
    return tuple(tensor.chunk(mesh.cp.size, 1)[mesh.cp.rank] for tensor in batch)


def context_parallel(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.cp.group)


def swapped_pieces(model, mesh):
    return megatron(model, mesh, column={"piece": 1 - mesh.tp.rank})


def one_seed(model, mesh):
    """T1: every rank draws its piece under one seed."""
    model = megatron(model, mesh)
    torch.manual_seed(1234)
    nn.init.normal_(model.up.weight)
    return model


class SequenceNorm(nn.Module):
    """A norm of this rank's tokens; what it returns is gathered."""

    def __init__(self, norm: nn.LayerNorm, axis: Axis) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = norm.weight, norm.bias, axis

    def forward(self, x: Tensor) -> Tensor:
        mine = autograd.cut(x, self.axis, 1)
        mine = F.layer_norm(mine, mine.shape[-1:], self.weight, self.bias)
        return autograd.all_gather(mine, self.axis, 1, to="R")


def sequence_parallel(model, mesh, reduces: bool = True):
    """T12: what the norm's weights get on each rank is of its own tokens."""
    model = megatron(model, mesh, column={"enter": untouched})
    model.norm = SequenceNorm(model.norm, mesh.tp)
    keep = (lambda p: 2 * average(p.grad)) if reduces else (lambda p: p.grad)
    return afterwards(model, keep, of=model.norm)


def sums_what_is_whole(model, mesh):
    """Gradients of replicated parameters are equal already."""
    model = megatron(model, mesh)
    cut = {model.up.weight, model.up.bias, model.down.weight}
    return afterwards(model, lambda p: p.grad if p in cut else 2 * average(p.grad))


def unties(model, mesh):
    """T15: the head is made anew, and is not the embedding any more."""
    replicate(model, mesh.dp)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return torch_ddp(model, mesh)


def optimizer_too_early(model, mesh):
    early = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = megatron(model, mesh)
    model.early = early
    return model


def early_or_not(model):
    return getattr(model, "early", None) or torch.optim.AdamW(model.parameters(), lr=0.01)


def clip_counting_all(model):
    """T9: squares of all ranks are added, also of what all ranks have."""
    total = sum(p.grad.square().sum() for p in model.parameters())
    dist.all_reduce(total)
    return total.sqrt()


def torch_tensor(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh.device_mesh()["tp"], plan)


def torch_both(model, mesh):
    model = torch_tensor(model, mesh)
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh.device_mesh()["dp"])
    return model


def both_wrong(model, mesh):
    """Sharded data parallelism over tensor parallelism, its sums not divided."""
    model = torch_both(model, mesh)
    for module in (model.up, model.down, model):
        module.set_gradient_divide_factor(1.0)
    return model


# ---------------------------------------------------------------------- ours
def llama() -> nn.Module:
    return models.llama(torch.initial_seed() % 1000, vocab_size=WORDS)


def llama_loss(model, batch):
    return loss_of(model)(model(batch[0]), batch[1]) / batch[1].numel()


def our_fsdp(model, mesh):
    return model, fsdp.apply(model, mesh.dp)


def our_zero(model, mesh, lr=0.01):
    alike = dict(lr=lr, weight_decay=0.1, eps=1e-6)  # as prove's own
    optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh.dp, **alike)
    return model, zero.apply(model, mesh.dp, optimizer=optimizer, stage=2)


def our_both(model, mesh):
    inner = tensor.apply(model, mesh.tp, sequence=True)
    return model, [ddp.apply(model, mesh.dp), inner]
