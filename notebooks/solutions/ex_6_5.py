"""Sharded weights: FSDP as one class.

A rank keeps a slice of each block. The block's weights are gathered when it runs, forward and
backward, and freed right after; its gradient is reduce-scattered as soon as it is complete. An
optimizer of the slices then does the rest.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3; Zhao et al. 2023 (2304.11277).
"""

import copy

import torch
from torch import nn

from minipar.comm.collectives import all_gather, reduce_scatter
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "hard", 45
GOOD = "equal to one device, one block whole at a time, two gathers and one reduce-scatter each"
PRAISE = "This is FSDP: no rank ever holds a whole model. A piece of your own trainer."
SIZES = (3,)

STEPS, WIDTH = 3, 7
SLACK = 8 * WIDTH * WIDTH  # bytes


def given(size, random):
    """For each rank the same blocks, and inputs [STEPS, B, D] of its own."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(4)
    ]
    for block in blocks:
        block.double()
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.3, generator=random)
    data = torch.randn(size, STEPS, 5, WIDTH, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(blocks), rows) for rows in data]


def run(answer, axis, blocks, x):
    """Return the slices after training, and how many bytes of weights and gradients there were."""
    made = answer(blocks, axis)
    for i, shard in enumerate(made.shards):
        if shard.untyped_storage().nbytes() < shard.nbytes:  # to read it would end the process
            raise RuntimeError(f"shards[{i}] is a view of weights that were freed: clone it")
    optimizer = torch.optim.AdamW(made.shards, lr=0.01)
    held = {"between steps": [], "while a block runs": [], "after finish": []}
    for block in blocks:  # these hooks run after those of the answer
        block.register_forward_pre_hook(lambda *_: held["while a block runs"].append(_held(blocks)))
        block[0].register_full_backward_hook(
            lambda *_: held["while a block runs"].append(_held(blocks))
        )
    for step in range(STEPS):
        held["between steps"].append(_held(blocks))
        optimizer.zero_grad()
        _loss(blocks, x[step].clone().requires_grad_()).backward()
        made.finish()
        held["after finish"].append(_held(blocks))
        optimizer.step()
    shards = [shard.detach().clone() for shard in made.shards]
    return shards, {when: max(most) for when, most in held.items()}


def _held(blocks) -> int:
    """Return the bytes behind weights and whole gradients; a storage that several share is one."""
    stored = {}
    for parameter in (p for block in blocks for p in block.parameters()):
        for tensor in (parameter.data, parameter.grad):
            if tensor is not None:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    stored[storage.data_ptr()] = storage.nbytes()
    return sum(stored.values())


def _loss(blocks, x):
    for block in blocks:
        x = x + block(x)
    return x.square().mean()


def check_result(case: Case) -> None:
    blocks, inputs = copy.deepcopy(case.given[0][0]), [x for _, x in case.given]
    optimizer = torch.optim.AdamW([p for b in blocks for p in b.parameters()], lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x in inputs:
            (_loss(blocks, x[step]) / case.size).backward()
        optimizer.step()
    for i, block in enumerate(blocks):
        truth = torch.cat([p.detach().flatten() for p in block.parameters()])
        if any(len(shards) != len(blocks) for shards, _ in case.results):
            raise CheckFailed(f"shards holds one slice per block: {len(blocks)} of them")
        found = torch.cat([shards[i].flatten() for shards, _ in case.results])[: len(truth)]
        if found.shape != truth.shape:
            raise CheckFailed(
                f"block {i} has {len(truth)} numbers; the slices of all ranks have {len(found)}"
            )
        off = (found - truth).abs().max().item()
        if off > 1e-9:
            raise CheckFailed(
                f"block {i} after {STEPS} steps is off by {off:.2g} from one device; the slices "
                "of ranks 0, 1, ... are to make up its flat weights, in the order of parameters()"
            )


def check_memory(case: Case) -> None:
    block = sum(p.nbytes for p in case.given[0][0][0].parameters())
    most = {"between steps": 0, "while a block runs": 2 * block, "after finish": 0}
    for rank, (_, held) in enumerate(case.results):
        for when, limit in most.items():
            if held[when] > limit + SLACK:
                raise CheckFailed(
                    f"{when}, rank {rank} holds {held[when]:,} bytes of whole weights and "
                    f"gradients; a block has {block:,}, and at most {limit // block} may be there"
                )


def check_traffic(case: Case) -> None:
    blocks = len(case.given[0][0])
    for rank, sent in enumerate(case.sent):
        verbs = [one.verb for one in sent]
        for verb, most in (("all_gather", 2), ("reduce_scatter", 1)):
            if verbs.count(verb) > most * blocks * STEPS:
                raise CheckFailed(
                    f"rank {rank} made {verbs.count(verb)} calls of {verb}, for {blocks} blocks "
                    f"and {STEPS} steps; {most} for each is enough"
                )
        if others := set(verbs) - {"all_gather", "reduce_scatter"}:
            raise CheckFailed(f"rank {rank} also calls {', '.join(sorted(others))}")


class Unit:
    """One block: its flat weights, which come and go, and this rank's slice, which stays."""

    def __init__(self, block, axis):
        self.params, self.axis = list(block.parameters()), axis
        self.whole = self.flatten([p.data for p in self.params])
        sizes = [p.numel() for p in self.params]
        for p, piece in zip(self.params, self.whole[: sum(sizes)].split(sizes), strict=True):
            p.data = piece.view_as(p)
        self.shard = nn.Parameter(self.whole.chunk(axis.size)[axis.rank].clone())
        block.register_forward_pre_hook(lambda *_: self.gather())
        block.register_forward_hook(lambda *_: self.free())
        block.register_full_backward_pre_hook(lambda *_: self.gather())
        for p in self.params:
            p.register_post_accumulate_grad_hook(lambda p: self.on_gradient())
        self.free()

    def flatten(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.axis.size))

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        all_gather(self.shard.data, self.axis, out=self.whole)

    def free(self):
        self.whole.untyped_storage().resize_(0)

    def on_gradient(self):
        if all(p.grad is not None for p in self.params):
            self.reduce(self.flatten([p.grad for p in self.params]))
            for p in self.params:
                p.grad = None
            self.free()

    def reduce(self, gradient):
        self.shard.grad = reduce_scatter(gradient, self.axis, op="avg")


