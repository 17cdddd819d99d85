"""Reduce-scatter in backward: whole gradients that never pile up.

A hook starts the reduce-scatter of a gradient as soon as it is complete, and lets go of it. What
is left at the end of backward is a slice of each: the memory of ZeRO-2.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.2.
"""

import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minipar.comm.collectives import wire_bytes
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "medium", 25
GOOD = "one reduce-scatter per parameter, started in backward, and at most two whole gradients"
PRAISE = "Gradients come, are cut, and go: no rank ever holds all of them."
SIZES = (4, 3)

SLOW = Link("slow", latency=0.05, bandwidth=1e9)  # a call takes far longer than the backward


def given(size, random):
    """For each rank the same model and another batch: x [B, 6], y [B, 3]."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=random)
    batches = torch.randn(size, 2, 9, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(model), batch[:, :6], batch[:, 6:]) for batch in batches]


def run(answer, axis, model, x, y):
    """Return slices, gradients left, and when which gradients and calls there were."""
    params = list(model.parameters())
    calls, ended, whole = [], [], []

    def note(work):
        if work.verb == "reduce_scatter":
            calls.append((work.t_issue, work.waits))

    def on_gradient(p):  # registered first, so called before the hooks of the answer
        whole.append(sum(q.grad is not None for q in params))
        ended.append(time.monotonic())

    for p in params:
        p.register_post_accumulate_grad_hook(on_gradient)
    link.use(SLOW)
    link.observers.append(note)
    try:
        slices = answer(params, lambda: _backward(model, x, y), axis)
        dist.barrier(axis.group)
    finally:
        link.observers.remove(note)
    left = sum(p.grad is not None for p in params)
    return slices, left, ended, max(whole, default=0), sorted(calls)


def _backward(model, x, y):
    nn.functional.mse_loss(model(x), y).backward()


def _padded(tensor, size):
    flat = tensor.detach().flatten()
    return F.pad(flat, (0, -len(flat) % size))


def check_result(case: Case) -> None:
    every = []
    for model, x, y in case.given:
        model = copy.deepcopy(model)
        _backward(model, x, y)
        every.append([p.grad for p in model.parameters()])
    means = [torch.stack(gradients).mean(0) for gradients in zip(*every, strict=True)]
    cut = [_padded(mean, case.size).chunk(case.size) for mean in means]
    expected = [[slices[rank] for slices in cut] for rank in range(case.size)]
    found = [result[0] for result in case.results]
    Case(case.size, case.given, found, case.sent).expect_close(expected, "slice")


def check_traffic(case: Case) -> None:
    sizes = [_padded(p, case.size).nbytes for p in case.given[0][0].parameters()]
    expected = [Sent("reduce_scatter", wire_bytes("reduce_scatter", n, case.size)) for n in sizes]
    for rank in range(case.size):
        case.expect_sent(rank, expected)


def check_memory(case: Case) -> None:
    for rank, (_, left, _, most, _) in enumerate(case.results):
        if left:
            raise CheckFailed(f"rank {rank} still has {left} whole gradients in p.grad at the end")
        if most > 2:
            raise CheckFailed(
                f"rank {rank} had up to {most} whole gradients in p.grad at a time; at most 2: set "
                "p.grad = None in the hook"
            )


def check_overlap(case: Case) -> None:
    for rank, (_, _, ended, _, calls) in enumerate(case.results):
        # The weight and the bias of the first layer may be called for after the last note.
        late = sum(called > ended[-1] for called, _ in calls)
        if late > 2:
            raise CheckFailed(f"rank {rank} made {late} of {len(calls)} calls after backward")
        if any(at < calls[-1][0] for at in calls[0][1]):
            raise CheckFailed(
                f"rank {rank} waited for its first reduce-scatter before it called for the last: "
                "a hook that waits stops the backward"
            )


def solution(params, backward, axis):
    started = {}

    def send(p):
        flat = F.pad(p.grad.flatten(), (0, -p.numel() % axis.size))
        p.grad = None
        mine = flat.new_empty(len(flat) // axis.size)
        work = dist.reduce_scatter_single(mine, flat, group=axis.group, async_op=True)
        started[p] = mine, work, flat

    hooks = [p.register_post_accumulate_grad_hook(send) for p in params]
    backward()
    for hook in hooks:
        hook.remove()
    for _, work, _ in started.values():
        work.wait()
    return [started[p][0] / axis.size for p in params]


@fails(
    "result",
    "Slices of each rank's own gradient: nothing was sent.",
)
def wrong_sends_nothing(params, backward, axis):
    backward()
    return [_mine(p, axis) for p in params]


@fails(
    "result",
    "Exactly n times the average: divide before the call, or after the wait.",
)
def wrong_adds_up_and_does_not_divide(params, backward, axis):
    slices = solution(params, backward, axis)
    return [mine * axis.size for mine in slices]


@fails(
    "result",
    "In the order in which gradients came: return slices in the order of params.",
)
def wrong_order(params, backward, axis):
    """In the order in which gradients come, which is not that of the parameters."""
    slices = dict(zip(map(id, params), solution(params, backward, axis), strict=True))
    return [slices[id(p)] for p in reversed(params)]


@fails(
    "run",
    "Slices are returned that may not have arrived: keep each handle, and wait at the end.",
)
def wrong_never_waits(params, backward, axis):
    slices = {}

    def send(p):
        flat = F.pad(p.grad.flatten() / axis.size, (0, -p.numel() % axis.size))
        p.grad = None
        slices[p] = flat.new_empty(len(flat) // axis.size)
        dist.reduce_scatter_single(slices[p], flat, group=axis.group, async_op=True)

    for p in params:
        p.register_post_accumulate_grad_hook(send)
    backward()
    return [slices[p] for p in params]


@fails(
    "traffic",
    "Whole gradients are all-reduced: a reduce-scatter sends half.",
)
def wrong_reduces_all_of_it(params, backward, axis):
    """An all-reduce, of which a slice is kept."""
    started = {}

    def send(p):
        started[p] = p.grad, dist.all_reduce(p.grad, group=axis.group, async_op=True)
        p.grad = None

    for p in params:
        p.register_post_accumulate_grad_hook(send)
    backward()
    for p, (gradient, work) in started.items():
        work.wait()
        p.grad = gradient / axis.size
    slices = [_mine(p, axis) for p in params]
    for p in params:
        p.grad = None
    return slices


@fails(
    "memory",
    "All gradients are whole at the end of backward: reduce each one in a hook.",
)
def wrong_after_backward(params, backward, axis):
    backward()
    return [_reduced(p, axis) for p in params]


@fails(
    "memory",
    "p.grad outlives its reduce-scatter: set it to None in the hook.",
)
def wrong_keeps_gradients(params, backward, axis):
    slices = {}

    def send(p):
        gradient = p.grad
        slices[p] = _reduced(p, axis)
        p.grad = gradient

    for p in params:
        p.register_post_accumulate_grad_hook(send)
    backward()
    return [slices[p] for p in params]


@fails(
    "overlap",
    "The hook waits: async_op=True, and wait after backward.",
)
def wrong_waits_in_the_hook(params, backward, axis):
    slices = {}

    def send(p):
        slices[p] = _reduced(p, axis)

    for p in params:
        p.register_post_accumulate_grad_hook(send)
    backward()
    return [slices[p] for p in params]


def _reduced(p, axis):
    flat = _padded(p.grad, axis.size)
    p.grad = None
    mine = flat.new_empty(len(flat) // axis.size)
    dist.reduce_scatter_single(mine, flat, group=axis.group)
    return mine / axis.size


def _mine(p, axis):
    return _padded(p.grad, axis.size).chunk(axis.size)[axis.rank].clone()


@fails(
    "run",
    "A gradient is no multiple of the ranks: pad it with zeros first.",
)
def wrong_does_not_pad(params, backward, axis):
    def send(p):
        flat = p.grad.flatten()
        mine = flat.new_empty(len(flat) // axis.size)
        dist.reduce_scatter_single(mine, flat, group=axis.group, async_op=True).wait()

    for p in params:
        p.register_post_accumulate_grad_hook(send)
    backward()
