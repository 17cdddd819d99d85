"""The runtime: one rank runs its row of a schedule, with messages to its neighbours.

Pipeline parallelism in its smallest form. F takes what the stage before has sent, and sends its
output on; B takes the gradient of that output, and sends the gradient of its input back. The row
says when. Two neighbours may send to each other at the same moment, so no send may wait.
Source: Narayanan et al. 2021 (2104.04473), section 2.2.
"""

import copy
import re
import weakref

import torch
from torch import nn

from minipar.comm.collectives import recv, send
from minipar.lab.exercises import Case, CheckFailed, Sent, fails
from minipar.model.llama import Llama, LlamaConfig, token_loss

LEVEL, MINUTES = "hard", 45
GOOD = "losses and gradients of one device, one message per action and neighbour, memory of 1F1B"
PRAISE = "This is pipeline parallelism: the third piece of a trainer of your own."
SIZES = (4, 2)

CONFIG = LlamaConfig(32, 16, 24, num_layers=4, num_heads=2, num_kv_heads=2)
MICROBATCHES, BATCH, TOKENS = 6, 2, 5


def given(size, random):
    """For each rank its row of 1F1B, its stage of one Llama, and all microbatches [B, T + 1]."""
    model = Llama(CONFIG).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4, generator=random)
    shape = MICROBATCHES, BATCH, TOKENS + 1
    microbatches = [*torch.randint(CONFIG.vocab_size, shape, generator=random)]
    return [
        (_row(rank, size, MICROBATCHES), _stage(copy.deepcopy(model), rank, size), microbatches)
        for rank in range(size)
    ]


def _row(rank, p, m):
    warmup = min(m, p - 1 - rank)
    row = [f"{rank}F{i}" for i in range(warmup)]
    for i in range(m):
        row += [f"{rank}F{warmup + i}"] * (warmup + i < m) + [f"{rank}B{i}"]
    return row


def _stage(model, rank, size):
    """Keep the layers of one stage; the first has the embedding, the last norm and head."""
    layers = model.model.layers
    for i in range(len(layers)):
        if i * size // len(layers) != rank:
            layers[i] = None
    if rank > 0:
        model.model.embed_tokens = None
    if rank < size - 1:
        model.model.norm = model.lm_head = None
    return model


def run(answer, axis, row, stage, microbatches):
    """Losses, gradients by name, and the most outputs of this stage that were alive at once."""
    made, most = [], 0

    def note(_, args, out):
        nonlocal most
        made.append(weakref.ref(out))
        most = max(most, sum(ref() is not None for ref in made))

    stage.register_forward_hook(note)
    losses = answer(list(row), stage, microbatches, axis)
    losses = [torch.as_tensor(loss, dtype=torch.float64).detach() for loss in losses]
    return losses, {name: p.grad for name, p in stage.named_parameters()}, most


def _one_device(case: Case):
    size = case.size
    model = Llama(CONFIG).double()
    for _, stage, _ in case.given:
        model.load_state_dict(stage.state_dict(), strict=False)
    losses = []
    for rows in case.given[0][2]:
        loss = token_loss(model(rows[:, :-1]), rows[:, 1:]) / (MICROBATCHES * BATCH * TOKENS)
        loss.backward()
        losses.append(loss.detach())
    return [[]] * (size - 1) + [losses], {n: p.grad for n, p in model.named_parameters()}


def check_losses(case: Case) -> None:
    found = [losses for losses, _, _ in case.results]
    expected = _one_device(case)[0]
    Case(case.size, case.given, found, case.sent).expect_close(expected, "loss of microbatch")


def check_gradients(case: Case) -> None:
    whole = _one_device(case)[1]
    nothing = torch.zeros(0)  # on ranks that have other layers
    for name, grad in whole.items():
        has = [name in grads for _, grads, _ in case.results]
        found = [grads.get(name, nothing) for _, grads, _ in case.results]
        expected = [grad if here else nothing for here in has]
        Case(case.size, case.given, found, case.sent).expect_close(expected, f"gradient of {name}")


def check_messages(case: Case) -> None:
    num_bytes = 8 * BATCH * TOKENS * CONFIG.hidden_size
    for rank in range(case.size):
        peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < case.size]
        sends = [Sent("send", num_bytes, peer) for peer in peers for _ in range(MICROBATCHES)]
        case.expect_sent(rank, sends)


def check_memory(case: Case) -> None:
    for rank, (_, _, most) in enumerate(case.results):
        if most > case.size - rank:
            raise CheckFailed(
                f"rank {rank} had {most} outputs alive at once; in its row {case.size - rank} "
                "microbatches are under way at most"
            )


