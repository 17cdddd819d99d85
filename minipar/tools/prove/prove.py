"""`minipar prove`: one device and the ranks, side by side; the first difference, by name.

Idea: train the same model on one device and on the ranks, for three steps; then, if that was equal,
two steps that accumulate three microbatches; then, if the file has such, samples that weigh
differently, in one batch and over microbatches. Each stage of a step follows from the one before:
the first that differs is where to look:

    initial weights -> (outputs of modules ->) loss -> gradients -> their norm -> weights -> buffers

Outputs are asked where the loss differs: a module's may be a piece, a summand, or anything else
that ends in the right loss. Gradients are asked in the order of backward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates
from minipar.ranks.launch import RankError, Ranks
from minipar.tools.prove.causes import Suspect, cause_of
from minipar.tools.prove.compare import RTOL, State, differing, forms, is_close, whole
from minipar.tools.prove.job import Job, WrongFile
from minipar.tools.prove.observe import Seen, Trial, observe

Module = tuple[str, str, str]  # name, class; "equal", "parts here", "differs", "no parameters" ...


@dataclass(frozen=True)
class Parting:
    """The first difference, and its likely cause."""

    trial: str
    stage: str  # initial weights, output, loss, gradient, gradient norm, weights, buffer
    step: int  # from 1
    name: str  # of the parameter, or of the module
    module: str
    ranks: list[int]
    words: str
    wrong: int  # how many tensors differ at this stage
    cause: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    file: str
    sizes: dict[str, int]
    trials: list[str]  # those that were equal
    parting: Parting | None
    modules: list[Module]  # in order of execution
    notes: list[str]

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        verdict = "equal to" if self.parting is None else "NOT equal to"
        lines = [f"{self.file} on {mesh}: {verdict} one device", ""]
        lines += [f"{'equal':>16}  {trial}" for trial in self.trials]
        if (p := self.parting) is not None:
            who = "all ranks"
            if len(p.ranks) < math.prod(self.sizes.values()):
                who = ", ".join(f"rank {r} ({_at(r, self.sizes)})" for r in p.ranks)
            others = f"; so are {p.wrong - 1} more at this stage" if p.wrong > 1 else ""
            rows = {
                "not equal": f"{p.trial}, from step {p.step} on",
                "first difference": f"{p.stage} {p.name}".rstrip(),
                "on": f"{who}: {p.words}{others}",
                "likely cause": f"{p.cause}: {p.why}",
            }
            for key, text in rows.items():
                lines += wrap(f"{key:>16}  {text}", 96, subsequent_indent=" " * 18)
            lines.append("")
            at = next((i for i, m in enumerate(self.modules) if m[2] == "parts here"), 0)
            for name, kind, state in self.modules[max(0, at - 3) : at + 4]:
                mark = "->" * (state == "parts here")
                lines.append(f"{mark:>16}  {name or 'the model':32} {kind:20} {state}")
        return "\n".join([*lines, "", *(f"note: {note}" for note in self.notes)]).rstrip()


def _at(rank: int, sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={c}" for axis, c in coordinates(rank, sizes).items())


TRIALS = (
    Trial("3 steps", 3),
    Trial("2 steps of 3 microbatches", 2, 3),
    Trial("samples that weigh differently", uneven=True),
    Trial("3 microbatches that weigh differently", 1, 3, uneven=True),
)


def prove(
    source: str | Job,
    sizes: dict[str, int],
    pool: Callable[[int], Ranks],
    rtol: float = RTOL,
) -> Verdict:
    """Hold a training on a mesh of `sizes` against one device.

    `source` is the path of a file, or a `Job`; ``pool(n)`` gives n ranks. Raises `WrongFile` where
    the file cannot be run or compared: where it fails, ends its process, or hangs.
    """
    size = math.prod(sizes.values())
    if size < 2:
        raise WrongFile(f"a mesh of {size} rank is one device itself; use dp=2 or more")
    file = source if isinstance(source, str) else source.file
    passed: list[str] = []
    clipped: set[bool | None] = set()
    for trial in TRIALS:
        try:
            device = _observe(pool(1), source, sizes, trial, True)[0]
            seen = _observe(pool(size), source, sizes, trial, False)
            clipped.add(device.is_clipped)
            several = {axis: size for axis, size in sizes.items() if size > 1}
            suspect = Suspect(trial, several, device, seen, rtol)
            parting, modules = _parting(suspect)
        except WrongFile as error:
            equal = f" (in the trial of {trial.name}; equal by then: {', '.join(passed)})"
            raise WrongFile(f"{file}: {error}{equal * bool(passed)}") from None
        if parting is not None:
            break
        passed.append(trial.name)
        if len(passed) == 2 and not device.has_uneven:
            break
    return Verdict(
        file, sizes, passed, parting, modules, _notes(suspect, parting is None, clipped == {False})
    )


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
        told = told.replace("rank 0 of 1:", "one device:")
        if "imed out" in told:
            told += " (these waited in vain for ranks that did not join the same collective)"
        raise WrongFile(told) from None


def _notes(s: Suspect, is_equal: bool, is_loose: bool) -> list[str]:
    """Return sentences on what was compared, and what was not."""
    device, own = s.device, s.device.data
    parameters, buffers = device.gradients[0] or device.weights[0], device.buffers[0]
    counts = f"{len(device.outputs)} modules, {len(parameters)} parameters"
    counts += f", buffers: {len(buffers)}" if buffers else ""
    notes = [f"{counts}; float64, ranks seeded differently, equal means to {s.rtol:g}"]
    rows = [f"ranks of {' x '.join(own)} have rows of their own"] if own else []
    if not device.has_whole_batch:
        parts = ", ".join(f"{one.share:.0%}" for one in s.seen)
        rows.append(f"shares(batch, mesh) gives the ranks {parts} of the numbers of a batch")
    if (shared := [axis for axis in s.sizes if axis not in own]) and device.has_whole_batch:
        rows.append(f"ranks of {' x '.join(shared)} have the same rows")
    notes += ["; ".join(rows)] if rows else []
    is_norm = partial(math.isclose, device.own_norms[0], rel_tol=max(1e-9, s.rtol))
    has_pieces = not all(is_norm(one.own_norms[0]) for one in s.seen)
    elsewhere = [
        name
        for name, theirs in device.gradients[0].items()
        if theirs is not None and all(one.gradients[0].get(name) is None for one in s.seen)
    ]
    if not device.gradients[0]:
        notes.append("gradients and their norms were not compared: step() reduces them")
    elif is_equal and has_pieces and s.seen[0].norms[0] is None:
        notes.append("gradient norms were not compared; clip(model) in the file returns them")
    if is_equal and is_loose:
        notes.append("clip(model) never changed a gradient: prove it with a lower bound as well")
    if is_equal and device.noise:
        few = f"{len(device.noise)} weights, such as {next(iter(device.noise))}"
        notes.append(f"{few}, were not compared where their gradient is rounding alone")
    if is_equal and elsewhere:
        notes.append(f"{len(elsewhere)} gradients are not in .grad: their updates were compared")
    return notes


# ---------------------------------------------------------------------- stage by stage
def _parting(s: Suspect) -> tuple[Parting | None, list[Module]]:
    """Return the first difference of any rank; and the modules, each equal or not."""
    outputs, kinds = s.device.outputs, s.device.kinds
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
        return None, [(name, kinds.get(name, ""), "equal") for name in outputs]
    wrong = [name for name in expected if any(name in one for one in told)]
    owner = {name: _owner(name, outputs) for name in expected}
    bad = [name for name in outputs if s.form_of(name) is None]
    if bad and stage == "loss" and step == 0 and not s.trial.is_joined:
        stage, expected, wrong, owner = "output", outputs, bad, {name: name for name in outputs}
        joined = whole([one.outputs[bad[0]] for one in s.seen], s.sizes, outputs[bad[0]])
        found = [{bad[0]: tensor} for tensor in joined]
        told = [differing(state, {bad[0]: outputs[bad[0]]}, s.rtol) for state in found]
    order = {module: i for i, module in enumerate(outputs)}
    last_first = -1 if stage == "gradient" else 1
    ones = {n for n, t in expected.items() if t is not None and t.numel() == 1}
    # One number is a mix of any shares, and tells little: it comes last.
    name = min(wrong, key=lambda n: (n in ones, last_first * order.get(owner[n], -1)))
    tensors = [expected[name], *(state.get(name) for state in found)]
    nothing = torch.zeros_like(next(t for t in tensors if t is not None))
    s.expected, *s.found = (nothing if t is None else t for t in tensors)
    s.stage, s.step, s.name = stage, step or 0, name
    s.ranks = [rank for rank, one in enumerate(told) if name in one]
    where = stage, s.step + 1, name, owner[name], s.ranks, told[s.ranks[0]][name], len(wrong)
    others = "equal" if stage == "loss" and step == 0 else "not compared"  # its outputs were
    if stage in ("initial weights", "gradient", "weights", "buffer"):
        others = "no parameters"
    states = dict.fromkeys(outputs, others) | dict.fromkeys(owner.values(), "equal")
    states |= {owner[name]: "differs" for name in wrong} | {owner[name]: "parts here"}
    modules = [(name, kinds.get(name, ""), states[name]) for name in outputs]
    return Parting(s.trial.name, *where, *cause_of(s)), modules


def _owner(name: str, modules: State) -> str:
    """Return the innermost module around a parameter that was called: others read its weights."""
    owner = name.rpartition(".")[0]
    while owner and owner not in modules:
        owner = owner.rpartition(".")[0]
    return owner


def _assembled(s: Suspect, stage: str, step: int | None, expected: State) -> list[State]:
    """Return for each rank what it has as one device would: pieces joined, losses of the batch.

    Where a rank holds nothing and need not, as another stage of a pipeline, it has what is right.
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
        if odd or not any(name in state for state in states):
            raise WrongFile(f"{stage} {name} cannot be compared: {why}")
        for rank, state in enumerate(states):
            if own[rank] is None:
                is_sent = stage == "gradient" and _is_updated(s, step, name, rank)
                own[rank] = theirs if name not in state or is_sent else None
            if stage == "weights" and own[rank] is not None and name in s.device.noise:
                own[rank] = torch.where(s.device.noise[name], theirs, own[rank])
            found[rank][name] = own[rank]
    return found


