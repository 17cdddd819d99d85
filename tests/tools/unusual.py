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
from tests.tools.gallery import WIDTH, Net, afterwards, average, by_hand, torch_ddp
from tests.tools.mistakes import DP, Sent, job, owned, summed, tokens_of_all


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
    replicate(model, mesh.dp)
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


def divided_by_the_file(loss, microbatches):
    (loss / microbatches).backward()


RIGHT = {
    "rows dealt like cards": (job(torch_ddp, shares=dealt_rows), DP),
    "ZeRO-1 by hand": (job(torch_ddp, optimizer=partial(owned, kind=Sent)), DP),
    "ZeRO-2 by hand": (job(owners, optimizer=partial(owned, kind=Sent)), DP),
    "a stage on each rank": (job(stages, loss=loss_of_stage), {"pp": 2}),
    "FSDP1": (job(fsdp_1, gather=from_flat_shards), DP),
    "a wrapper": (job(wrapped), DP),
    "reduced in the step": (job(alike, optimizer=reducing, reduced_in_step=True), DP),
    "backward in the file": (job(torch_ddp, backward=lambda loss: loss.backward()), DP),
    "its own division": (job(torch_ddp, backward=divided_by_the_file), DP),
    "an axis that the file names": (job(partial(by_hand, change=average), shares=["gpus"]),
        {"gpus": 2}),
}  # fmt: skip


UNEVEN = job(
    partial(by_hand, change=average),
    uneven=gallery.uneven,
    loss=tokens_of_all,
    accumulate=all_microbatches,
)
