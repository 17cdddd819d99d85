"""Run F: find the race.

The buffer is filled again while it is being sent. Gloo has read it by then, so that a laptop is
right. On a GPU a collective that was called has only begun. Strict mode (`minipar.emulate.strict`)
is as unforgiving.
Source: torch's `Work.wait`, "CUDA semantics"; traps of the kind have a sanitizer of their own,
`torch.cuda._sanitizer`.
"""

import re
import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from minipar.comm.collectives import reduce_scatter, wire_bytes
from minipar.emulate import link, strict
from minipar.emulate.link import Link
from minipar.lab.exercises import Case, CheckFailed, Sent, fails
from minipar.model.llama import Llama, LlamaConfig
from minipar.observe.timeline import span
from minipar.sim import emulate

SECONDS = 60  # two runs on emulated GPUs
LEVEL, MINUTES = "hard", 25
GOOD = "no race in strict mode, the right pieces, one buffer, and each block on its way meanwhile"
PRAISE = "Right on a laptop, and right on a cluster, with one buffer and no time lost."

BUGS = {
    "a sum that is not divided": "That would be off by the same factor, everywhere and each time. "
    "It would be off on a laptop, too.",
    "ranks with different weights": "Strict mode compares nothing between ranks. It names one "
    "rank's own tensor.",
    "a buffer that is filled too early": "",
    "a call that nobody waits for": "Strict mode would say so: never waited for. Each is waited "
    "for, only too late.",
    "a rank that skips a call": "Then somebody would wait. All ranks come through.",
}

BLOCKS, LENGTH = 5, 12
SLOW = Link("slow", latency=0.03, bandwidth=1e9)  # 90 ms for a reduce-scatter of four ranks


def given(size, random):
    """The gradients of all ranks [ranks, BLOCKS, LENGTH], blocks as backward brings them."""
    draws = torch.randn(size, BLOCKS, LENGTH, generator=random, dtype=torch.float64)
    return [(draws,)] * size


def run(answer, axis, every):
    """Return the race, if there is one; the pieces, who waited in `send`, how many buffers."""
    gradients, every = every[axis.rank], every.sum(0).view(BLOCKS, axis.size, -1)
    state = SimpleNamespace(staging=torch.zeros_like(gradients[0]), pending=None, pieces=[])
    left, calls, seen = [], [], set()

    def note(work):
        if work.verb == "reduce_scatter":
            calls.append((work.t_issue, work.waits))

    link.use(SLOW)
    link.observers.append(note)
    try:
        with strict.watching():
            for gradient in gradients:
                time.sleep(0.004)  # it is computed
                answer(gradient.clone(), state, axis)
                left.append(time.monotonic())
                if torch.equal(state.staging, gradient):  # else the gradient itself is sent
                    seen.add(state.staging.data_ptr())
            if state.pending is not None:
                state.pieces.append(state.pending.wait())
            dist.barrier(axis.group)
    except strict.Race as race:
        return re.sub(r" at \S+:\d+", "", str(race)), [], False, 0, None, None
    finally:
        link.observers.remove(note)
    own = zip(sorted(calls), left, strict=False)
    waited = any(at < end for (_, waits), end in own for at in waits)
    pieces = [piece.clone() for piece in state.pieces]
    films = (None, None)
    right = len(pieces) == BLOCKS and torch.allclose(torch.stack(pieces), every[:, axis.rank])
    if right and not waited and len(seen) == 1:
        films = tuple(_film(send, axis) for send in (as_it_was, answer))
    return "", pieces, waited, len(seen), *films