class solution:
    def __init__(self, blocks, axis):
        self.units = [Unit(block, axis) for block in blocks]
        self.shards = [unit.shard for unit in self.units]

    def finish(self):
        """Do nothing: each block was reduced in its hook."""


def _with(unit):
    class wrong(solution):
        def __init__(self, blocks, axis):
            self.units = [unit(block, axis) for block in blocks]
            self.shards = [unit.shard for unit in self.units]

    return wrong


class _SendsNothing(Unit):
    def gather(self):
        pass

    def free(self):
        pass

    def reduce(self, gradient):
        self.shard.grad = gradient.chunk(self.axis.size)[self.axis.rank].clone()


class _Sums(Unit):
    def reduce(self, gradient):
        self.shard.grad = reduce_scatter(gradient, self.axis)


class _Keeps(Unit):
    def free(self):
        pass


class _Views(Unit):
    def __init__(self, block, axis):
        super().__init__(block, axis)
        self.shard = nn.Parameter(self.whole.detach().chunk(axis.size)[axis.rank])


class _KeepsGradients(Unit):
    def on_gradient(self):
        if all(p.grad is not None for p in self.params):
            self.reduce(self.flatten([p.grad for p in self.params]))
            self.free()


class _GathersTooOften(Unit):
    def gather(self):
        super().gather()
        all_gather(self.shard.data, self.axis)


@fails("result", "Each rank trained alone: gather slices of weights, reduce-scatter gradients.")
class wrong_sends_nothing(_with(_SendsNothing)):
    pass


@fails("result", 'A sum in the place of a mean: ask reduce_scatter for op="avg".')
class wrong_forgets_to_divide(_with(_Sums)):
    pass


@fails("memory", "Weights stay whole: give their memory back after forward and after backward.")
class wrong_never_frees(_with(_Keeps)):
    pass


@fails("memory", "Whole gradients pile up: set p.grad to None once the slice is there.")
class wrong_keeps_gradients(_with(_KeepsGradients)):
    def finish(self):
        for unit in self.units:
            for p in unit.params:
                p.grad = None


@fails("traffic", "More gathers than two for a block: before forward, and before backward.")
class wrong_gathers_too_often(_with(_GathersTooOften)):
    pass


@fails("run", "A slice is a view of the flat weights, and is freed with them: clone it.")
class wrong_cuts_a_view(_with(_Views)):
    pass


class _GathersOnce(Unit):
    def gather(self):
        if torch.is_grad_enabled():  # not in backward
            super().gather()


@fails("run", "A block ran without its weights: gather before forward, and before backward.")
class wrong_does_not_gather_for_backward(_with(_GathersOnce)):
    pass