def _is_updated(s: Suspect, step: int, name: str, rank: int) -> bool:
    """Return True if a rank without this gradient has the right weight after the step."""
    theirs = s.device.weights[step][name]
    own = whole([one.weights[step].get(name) for one in s.seen], s.sizes, theirs)[rank]
    return own is not None and is_close(own, theirs, s.rtol)


def _losses(s: Suspect, own: list[Tensor], expected: State, step: int) -> list[State]:
    """Return what the ranks' losses are: of the batch, summands of it, or of each rank's share.

    Whether shares are weighed rightly is seen in the gradients.
    """
    loss, parts = expected[""], s.device.parts
    shares = [sum(of[s.share_of(rank)][0] for of in parts) / len(parts) for rank in range(len(own))]
    if step == 0:
        is_right = all(math.isclose(a, b, rel_tol=s.rtol) for a, b in zip(own, shares, strict=True))
    else:  # of later steps nobody knows the shares' losses: only if a mean is meant, it can be told
        is_right = not math.isclose(sum(shares) / len(own), s.device.losses[0], rel_tol=s.rtol)
    if not s.device.has_whole_batch and min(own) <= loss <= max(own):  # a mean with weights?
        is_right |= all(s.form_of(name) is not None for name in s.device.outputs)
    if is_right:
        return [expected] * len(own)
    joined = [joined for _, joined in forms(own, s.sizes, loss.shape, "mean", "sum")]
    nearest = min(joined, key=lambda values: max(abs(value - loss) for value in values))
    return [{"": value} for value in nearest]
