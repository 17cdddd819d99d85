"""Run A: everything is red at the end; put its buckets into order.

Buckets leave one after the other, the same one first on every rank, so one whose gradients come
last holds up all behind it. The order in which modules were registered says little about the order
in which gradients arrive; a backward says it.
Source: Li et al. 2020 (2006.15704), section 3.2.3, which fill buckets in the reverse order of
`model.parameters()`; torch fills them again after the first backward, in the order that it saw.
"""

from functools import partial

import torch
from torch import nn

from minipar.comm.collectives import all_reduce
from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.model.llama import Llama, LlamaConfig
from minipar.sim import emulate

SECONDS = 60  # two runs on emulated GPUs
LEVEL, MINUTES = "hard", 25
GOOD = "every parameter in one bucket, few buckets, none above the limit, in the order of arrival"
PRAISE = "Gradients travel while backward computes, whatever order the model was written in."

BUGS = {
    "one bucket for everything": "One bucket would be one bar. Here several bars of different "
    "sizes follow each other.",
    "a hook that waits": "A hook that waits would hold backward up: red between blue. The blue "
    "bars touch each other, in both pictures.",
    "buckets that leave in the opposite order": "",
    "a slow network": "The link is the same in both pictures, and so is the length of the bars. "
    "They only begin later.",
    "a slow rank": "All four ranks begin to send at the same moment, when their backward ends. "
    "Nobody is waited for.",
}

DEPTH, WIDTH, LIMIT = 7, 6, 900  # bytes


class Net(nn.Module):
    """Layers that are used in another order than the one in which they were registered."""

    def __init__(self, order):
        super().__init__()
        for i in order:
            setattr(self, f"layer{i}", nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for i in range(DEPTH):
            x = torch.tanh(getattr(self, f"layer{i}")(x))
        return x


def given(size, random):
    """The same model on all ranks, registered in some order: neither forwards nor backwards."""
    middle = DEPTH // 2
    order = [i for i in torch.randperm(DEPTH, generator=random).tolist() if i != middle]
    order.insert(0, middle)
    return [(Net(order).double(),)] * size


def run(answer, axis, model):
    """Return which check refuses the buckets and why; if none, the steps before and after."""
    x = torch.ones(2, WIDTH, dtype=torch.float64)

    def backward():
        model(x).square().sum().backward()

    try:
        found = _refused(answer(model, backward, LIMIT), model, backward)
    except TypeError as error:
        found = ("complete", f"expected lists of parameters ({error})")
    if found:
        return *found, None, None
    return "", "", *(_film(make, axis) for make in (as_registered, answer))


def _refused(buckets, model, backward):
    """(check, sentence) of the first that is not met, or None."""
    if not isinstance(buckets, list | tuple):
        return "complete", f"expected a list of lists of parameters, got a {type(buckets).__name__}"
    if flat := [own for own in buckets if not isinstance(own, list | tuple)]:
        return "complete", f"expected lists of parameters in a list, got a {type(flat[0]).__name__}"
    names = {p: name for name, p in model.named_parameters()}
    listed = [names.get(p) for own in buckets for p in own if isinstance(p, nn.Parameter)]
    if sorted(map(str, listed)) != sorted(names.values()):
        return "complete", f"{len(set(listed))} of {len(names)} parameters are in a bucket, once"
    sizes = [sum(p.nbytes for p in own) for own in buckets]
    large = [i for i, own in enumerate(buckets) if len(own) > 1 and sizes[i] > LIMIT]
    if large:
        return "size", f"bucket {large[0]} has {sizes[large[0]]} bytes; at most {LIMIT}"
    fit = [i for i in range(1, len(sizes)) if sizes[i - 1] + sizes[i] <= LIMIT]
    if fit:
        return "size", f"buckets {fit[0] - 1} and {fit[0]} would fit into one of {LIMIT} bytes"
    came = arrivals(model, backward)
    last = -1
    for i, own in enumerate(buckets):
        places = [came.index(names[p]) for p in own]
        if min(places) < last:
            return "order", (
                f"bucket {i} is complete when {max(places) + 1} gradients are there, but bucket "
                f"{i - 1}, which leaves before it, only after {last + 1}"
            )
        last = max(places)
    return None


def arrivals(model, backward):
    """Names of the parameters, in the order in which their gradients arrive."""
    came = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
        for name, p in model.named_parameters()
    ]
    backward()
    for hook in hooks:
        hook.remove()
    return came