def _film(send, axis):
    """A backward of a Llama, ZeRO-2: the gradients of each block go to their owners meanwhile."""
    model = Llama(LlamaConfig(128, 32, 96, num_layers=6, num_heads=4, num_kv_heads=4))
    blocks = list(model.model.layers)
    rows = torch.arange(257)[None] % 128
    size = sum(p.numel() for p in blocks[0].parameters())

    def step():
        state = SimpleNamespace(staging=torch.empty(size), pending=None, pieces=[])
        missing = {block: set(block.parameters()) for block in blocks}

        def arrived(p, block):
            missing[block].discard(p)
            if not missing[block]:
                flat = torch.cat([q.grad.flatten() for q in block.parameters()])
                with span("compute", "send"):
                    send(flat, state, axis)

        hooks = [
            p.register_post_accumulate_grad_hook(partial(arrived, block=block))
            for block in blocks
            for p in block.parameters()
        ]
        logits = model(rows[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        state.pending.wait()
        for hook in hooks:
            hook.remove()
        model.zero_grad()

    gpu = emulate.device("h100/20", magnify=32)
    return emulate.film(step, model, axis, device=gpu, wire="25gbe")


def check_race(case: Case) -> None:
    for rank, (race, *_) in enumerate(case.results):
        if race:
            raise CheckFailed(f"rank {rank}: {race}")


def check_result(case: Case) -> None:
    every = case.given[0][0].sum(0)
    for rank, (_, pieces, *_) in enumerate(case.results):
        own = every.view(BLOCKS, case.size, -1)[:, rank]
        if len(pieces) != BLOCKS:
            raise CheckFailed(f"rank {rank} has {len(pieces)} pieces of {BLOCKS} blocks")
        for block, (got, want) in enumerate(zip(pieces, own, strict=True)):
            if got.shape != want.shape or not torch.allclose(got, want):
                raise CheckFailed(f"rank {rank}: its piece of block {block} is not the sum of all")


def check_traffic(case: Case) -> None:
    one = Sent("reduce_scatter", wire_bytes("reduce_scatter", 8 * LENGTH, case.size))
    for rank, sent in enumerate(case.sent):
        if sent[:BLOCKS] != [one] * BLOCKS:
            raise CheckFailed(f"rank {rank}: expected {BLOCKS} calls, {one}")


def check_overlap(case: Case) -> None:
    for rank, (_, _, waited, *_) in enumerate(case.results):
        if waited:
            raise CheckFailed(
                f"rank {rank} came out of `send` when the block had arrived: it was waited for, "
                "and nothing is computed meanwhile"
            )


def check_memory(case: Case) -> None:
    for rank, (_, _, _, buffers, *_) in enumerate(case.results):
        if buffers > 1:
            raise CheckFailed(f"rank {rank} has used {buffers} staging buffers; one is enough")
        if buffers == 0:
            raise CheckFailed(
                f"rank {rank} sent the gradients themselves, each kept alive until it has arrived; "
                "copy each into state.staging, and send from there"
            )


def drawn(case: Case):
    *_, before, after = case.results[0]
    return marked({"As it was": before, "Yours": after})


def marked(films):
    """Rank 0 of each, and a mark where its buffer is filled: red where it is still being sent."""
    from minipar.lab import draw  # takes long to import, and no rank needs it

    figure = draw.before_after({name: t.select(rank=0) for name, t in films.items()})
    for ax, t in zip(figure.axes, films.values(), strict=False):
        mine = t.select(rank=0)
        for filled in mine.select(name="send"):
            at = filled.start
            early = any(s.start < at < s.end - 1e-6 for s in mine.select(kind="comm"))
            ink = draw.EXPOSED if early else draw.INK
            ax.plot(1e3 * (at - mine.start), 0.0, "^", color=ink, ms=7, clip_on=False)
    return figure


def as_it_was(gradient, state, axis):
    state.staging.copy_(gradient)
    if state.pending is not None:
        state.pieces.append(state.pending.wait())
    state.pending = reduce_scatter(state.staging, axis, async_op=True)


def solution(gradient, state, axis):
    if state.pending is not None:
        state.pieces.append(state.pending.wait())
    state.staging.copy_(gradient)
    state.pending = reduce_scatter(state.staging, axis, async_op=True)


@fails(
    "race",
    "The buffer is filled before the wait for what it was filled with last.",
)
def wrong_leaves_it_as_it_was(gradient, state, axis):
    as_it_was(gradient, state, axis)


@fails(
    "memory",
    "A new buffer for each block: right, and as large as the model once many are on their way.",
)
def wrong_takes_a_new_buffer(gradient, state, axis):
    state.old = getattr(state, "old", [])
    state.old.append(state.staging)
    state.staging = gradient.clone()
    if state.pending is not None:
        state.pieces.append(state.pending.wait())
    state.pending = reduce_scatter(state.staging, axis, async_op=True)


@fails(
    "overlap",
    "Each block is waited for where it is sent: wait when the next one comes.",
)
def wrong_waits_at_once(gradient, state, axis):
    state.staging.copy_(gradient)
    state.pieces.append(reduce_scatter(state.staging, axis))


@fails(
    "result",
    "A block is waited for, and its piece is thrown away.",
)
def wrong_forgets_the_pieces(gradient, state, axis):
    if state.pending is not None:
        state.pending.wait()
    state.staging.copy_(gradient)
    state.pending = reduce_scatter(state.staging, axis, async_op=True)


@fails(
    "result",
    "Nothing was sent.",
)
def wrong_sends_nothing(gradient, state, axis):
    return None


@fails(
    "memory",
    "The gradient itself is sent, and must live until it has arrived: copy it into the buffer.",
)
def wrong_sends_the_gradient_itself(gradient, state, axis):
    if state.pending is not None:
        state.pieces.append(state.pending.wait())
    state.pending = reduce_scatter(gradient, axis, async_op=True)
