"""The law of parity: a strategy must compute what one device computes.

`serial(task)` trains a model on one device in float64; `parallel(task, sizes, attach)` trains it on
the ranks of a mesh, with every rank *seeded differently*, so that nothing is equal by luck. Both
go through `train_step`, the loop of the real trainer. `assert_parity` compares initial weights,
losses, every gradient, gradient norms and parameters after all steps, to a relative 1e-10: as
`minipar prove` does for anybody's training, by the same code.

A strategy plugs in with one function ``attach(model, mesh) -> [strategies]``; see test_ddp.py, and
test_compose.py for all of them together.
A proof that cannot fail proves nothing: `parallel(..., mute=True)` trains without communication,
and parity must then be violated.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.mesh import Mesh
from minipar.observe import timeline
from minipar.parallel import compose
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.compose import Composed
from minipar.parallel.plan import Plan
from minipar.ranks.backends import compute_device
from minipar.tools.prove.compare import RTOL, Record, differing
from minipar.train.data import IGNORE, share
from minipar.train.step import Microbatch, train_step

Attach = Callable[[nn.Module, Mesh], Sequence[Strategy]]
Cut = Callable[[Microbatch, Mesh], Microbatch]


@dataclass(frozen=True)
class Task:
    """A small training job, the same wherever it runs."""

    build: Callable[[int], nn.Module]  # seed -> model
    vocab_size: int = 61
    num_sequences: int = 6  # of a global batch
    seq_len: int = 7
    microbatches: int = 1
    steps: int = 3
    max_norm: float = 0.5  # low enough to clip
    fine_tune: Callable[[nn.Module], None] = lambda model: None  # such as freezing a part

    def batch(self, step: int) -> Microbatch:
        """The global batch [B, T] of a step: rows of very uneven length, one without any target."""
        generator = torch.Generator().manual_seed(step)
        shape = self.num_sequences, self.seq_len
        inputs = torch.randint(self.vocab_size, shape, generator=generator)
        targets = torch.randint(self.vocab_size, shape, generator=generator)
        for row in range(self.num_sequences):
            targets[row, (row * 5 + step) % self.seq_len :] = IGNORE
        targets[step % self.num_sequences] = IGNORE
        return inputs, targets

    def microbatches_of(self, step: int, rank: int, size: int) -> list[Microbatch]:
        """The share of `rank`, cut into microbatches of one shape; missing rows are padding."""
        inputs, targets = self.batch(step)
        mine = share(torch.arange(self.num_sequences), rank, size)
        rows = -(-self.num_sequences // (size * self.microbatches))
        result = []
        for m in range(self.microbatches):
            chosen = share(mine, m, self.microbatches)
            x = torch.zeros(rows, self.seq_len, dtype=torch.int64)
            y = torch.full_like(x, IGNORE)
            x[: len(chosen)], y[: len(chosen)] = inputs[chosen], targets[chosen]
            result.append((x, y))
        return result


@dataclass
class Outcome(Record):
    """All that one run of a task computed, in the shapes of the serial model."""

    num_tokens: list[int] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes along each axis in the last step
    state: int = 0  # numbers of optimizer state on this rank, such as moments


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, of this rank."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def at_home(named: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The same tensors on the CPU."""
    return {name: None if value is None else value.cpu() for name, value in named.items()}


def serial(task: Task, seed: int = 0) -> Outcome:
    """Train on one device."""
    return _train(task, task.build(seed), Mesh(), lambda model, mesh: [])


@cache
def reference(task: Task) -> Outcome:
    """What one device computes, once for all tests that are held against it."""
    return serial(task)


def parallel(
    task: Task,
    sizes: dict[str, int],
    attach: Attach,
    *,
    gradients: Callable[[nn.Module], dict[str, Tensor | None]] | None = None,
    mute: bool = False,
    cut: Cut = lambda microbatch, mesh: microbatch,
) -> Outcome:
    """Train on the ranks of a mesh; called on each of them, with a seed of its own.

    `gradients` collects them where the last strategy cannot. `cut` takes this rank's tokens out of
    whole sequences. Ranks of `dp`, `cp` and `ep` hold different tokens.
    """
    mesh = Mesh(**sizes)
    torch.manual_seed(1000 + mesh.rank)
    return _train(task, task.build(mesh.rank), mesh, attach, gradients, mute, cut)