def _film(make, axis):
    """A step of a Llama that is data parallel with such buckets, on emulated GPUs."""
    model = Llama(LlamaConfig(128, 32, 96, num_layers=6, num_heads=4, num_kv_heads=4))
    rows = torch.arange(257)[None] % 128

    def backward():
        logits = model(rows[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()

    buckets = make(model, backward, sum(p.nbytes for p in model.parameters()) // 6)
    step = partial(in_buckets, model, backward, buckets, axis)
    gpu = emulate.device("h100/20", magnify=32)
    return emulate.film(step, model, axis, device=gpu, wire="100gbe")


def in_buckets(model, backward, buckets, axis):
    """A backward during which buckets leave in their order, each as soon as it is complete."""
    missing, works = [set(own) for own in buckets], []

    def arrived(p):
        for own in missing:
            own.discard(p)
        while len(works) < len(buckets) and not missing[len(works)]:
            flat = torch.cat([p.grad.flatten() for p in buckets[len(works)]])
            works.append(all_reduce(flat, axis, out=flat, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in model.parameters()]
    backward()
    for work in works:
        work.wait()
    for hook in hooks:
        hook.remove()
    model.zero_grad()


def _told(case: Case, criterion: str) -> None:
    for rank, (refused, message, *_) in enumerate(case.results):
        if refused == criterion:
            raise CheckFailed(f"rank {rank}: {message}")


def check_complete(case: Case) -> None:
    _told(case, "complete")


def check_size(case: Case) -> None:
    _told(case, "size")


def check_order(case: Case) -> None:
    _told(case, "order")


def drawn(case: Case):
    from minipar.lab import draw  # takes long to import, and no rank needs it

    *_, before, after = case.results[0]
    return draw.before_after({"As it was": before, "Yours": after})


def as_registered(model, backward, limit):
    return packed(model.parameters(), limit)


def packed(parameters, limit):
    """Fill one bucket after the other, in the order given."""
    buckets, size = [[]], 0
    for p in parameters:
        if buckets[-1] and size + p.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.nbytes
    return buckets


def solution(model, backward, limit):
    arrived = []
    hooks = [p.register_post_accumulate_grad_hook(arrived.append) for p in model.parameters()]
    backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    buckets, size = [[]], 0
    for p in arrived:
        if buckets[-1] and size + p.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.nbytes
    return buckets


@fails(
    "order",
    "In the order in which modules were registered: a backward tells the order of arrival.",
)
def wrong_leaves_it_as_it_was(model, backward, limit):
    return as_registered(model, backward, limit)


@fails(
    "order",
    "The reverse of parameters() is right for models written in the order they compute in.",
)
def wrong_reverses(model, backward, limit):
    """The rule of thumb, and what torch begins with."""
    return packed(reversed(list(model.parameters())), limit)


@fails(
    "size",
    "One parameter each: fill a bucket until the next parameter would not fit.",
)
def wrong_sends_each_alone(model, backward, limit):
    return [[p] for (p,) in solution(model, backward, 1)]


@fails(
    "size",
    "One bucket for everything leaves when the last gradient is there: cut it at the limit.",
)
def wrong_sends_all_at_once(model, backward, limit):
    return [list(model.parameters())]


@fails(
    "complete",
    "No bucket at all.",
)
def wrong_makes_none(model, backward, limit):
    return []
