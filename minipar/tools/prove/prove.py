"""`minipar prove`: one device and the ranks, side by side; the first difference, by name.

Idea: train the same model on one device and on the ranks, for three steps. If these are equal,
train two steps that accumulate three microbatches. If the file has samples that weigh differently,
train on them, in one batch and over microbatches. Each stage of a step follows from the one before,
so the first stage that differs is where to look:

    initial weights -> (outputs of modules ->) loss -> gradients -> their norm -> weights -> buffers

Outputs are compared only where the loss differs: with a right loss, the output of a module may be a
piece, a summand, or anything else. Gradients are compared in the order of backward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates
from minipar.ranks.launch import RankError, Ranks
from minipar.tools.prove.causes import Parting, cause_of
from minipar.tools.prove.compare import RTOL, State, differing, forms, whole
from minipar.tools.prove.job import Job, WrongFile
from minipar.tools.prove.observe import Seen, Trial, observe


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    file: str
    sizes: dict[str, int]
    trials: list[str]  # those that were equal
    parting: Parting | None
    notes: list[str]

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        verdict = "equal to" if self.parting is None else "NOT equal to"
        lines = [f"{self.file} on {mesh}: {verdict} one device", ""]
        lines += [f"{'equal':>16}  {trial}" for trial in self.trials]
        if (p := self.parting) is not None:
            who = "all ranks"
            if len(p.ranks) < math.prod(self.sizes.values()):
                places = ((r, coordinates(r, self.sizes).items()) for r in p.ranks)
                at = {r: ", ".join(f"{axis}={c}" for axis, c in place) for r, place in places}
                who = ", ".join(f"rank {r} ({at[r]})" for r in p.ranks)
            others = f"; so are {p.wrong - 1} more at this stage" if p.wrong > 1 else ""
            rows = {
                "not equal": f"{p.trial.name}, from step {p.step + 1} on",
                "first difference": f"{p.stage} {p.name}".rstrip(),
                "on": f"{who}: {p.words}{others}",
                "likely cause": ": ".join(p.cause),
            }
            for key, text in rows.items():
                lines += wrap(f"{key:>16}  {text}", 96, subsequent_indent=" " * 18)
            lines.append("")
            at = next((i for i, (_, state) in enumerate(p.modules) if state == "parts here"), 0)
            for name, state in p.modules[max(0, at - 3) : at + 4]:
                mark, kind = "->" * (state == "parts here"), p.device.kinds.get(name, "")
                lines.append(f"{mark:>16}  {name or 'the model':32} {kind:20} {state}")
        return "\n".join([*lines, "", *(f"note: {note}" for note in self.notes)]).rstrip()


TRIALS = (
    Trial("3 steps", 3),
    Trial("2 steps of 3 microbatches", 2, 3),
    Trial("samples that weigh differently", uneven=True),
    Trial("3 microbatches that weigh differently", 1, 3, uneven=True, is_joined=True),
)


def prove(
    source: str | Job,
    sizes: dict[str, int],
    pool: Callable[[int], Ranks],
    rtol: float = RTOL,
) -> Verdict:
    """Compare a training on a mesh of `sizes` with one device.

    `source` is the path of a file, or a `Job`; ``pool(n)`` gives n ranks. Raises `WrongFile` where
    the file cannot be run or compared: where it fails, ends its process, or hangs.
    """
    size = math.prod(sizes.values())
    if size < 2:
        raise WrongFile(f"a mesh of {size} rank is one device itself; use dp=2 or more")
    file = source if isinstance(source, str) else source.file
    several = {axis: size for axis, size in sizes.items() if size > 1}
    passed: list[str] = []
    for trial in TRIALS:
        try:
            device = _observe(pool(1), source, sizes, trial, True)[0]
            seen = _observe(pool(size), source, sizes, trial, False)
            both = Parting(trial, several, device, seen, rtol)
            is_equal = not _parts(both)
        except WrongFile as error:
            equal = f" (in the trial of {trial.name}; equal by then: {', '.join(passed)})"
            raise WrongFile(f"{file}: {error}{equal * bool(passed)}") from None
        if not is_equal:
            break
        passed.append(trial.name)
        if len(passed) == 2 and not device.has_uneven:
            break
    return Verdict(file, sizes, passed, None if is_equal else both, _notes(both, is_equal))


def _observe(ranks: Ranks, *args: Any) -> list[Seen]:
    """Run a trial on all ranks, and tell in one line what goes wrong in the file."""
    try:
        return ranks.run(observe, *args)
    except TimeoutError as error:
        raise WrongFile(f"it does not end: {error}") from None
    except RankError as error:
        if any("\n" in failure.report for failure in error.failures.values()):
            raise  # not the file's fault, but ours
        told = "; ".join(report.replace("\n", " ") for report in error.reports())
        raise WrongFile(told.replace("rank 0 of 1:", "one device:")) from None


def _notes(s: Parting, is_equal: bool) -> list[str]:
    """Return sentences on what was compared, and what was not."""
    device, own = s.device, s.device.data
    gradients, buffers = device.gradients[0], device.buffers[0]
    counts = f"{len(device.outputs)} modules, {len(gradients or device.weights[0])} parameters"
    counts += f", buffers: {len(buffers)}" if buffers else ""
    has = {"rows of their own": own, "the same rows": [a for a in s.sizes if a not in own]}
    rows = "; ".join(f"ranks of {' x '.join(has[what])} have {what}" for what in has if has[what])
    if not device.has_whole_batch:
        parts = ", ".join(f"{one.share:.0%}" for one in s.seen)
        rows = f"shares(batch, mesh) gives the ranks {parts} of the numbers of a batch"
    notes = [f"{counts}; float64, ranks seeded differently, equal means to {s.rtol:g}", rows]
    if not gradients:
        notes.append("gradients and their norms were not compared: step() reduces them")
    if not is_equal:
        return notes
    if gradients and s.seen[0].norms[0] is None:
        notes.append("gradient norms were not compared; clip(model) in the file returns them")
    if device.noise:
        few = f"{len(device.noise)} weights, such as {next(iter(device.noise))}"
        notes.append(f"{few}, were not compared where their gradient is rounding alone")
    held = {n for one in s.seen for n, gradient in one.gradients[0].items() if gradient is not None}
    if elsewhere := [n for n, g in gradients.items() if g is not None and n not in held]:
        notes.append(f"{len(elsewhere)} gradients are not in .grad: their updates were compared")
    return notes


# ---------------------------------------------------------------------- stage by stage
def _parts(s: Parting) -> bool:
    """Fill in the first difference of any rank, and its cause. False if there is none."""
    outputs = s.device.outputs
    for (stage, step), expected in s.device.stages():
        if odd := differing(expected, expected):  # NaN is close to nothing
            of = f"{stage} of {next(iter(odd))}".removesuffix(" of ")
            at = f"on one device is not a number in step {(step or 0) + 1}"
            raise WrongFile(f"the {of} {at}: nothing can be compared")
        found = _assembled(s, stage, step, expected)
        told = [differing(state, expected, s.rtol) for state in found]
        if any(told):
            break
    else:
        return False
    others = "no parameters"
    if stage in ("loss", "gradient norm"):
        others = "equal" if (stage, step) == ("loss", 0) else "not compared"  # its outputs were
    bad = [name for name in outputs if s.form_of(name) is None]
    if bad and others == "equal" and not s.trial.is_joined:
        stage, expected = "output", {name: outputs[name] for name in bad}
        joined = [whole([one.outputs[n] for one in s.seen], s.sizes, outputs[n]) for n in bad]
        found = [dict(zip(bad, tensors, strict=True)) for tensors in zip(*joined, strict=True)]
        told = [differing(state, expected, s.rtol) for state in found]
    wrong = [name for name in expected if any(name in one for one in told)]
    owner = {name: _owner(name, outputs) for name in expected}
    order = {module: i for i, module in enumerate(outputs)}
    last_first = -1 if stage == "gradient" else 1
    ones = {n for n, t in expected.items() if t is not None and t.numel() == 1}
    # One number is a mix of any shares, and tells little: it comes last.
    name = min(wrong, key=lambda n: (n in ones, last_first * order.get(owner[n], -1)))
    tensors = [expected[name], *(state.get(name) for state in found)]
    nothing = torch.zeros_like(next(t for t in tensors if t is not None))
    s.expected, *s.found = (nothing if t is None else t for t in tensors)
    s.stage, s.step, s.name, s.module = stage, step or 0, name, owner[name]
    s.ranks = [rank for rank, one in enumerate(told) if name in one]
    s.words, s.wrong = told[s.ranks[0]][name], len(wrong)
    states = dict.fromkeys(outputs, others) | dict.fromkeys(owner.values(), "equal")
    if name or stage == "output":
        states |= {owner[name]: "differs" for name in wrong} | {owner[name]: "parts here"}
    s.modules = [(name, states[name]) for name in outputs]
    s.cause = cause_of(s)
    return True


def _owner(name: str, modules: State) -> str:
    """Return the innermost module around a parameter that has run; it may read inner weights."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _assembled(s: Parting, stage: str, step: int | None, expected: State) -> list[State]:
    """Return the tensors of each rank as one device has them: pieces joined, losses of the batch.

    A rank that holds nothing and need not, as another stage of a pipeline, gets the right tensor.
    A wrong gradient that a rank does not hold shows in the weights after the step.
    """
    states = [dict(one.stages())[stage, step] for one in s.seen]
    if stage == "loss":
        return _losses(s, [state[""] for state in states], expected, step)
    if stage == "gradient norm":
        return states if all(states) else [expected] * len(states)
    found: list[State] = [{} for _ in states]
    for name, theirs in expected.items():
        own = [state.get(name) for state in states]
        if theirs is not None:
            own = whole(own, s.sizes, theirs)
        held = [tensor for tensor in own if tensor is not None]
        odd = [list(t.shape) for t in held if theirs is not None and t.shape != theirs.shape]
        why = "no rank has this name. Was it renamed, replaced, or left out?"
        if odd:
            why = f"pieces of {odd[0]} make no {list(theirs.shape)} in rank order; a function "
            why += "gather(name, tensor, mesh) in the file can join them"
        if odd or not (held or stage == "gradient"):
            raise WrongFile(f"{stage} {name} cannot be compared: {why}")
        for rank, tensor in enumerate(own):
            if tensor is not None and stage == "weights" and name in s.device.noise:
                tensor = torch.where(s.device.noise[name], theirs, tensor)
            found[rank][name] = theirs if tensor is None else tensor
    return found


def _losses(s: Parting, own: list[Tensor], expected: State, step: int) -> list[State]:
    """Return what the ranks' losses are: of the batch, summands of it, or of each rank's share.

    Whether shares are weighed rightly is seen in the gradients.
    """
    loss, parts = expected[""], s.device.parts
    shares = [sum(of[s.share_of(rank)][0] for of in parts) / len(parts) for rank in range(len(own))]
    if step == 0:
        is_right = all(math.isclose(a, b, rel_tol=s.rtol) for a, b in zip(own, shares, strict=True))
    else:  # losses of shares are not known in later steps, only whether the loss is their mean
        is_right = not math.isclose(sum(shares) / len(own), s.device.losses[0], rel_tol=s.rtol)
    if not s.device.has_whole_batch and min(own) <= loss <= max(own):  # a mean with weights?
        is_right |= all(s.form_of(name) is not None for name in s.device.outputs)
    if is_right:
        return [expected] * len(own)
    known = forms(own, s.sizes, loss.shape, "mean", "sum")
    form, nearest = min(known, key=lambda one: max(abs(value - loss) for value in one[1]))
    s.averaged = [a for a, how in form.items() if how == "mean" and a not in s.device.data]
    return [{"": value} for value in nearest]