def _train(
    task: Task,
    model: nn.Module,
    mesh: Mesh,
    attach: Attach,
    gradients: Callable | None = None,
    mute: bool = False,
    cut: Cut = lambda microbatch, mesh: microbatch,
) -> Outcome:
    device = compute_device()  # a GPU, if `make gpu-check` asks
    model.double().to(device)
    task.fine_tune(model)
    strategies = list(attach(model, mesh))

    def weights() -> dict[str, Tensor]:
        if strategies:
            return at_home(strategies[-1].full_state_dict())
        return at_home({name: value.clone() for name, value in model.state_dict().items()})

    own = [s.optimizer for s in strategies if hasattr(s, "optimizer")]  # made by `attach`
    optimizer = own[0] if own else make_optimizer(model)
    outcome, whose = Outcome(before=weights(), after={}), mesh.joint("dp", "ep")
    with muted() if mute else contextlib.nullcontext():
        for step in range(task.steps):
            whole = task.microbatches_of(step, whose.rank, whose.size)
            whole = [tuple(t.to(device) for t in microbatch) for microbatch in whole]
            microbatches = [cut(microbatch, mesh) for microbatch in whole]
            for strategy in strategies:
                microbatches = [strategy.shard(microbatch) for microbatch in microbatches]
            with timeline.record() as recorded:
                result = train_step(
                    model,
                    strategies,
                    optimizer,
                    microbatches,
                    mesh.joint("dp", "cp", "ep"),
                    max_norm=task.max_norm,
                )
            outcome.losses.append(result.loss.item())
            outcome.num_tokens.append(int(result.num_tokens))
            outcome.norms.append(result.grad_norm.item())
            if gradients is not None or not strategies:
                outcome.gradients.append(at_home((gradients or gradients_of)(model)))
            else:
                outcome.gradients.append(at_home(strategies[-1].full_gradients()))
    outcome.sent = recorded.bytes_by_axis()
    outcome.state = sum(
        value.numel()
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
        if key != "step"
    )
    outcome.after = weights()
    return outcome


def make_optimizer(model: nn.Module, make: Callable = torch.optim.AdamW, *args) -> Any:
    """The optimizer of every task; `make` is a class like AdamW, `args` what else it needs."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return make(trainable, *args, lr=0.02, weight_decay=0.1)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """The mutant of every strategy: its collectives return, but nothing is sent.

    Those of the trainer itself, which count tokens and report the loss, go on.
    """
    real = collectives.launch

    def silent(verb, axis, sent, call, *rest, **options):
        caller = sys._getframe(2).f_globals["__name__"]  # past the verb, whoever called it
        if not caller.startswith("minipar.train"):
            call = lambda async_op: None  # noqa: E731
        return real(verb, axis, sent, call, *rest, **options)

    with mock.patch.object(collectives, "launch", silent):
        yield


def differences(found: Record, expected: Record, rtol: float = RTOL) -> Iterator[str]:
    """Yield each difference in words, in the order of computation."""
    ours = dict(found.stages())
    for (stage, step), theirs in expected.stages():
        at = {None: stage, -1: f"{stage} after training"}.get(step, f"{stage} of step {step}")
        for name, words in differing(ours[stage, step], theirs, rtol).items():
            yield f"{at} {name}".rstrip() + f": {words}"


def assert_parity(found: Outcome, expected: Outcome, rtol: float = RTOL) -> None:
    """Raise `AssertionError` that says what differs first, in the order of computation."""
    assert found.num_tokens == expected.num_tokens, (found.num_tokens, expected.num_tokens)
    assert len(found.gradients) == len(expected.gradients) > 0
    for difference in differences(found, expected, rtol):
        raise AssertionError(str(difference))


# ---------------------------------------------------------------------- plans
def attach_plan(model: nn.Module, mesh: Mesh, plan: Plan) -> list[Composed]:
    """Attach all strategies of a plan."""
    model.composed = compose.apply(model, mesh, plan, make_optimizer, bucket_mb=0.004)
    return [model.composed]


def gradients_of_plan(model: nn.Module) -> dict[str, Tensor | None]:
    """Of all ranks together, by their names in the serial model; a collective."""
    whole = model.composed.full_gradients()
    named = dict.fromkeys(itertools.chain(*model.composed.names))  # a tied head, buffers are not
    return {name: gradient for name, gradient in whole.items() if name in named}
