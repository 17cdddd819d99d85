"""Overlap with accumulation: send while the last backward still computes.

With several microbatches per step, gradients accumulate and only the last backward may send: what
it sends is the accumulated gradient, once. A hook that autograd calls when the gradient of a
parameter is complete starts the all-reduce, and does not wait for it.
Source: Li et al. 2020, sections 3.2.3 and 3.2.4.
"""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import wire_bytes
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "hard", 35
GOOD = "one all-reduce per parameter, started during the last backward, waited for after it"
PRAISE = "Your gradients travel while backward computes: the link costs next to nothing now."
SIZES = (3,)

MICROBATCHES = 3
SLOW = Link("slow", latency=0.1, bandwidth=1e9)  # a call takes far longer than the backward


def given(size, random):
    """For each rank the same model and other microbatches: x [B, 6], y [B, 3] of each."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=random)
    data = torch.randn(size, MICROBATCHES, 2, 9, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(model), rows[..., :6], rows[..., 6:]) for rows in data]


def run(answer, axis, model, x, y):
    """Return gradients, when backwards ended, and all-reduces were called, and waited for."""
    ended, calls = [], []

    def note(work):
        if work.verb == "all_reduce":
            calls.append((work.t_issue, work.waits))

    # The first weight is the last to receive its gradient: then a backward has ended.
    model[0].weight.register_post_accumulate_grad_hook(lambda p: ended.append(time.monotonic()))
    model[0].bias.register_post_accumulate_grad_hook(lambda p: ended.append(time.monotonic()))
    link.use(SLOW)
    link.observers.append(note)
    try:
        answer(model, [lambda m=m: _backward(model, x[m], y[m]) for m in range(len(x))], axis)
        dist.barrier(axis.group)
    finally:
        link.observers.remove(note)
    return [p.grad for p in model.parameters()], ended, sorted(calls)


def _backward(model, x, y):
    (nn.functional.mse_loss(model(x), y) / MICROBATCHES).backward()


def check_result(case: Case) -> None:
    every = []
    for model, x, y in case.given:
        model = copy.deepcopy(model)
        for m in range(MICROBATCHES):
            _backward(model, x[m], y[m])
        every.append([p.grad for p in model.parameters()])
    mean = [torch.stack(grads).mean(0) for grads in zip(*every, strict=True)]
    grads = [grads for grads, _, _ in case.results]
    Case(case.size, case.given, grads, case.sent).expect_close([mean] * case.size, "gradient")


def check_traffic(case: Case) -> None:
    parameters = list(case.given[0][0].parameters())
    bytes_each = [wire_bytes("all_reduce", p.nbytes, case.size) for p in parameters]
    for rank in range(case.size):
        case.expect_sent(rank, [Sent("all_reduce", num_bytes) for num_bytes in bytes_each])


def check_overlap(case: Case) -> None:
    for rank, (_, ended, calls) in enumerate(case.results):
        if len(ended) != 2 * MICROBATCHES:
            raise CheckFailed(f"rank {rank} did not run each of the {MICROBATCHES} backwards once")
        early = sum(called < ended[-3] for called, _ in calls)
        if early:
            raise CheckFailed(f"rank {rank} made {early} calls before the last backward began")
        # The two parameters of the first layer may be called for right after the note was taken.
        late = sum(called > ended[-1] for called, _ in calls)
        if late > 2:
            raise CheckFailed(
                f"rank {rank} made {late} of its {len(calls)} calls after the last backward: "
                "nothing is left to hide them behind"
            )


def check_asynchronous(case: Case) -> None:
    for rank, (_, _, calls) in enumerate(case.results):
        waits, last_called = calls[0][1], calls[-1][0]
        if any(at < last_called for at in waits):
            raise CheckFailed(
                f"rank {rank} waited for its first all-reduce before it called for the last: "
                "a hook that waits stops the backward"
            )


def solution(model, backwards, axis):
    *early, last = backwards
    for backward in early:
        backward()
    works = []

    def send(parameter):
        works.append(dist.all_reduce(parameter.grad, group=axis.group, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(send) for p in model.parameters()]
    last()
    for work in works:
        work.wait()
    for parameter in model.parameters():
        parameter.grad /= axis.size
    for hook in hooks:
        hook.remove()


def _in_last(model, backwards, send):
    """Run all backwards; in the last, `send` is called with each parameter that is done."""
    *early, last = backwards
    for backward in early:
        backward()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    last()


@fails(
    "result",
    "No gradient was sent.",
)
def wrong_sends_nothing(model, backwards, axis):
    for backward in backwards:
        backward()


@fails(
    "result",
    "The parameters were sent: a hook is given p, and p.grad is what to send.",
)
def wrong_sends_the_weights(model, backwards, axis):
    works = []

    def send(parameter):
        works.append(dist.all_reduce(parameter.data, group=axis.group, async_op=True))

    _in_last(model, backwards, send)
    for work in works:
        work.wait()


@fails(
    "result",
    "Only the last microbatch is summed: register_hook sees what is added, not p.grad.",
)
def wrong_sends_the_last_increment(model, backwards, axis):
    """A hook on the tensor sees what this backward adds, not what has accumulated."""

    def send(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=axis.group)
        return grad / axis.size

    *early, last = backwards
    for backward in early:
        backward()
    for parameter in model.parameters():
        parameter.register_hook(send)
    last()


@fails(
    "traffic",
    "Every microbatch is sent: send during the last backward alone.",
)
def wrong_sends_every_microbatch(model, backwards, axis):
    total = None
    for backward in backwards:
        model.zero_grad()
        backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.group)
        grads = [p.grad / axis.size for p in model.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    for parameter, grad in zip(model.parameters(), total, strict=True):
        parameter.grad = grad


@fails(
    "run",
    "Who starts an all-reduce has to wait for it: keep the handles, and wait after backward.",
)
def wrong_never_waits(model, backwards, axis):
    """Gloo has the sum in time, as a rule; NCCL may not have begun."""

    def send(parameter):
        parameter.grad /= axis.size
        dist.all_reduce(parameter.grad, group=axis.group, async_op=True)

    _in_last(model, backwards, send)


@fails(
    "result",
    "Exactly n times the average: divide before the call, or after the wait.",
)
def wrong_divides_what_travels(model, backwards, axis):
    works = []

    def send(parameter):
        works.append(dist.all_reduce(parameter.grad, group=axis.group, async_op=True))
        parameter.grad /= axis.size

    _in_last(model, backwards, send)
    for work in works:
        work.wait()


@fails(
    "overlap",
    "All calls come after the last backward: make each one in a hook.",
)
def wrong_sends_after_backward(model, backwards, axis):
    for backward in backwards:
        backward()
    grads = [parameter.grad for parameter in model.parameters()]
    works = [dist.all_reduce(grad, group=axis.group, async_op=True) for grad in grads]
    for grad, work in zip(grads, works, strict=True):
        work.wait()
        grad /= axis.size


@fails(
    "asynchronous",
    "The hook waits for its call: async_op=True, and wait after backward.",
)
def wrong_waits_in_the_hook(model, backwards, axis):
    def send(parameter):
        dist.all_reduce(parameter.grad, group=axis.group)
        parameter.grad /= axis.size

    _in_last(model, backwards, send)


@fails(
    "asynchronous",
    "The hook waits for its call: async_op=True, and wait after backward.",
)
def wrong_asks_until_it_is_done(model, backwards, axis):
    def send(parameter):
        work = dist.all_reduce(parameter.grad, group=axis.group, async_op=True)
        while not work.is_completed():
            pass
        parameter.grad /= axis.size

    _in_last(model, backwards, send)


@fails(
    "run",
    "A gradient changed while it travelled: send in the last backward alone.",
)
def wrong_starts_in_every_backward(model, backwards, axis):
    works = []

    def send(parameter):
        works.append(dist.all_reduce(parameter.grad, group=axis.group, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    for backward in backwards:
        backward()
    for work in works:
        work.wait()
    for parameter in model.parameters():
        parameter.grad /= axis.size


@fails(
    "run",
    "Register the function, not its result: hook, and not hook(p).",
)
def wrong_registers_what_a_hook_returns(model, backwards, axis):
    def send(parameter):
        works.append(dist.all_reduce(parameter.grad, group=axis.group, async_op=True))

    works = []
    *early, last = backwards
    for backward in early:
        backward()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send(parameter))
    last()


@fails(
    "result",
    "A microbatch counts twice: run each backward once.",
)
def wrong_runs_the_last_twice(model, backwards, axis):
    for backward in backwards[:-1]:
        backward()
    solution(model, backwards[-1:] * 2, axis)
