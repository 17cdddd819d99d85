"""Overlapped buckets: data parallelism as one class.

All that notebook 03 has built: buckets by size, hooks that count, an all-reduce that starts while
backward goes on, and a wait at the end. A bucket leaves when each of its gradients has come once
per microbatch. So nobody has to tell the class which backward is the last.
Source: Li et al. 2020, "PyTorch Distributed", section 3.2.
"""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.emulate import link
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails

LEVEL, MINUTES = "hard", 40
GOOD = "one call per bucket and step, begun in the last backward, waited for in finish, every step"
PRAISE = "This is data parallelism: the first piece of a trainer of your own."
SIZES = (3,)

MICROBATCHES, STEPS = 2, 2
CAPACITY = 200  # bytes: 25 numbers; the parameters have 8, 2, 12, 4, 15, 3, 30, 5 of them
SLOW = Link("slow", latency=0.05, bandwidth=1e9)  # a call takes far longer than the backward


def given(size, random):
    """For each rank the same model and other microbatches of each step: x [B, 6], y [B, 2]."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4), nn.Linear(4, 2)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=random)
    model[4].bias.requires_grad_(False)  # a frozen parameter has no gradient to average
    shape = size, STEPS, MICROBATCHES, 2, 8
    data = torch.randn(shape, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(model), rows[..., :6], rows[..., 6:]) for rows in data]


def run(answer, axis, model, x, y):
    """Return gradients after each step, when backwards ended, calls began, and were waited for."""
    steps, ended, calls = [], [], []

    def note(work):
        if work.verb == "all_reduce":
            calls.append((work.t_issue, work.waits))

    link.use(SLOW)
    link.observers.append(note)
    try:
        made = answer(model, axis, CAPACITY, MICROBATCHES)
        # The first weight is the last to receive its gradient. Its hook comes after the answer's.
        model[0].weight.register_post_accumulate_grad_hook(lambda p: ended.append(time.monotonic()))
        for step in range(STEPS):
            model.zero_grad()
            for m in range(MICROBATCHES):
                _backward(model, x[step, m], y[step, m])
            made.finish()
            steps += [p.grad.clone() for p in model.parameters() if p.requires_grad]
        dist.barrier(axis.group)
    finally:
        link.observers.remove(note)
    return steps, ended, sorted(calls)


def _backward(model, x, y):
    (nn.functional.mse_loss(model(x), y) / MICROBATCHES).backward()


def _buckets(model, capacity):
    buckets, room = [], 0
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if parameter.nbytes > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def check_result(case: Case) -> None:
    every = []
    for model, x, y in case.given:
        model, grads = copy.deepcopy(model), []
        for step in range(STEPS):
            model.zero_grad()
            for m in range(MICROBATCHES):
                _backward(model, x[step, m], y[step, m])
            grads += [p.grad.clone() for p in model.parameters() if p.requires_grad]
        every.append(grads)
    mean = [torch.stack(grads).mean(0) for grads in zip(*every, strict=True)]
    found = [steps for steps, _, _ in case.results]
    Case(case.size, case.given, found, case.sent).expect_close([mean] * case.size, "gradient")


def check_buckets(case: Case) -> None:
    sizes = [sum(p.nbytes for p in bucket) for bucket in _buckets(case.given[0][0], CAPACITY)]
    once = [Sent("all_reduce", wire_bytes("all_reduce", size, case.size)) for size in sizes]
    for rank, sent in enumerate(case.sent):
        case.expect_sent(rank, once * STEPS)
        if sent != once * STEPS:
            raise CheckFailed(
                f"rank {rank} sent the right buckets in another order: {', '.join(map(str, sent))}"
                "; the parameters that backward finishes first should go first"
            )


def check_overlap(case: Case) -> None:
    for rank, (_, ended, calls) in enumerate(case.results):
        each = len(calls) // STEPS
        for step in range(STEPS):
            own = calls[step * each : (step + 1) * each]
            before, last = ended[step * MICROBATCHES + MICROBATCHES - 2 :][:2]
            early = sum(called < before for called, _ in own)
            late = sum(called > last for called, _ in own)
            if early:
                raise CheckFailed(
                    f"step {step}: rank {rank} made {early} of its {each} calls before the last "
                    "backward began: what it sent was not the whole gradient yet"
                )
            if late > 1:
                raise CheckFailed(
                    f"step {step}: rank {rank} made {late} of its {each} calls after the last "
                    "backward: nothing is left to hide them behind"
                )


def check_asynchronous(case: Case) -> None:
    for rank, (_, _, calls) in enumerate(case.results):
        first_step = calls[: len(calls) // STEPS]
        if any(at < first_step[-1][0] for at in first_step[0][1]):
            raise CheckFailed(
                f"rank {rank} waited for its first all-reduce before it called for the last: "
                "a hook that waits stops the backward"
            )


class solution:
    def __init__(self, model, axis, capacity, microbatches=1):
        self.axis, self.microbatches = axis, microbatches
        self.buckets, room = [], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if p.nbytes > room:
                self.buckets.append([])
                room = capacity
            self.buckets[-1].append(p)
            room -= p.nbytes
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.start()
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def start(self):
        self.missing = [self.microbatches * len(bucket) for bucket in self.buckets]
        self.pending = {}

    def on_gradient(self, p):
        i = self.bucket_of[p]
        self.missing[i] -= 1
        if self.missing[i] == 0:
            flat = torch.cat([q.grad.flatten() for q in self.buckets[i]])
            self.pending[i] = all_reduce(flat, self.axis, "avg", out=flat, async_op=True)

    def finish(self):
        for i, bucket in enumerate(self.buckets):
            flat = self.pending[i].wait()
            for q, mean in zip(bucket, flat.split([q.numel() for q in bucket]), strict=True):
                q.grad = mean.view_as(q)
        self.start()


@fails(
    "result",
    "Each rank has its own gradient: no bucket was sent.",
)
class wrong_sends_nothing:
    def __init__(self, model, axis, capacity, microbatches):
        pass

    def finish(self):
        pass


@fails(
    "result",
    'Exactly n times the average: divide by axis.size, or ask for "avg".',
)
class wrong_forgets_to_divide(solution):
    def on_gradient(self, p):
        i = self.bucket_of[p]
        self.missing[i] -= 1
        if self.missing[i] == 0:
            flat = torch.cat([q.grad.flatten() for q in self.buckets[i]])
            self.pending[i] = all_reduce(flat, self.axis, out=flat, async_op=True)


@fails(
    "result",
    "The mean never comes back: torch.cat copies, so give the pieces to p.grad.",
)
class wrong_forgets_to_hand_out(solution):
    def finish(self):
        for pending in self.pending.values():
            pending.wait()
        self.start()


@fails(
    "result",
    "A bucket that leaves with its first microbatch: count each gradient once per microbatch.",
)
class wrong_leaves_too_early(solution):
    def start(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.pending = {}


@fails(
    "result",
    "The second step sends nothing: set the counts anew in finish.",
)
class wrong_counts_only_once(solution):
    def finish(self):
        for i in list(self.pending):
            bucket, flat = self.buckets[i], self.pending.pop(i).wait()
            for q, mean in zip(bucket, flat.split([q.numel() for q in bucket]), strict=True):
                q.grad = mean.view_as(q)


@fails(
    "buckets",
    "One call per parameter: put several into a bucket, up to its capacity.",
)
class wrong_one_call_per_parameter(solution):
    def __init__(self, model, axis, capacity, microbatches):
        super().__init__(model, axis, 0, microbatches)


@fails(
    "buckets",
    "One call for everything: begin a new bucket where the next would not fit.",
)
class wrong_one_call_for_everything(solution):
    def __init__(self, model, axis, capacity, microbatches):
        super().__init__(model, axis, 1 << 30, microbatches)


@fails(
    "overlap",
    "All is sent in finish: start a bucket in the hook of its last gradient.",
)
class wrong_sends_at_the_end(solution):
    def on_gradient(self, p):
        pass

    def finish(self):
        for i, bucket in enumerate(self.buckets):
            flat = torch.cat([q.grad.flatten() for q in bucket])
            self.pending[i] = all_reduce(flat, self.axis, "avg", out=flat, async_op=True)
        super().finish()


@fails(
    "asynchronous",
    "The hook waits: keep what async_op=True returns, and wait for it in finish.",
)
class wrong_waits_in_the_hook(solution):
    def on_gradient(self, p):
        super().on_gradient(p)
        i = self.bucket_of[p]
        if self.missing[i] == 0:
            self.pending[i].wait()


@fails(
    "result",
    "The second step sends nothing: set the counts anew in finish.",
)
class wrong_waits_for_the_first_step_again(solution):
    def finish(self):
        for i, bucket in enumerate(self.buckets):
            flat = self.pending[i].wait()
            for q, mean in zip(bucket, flat.split([q.numel() for q in bucket]), strict=True):
                q.grad = mean.view_as(q)


@fails(
    "buckets",
    "Buckets are filled from the first parameter on: the last parameters go first.",
)
class wrong_first_parameter_first(solution):
    def __init__(self, model, axis, capacity, microbatches):
        turned = nn.ParameterList(reversed(list(model.parameters())))
        super().__init__(turned, axis, capacity, microbatches)


@fails(
    "run",
    "A frozen parameter (requires_grad is false) takes no hook: leave it out.",
)
class wrong_hooks_what_is_frozen:
    def __init__(self, model, axis, capacity, microbatches):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)


@fails(
    "run",
    "A lambda in a loop sees the last bucket only: bind it, lambda p, i=i: ...",
)
class wrong_hooks_know_the_last_bucket(solution):
    def __init__(self, model, axis, capacity, microbatches):
        super().__init__(model, axis, capacity, microbatches)
        last = self.buckets[-1][0]
        self.bucket_of = dict.fromkeys(self.bucket_of, self.bucket_of[last])