def solution(row, stage, microbatches, axis):
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    num_targets = sum(rows[:, 1:].numel() for rows in microbatches)
    inputs, outputs, losses, sends = {}, {}, [], []

    def arriving(rows, peer):
        like = next(stage.parameters())
        shape = *rows[:, 1:].shape, stage.config.hidden_size  # [B, T, D]
        return recv(like.new_empty(shape), axis, peer)

    for action in row:
        kind, i = re.fullmatch(r"\d+([FB])(\d+)", action).groups()
        rows = microbatches[int(i)]
        if kind == "F":
            inputs[i] = rows[:, :-1] if first else arriving(rows, axis.rank - 1).requires_grad_()
            outputs[i] = stage(inputs[i])
            if last:
                outputs[i] = token_loss(outputs[i], rows[:, 1:]) / num_targets
                losses.append(outputs[i].detach())
            else:
                sends.append(send(outputs[i], axis, axis.rank + 1, async_op=True))
        else:
            gradient = None if last else arriving(rows, axis.rank + 1)
            outputs.pop(i).backward(gradient)
            x = inputs.pop(i)
            if not first:
                sends.append(send(x.grad, axis, axis.rank - 1, async_op=True))
    for pending in sends:
        pending.wait()
    return losses


def _run(
    row, stage, microbatches, axis, *, talk=True, share=None, keep=False, wait=False, leaf=True
):
    """The solution, with one of its habits changed."""
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    batch, tokens = microbatches[0][:, 1:].shape
    num_targets = share or batch * tokens * len(microbatches)
    like = torch.zeros(batch, tokens, stage.config.hidden_size, dtype=torch.float64)
    inputs, outputs, losses, sends = {}, {}, [], []

    def post(tensor, peer):
        if talk and wait:
            send(tensor, axis, peer)
        elif talk:
            sends.append(send(tensor, axis, peer, async_op=True))

    def take(peer):
        return recv(torch.empty_like(like), axis, peer) if talk else like.clone()

    for action in row:
        kind, i = re.fullmatch(r"\d+([FB])(\d+)", action).groups()
        rows = microbatches[int(i)]
        if kind == "F":
            inputs[i] = rows[:, :-1] if first else take(axis.rank - 1).requires_grad_(leaf)
            outputs[i] = out = stage(inputs[i])
            if last:
                outputs[i] = token_loss(out, rows[:, 1:]) / num_targets
                losses.append(outputs[i].detach())
            else:
                post(out, axis.rank + 1)
            inputs[i, "out"] = out if keep else None
            del out
        else:
            gradient = None if last else take(axis.rank + 1)
            outputs.pop(i).backward(gradient)
            if not first:
                post(inputs[i].grad, axis.rank - 1)
    for pending in sends:
        pending.wait()
    return losses


@fails(
    "losses",
    "No message travels: each stage computes from numbers of its own.",
)
def wrong_sends_nothing(row, stage, microbatches, axis):
    return _run(row, stage, microbatches, axis, talk=False)


@fails(
    "losses",
    "A mean of each microbatch: divide by the targets of all microbatches.",
)
def wrong_divides_by_one_microbatch(row, stage, microbatches, axis):
    return _run(row, stage, microbatches, axis, share=microbatches[0][:, 1:].numel())


@fails(
    "losses",
    "This is a sum over tokens: divide by the number of targets of all microbatches.",
)
def wrong_divides_by_nothing(row, stage, microbatches, axis):
    return _run(row, stage, microbatches, axis, share=1)


@fails(
    "memory",
    "Run the row as it is, and let go of an output when its backward has run.",
)
def wrong_keeps_everything(row, stage, microbatches, axis):
    return _run(row, stage, microbatches, axis, keep=True)


@fails(
    "memory",
    "Run the row as it is, and let go of an output when its backward has run.",
)
def wrong_all_forwards_first(row, stage, microbatches, axis):
    order = [action for action in row if "F" in action] + [a for a in row if "B" in a]
    return _run(order, stage, microbatches, axis)


@fails(
    "run",
    "Does a send wait? Two neighbours that both send then wait for ever: async_op=True.",
)
def wrong_waits_for_each_send(row, stage, microbatches, axis):
    return _run(row, stage, microbatches, axis, wait=True)


@fails(
    "run",
    "What arrives has no gradient yet: call requires_grad_() before the stage computes with it.",
)
def wrong_asks_for_no_gradient(row, stage, microbatches, axis):
    return _run(row, stage, microbatches, axis, leaf=False)


@fails(
    "gradients",
    "Backward starts from ones on each stage: start it from the gradient that arrives.",
)
def wrong_starts_from_ones(row, stage, microbatches, axis):
    """What `y.sum().backward()` does: the gradient that arrived is not used."""
    last = axis.rank == axis.size - 1
    shape = *microbatches[0][:, 1:].shape, stage.config.hidden_size
    if not last:
        stage.register_forward_hook(lambda _, args, y: _Ones.apply(y, shape))
    return _run(row, stage, microbatches, axis)


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, shape):
        ctx.shape = shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_ones(ctx.shape), None


@fails(
    "gradients",
    "Microbatches replace each other's gradients: let backward add them up.",
)
def wrong_forgets_earlier_microbatches(row, stage, microbatches, axis):
    """What `zero_grad()` before each backward does."""
    for p in stage.parameters():
        p.register_hook(lambda grad, p=p: setattr(p, "grad", None))
    return _run(row, stage, microbatches, axis)
