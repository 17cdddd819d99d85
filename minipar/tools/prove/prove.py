"""`minipar prove`: one device and the ranks, side by side; the first difference, by name.

Idea: train the same model on one device and on the ranks, for three steps; then, if that was equal,
two steps that accumulate three microbatches; then, if the file has such, samples that weigh
differently, in one batch and over microbatches. Each stage of a step follows from the one before:
the first that differs is where to look:

    initial weights -> (outputs of modules ->) loss -> gradients -> their norm -> weights -> buffers

Outputs are asked where the loss differs: a module's may be a piece, a summand, or anything else
that ends in the right loss. Gradients are asked in the order of backward.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates
from minipar.ranks.launch import RankError, Ranks
from minipar.tools.prove.causes import cause_of
from minipar.tools.prove.compare import RTOL, Stage, State, differing, forms, is_close, whole
from minipar.tools.prove.job import Job, WrongFile
from minipar.tools.prove.observe import Trial, observe
from minipar.tools.prove.suspect import Both, Suspect

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

    def json(self) -> str:
        """Return the verdict as JSON, for programs."""
        return json.dumps({"equal": self.parting is None, **asdict(self)}, indent=1)

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        verdict = "equal to" if self.parting is None else "NOT equal to"
        lines = [f"{self.file} on {mesh}: {verdict} one device", ""]
        lines += [f"{'equal':>16}  {trial}" for trial in self.trials]
        if (p := self.parting) is not None:
            where = [f"rank {r} ({_at(r, self.sizes)})" for r in p.ranks]
            who = "all ranks" if len(where) == math.prod(self.sizes.values()) else ", ".join(where)
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


def _owner(name: str, modules: State) -> str:
    """Return the innermost module around a parameter that was called: others read its weights."""
    owner = name.rpartition(".")[0]
    while owner and owner not in modules:
        owner = owner.rpartition(".")[0]
    return owner


def _at(rank: int, sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={c}" for axis, c in coordinates(rank, sizes).items())


def prove(
    source: str | Job,
    sizes: dict[str, int],
    pool: Callable[[int], Ranks],
    steps: int = 3,
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
    if isinstance(source, str):
        source = os.path.abspath(source)  # the ranks may stand in another folder
    trials = [Trial(f"{steps} steps", steps), Trial("2 steps of 3 microbatches", 2, 3)]
    uneven = [
        Trial("samples that weigh differently", uneven=True),
        Trial("3 microbatches that weigh differently", 1, 3, uneven=True),
    ]
    passed: list[str] = []
    notes: list[str] = []
    for trial in trials:
        try:
            device = _call(file, pool(1), observe, source, sizes, trial, True)[0]
            seen = _call(file, pool(size), observe, source, sizes, trial, False)
            both = Both(trial, sizes, device, seen, rtol)
            parting, modules = _parting(both)
        except WrongFile as error:
            equal = f" (in the trial of {trial.name}; equal by then: {', '.join(passed)})"
            raise WrongFile(f"{error}{equal * bool(passed)}") from None
        notes = notes or _notes(both)
        if parting is not None:
            break
        passed.append(trial.name)
        if device.has_uneven and uneven[0] not in trials:
            trials += uneven
    return Verdict(file, sizes, passed, parting, modules, notes)


def _notes(both: Both) -> list[str]:
    """Return sentences on what was compared, and what was not."""
    device, own = both.device, both.device.data
    counts = f"{len(device.outputs)} modules, {len(device.gradients[0])} parameters"
    counts += f", buffers: {len(device.buffers[0])}" if device.buffers[0] else ""
    notes = [f"{counts}; float64, ranks seeded differently, equal means to {both.rtol:g}"]
    shared = [axis for axis in both.sizes if axis not in own]
    rows = [f"ranks of {' x '.join(own)} have rows of their own"] if own else []
    if own or both.seen[0].has_whole_batch:
        rows += [f"ranks of {' x '.join(shared)} have the same rows"] if shared else []
        notes.append("; ".join(rows))
    if not both.seen[0].has_gradients:
        notes.append("gradients and their norms were not compared: step() reduces them")
    elif both.seen[0].norms[0] is None:
        notes.append("gradient norms were not compared; clip(model) in the file returns them")
    return notes


def _call(file: str, ranks: Ranks, function: Callable, *args: Any) -> list[Any]:
    """Run on all ranks, and tell what goes wrong in the file in one line."""
    try:
        return ranks.run(function, *args)
    except TimeoutError as error:
        raise WrongFile(f"{file} does not end: {error}") from None
    except RankError as error:
        told: dict[str, list[str]] = {}
        for failure in error.failures.values():
            if "\n" in failure.report:
                raise  # not the file's fault, but ours
            report = failure.report.replace(os.path.abspath(file), file)
            told.setdefault(report, []).append(failure.label)
        words = [f"{', '.join(labels)}: {report}" for report, labels in told.items()]
        here = f"one device: {next(iter(told))}" if ranks.size == 1 else "; ".join(words)
        if "imed out" in here:
            here += " (these waited in vain for ranks that did not join the same collective)"
        raise WrongFile(here if file in here else f"{file}: {here}") from None


def _assembled(both: Both, stage: Stage, pieces: list[State], expected: State) -> list[State]:
    """Return for each rank what it has as one device would: pieces joined, losses of the batch.

    Where a rank holds nothing and need not, as another stage of a pipeline, it has what is right.
    """
    what, step = stage
    is_off = what.startswith("gradient") and not both.seen[0].has_gradients
    if is_off or (what == "gradient norm" and not all(pieces)):
        return [expected] * len(pieces)
    if what == "loss":
        return _losses(both, [state[""] for state in pieces], expected, step)
    if what == "gradient norm":
        return pieces
    found: list[State] = [{} for _ in pieces]
    for name, theirs in expected.items():
        if not any(name in state for state in pieces):
            raise WrongFile(
                f"{what} {name} cannot be compared: no rank has this name. Was it renamed, "
                f"replaced, or left out?"
            )
        own = [state.get(name) for state in pieces]
        if theirs is not None and any(piece is not None for piece in own):
            own = both.held(own, theirs, f"{what} {name}")
        for rank, state in enumerate(pieces):
            if own[rank] is None and (name not in state or _is_elsewhere(both, stage, name, rank)):
                own[rank] = theirs
            found[rank][name] = own[rank]
    return found


def _is_elsewhere(both: Both, stage: Stage, name: str, rank: int) -> bool:
    """Return True if a rank without this gradient has the right weight after the step."""
    if stage[0] != "gradient" or all(s.gradients[stage[1]].get(name) is None for s in both.seen):
        return False
    theirs = both.device.weights[stage[1]][name]
    own = [seen.weights[stage[1]].get(name) for seen in both.seen]
    own = both.held(own, theirs, f"weights {name}")
    return own[rank] is not None and is_close(own[rank], theirs, both.rtol)


def _losses(both: Both, own: list[Tensor], expected: State, step: int) -> list[State]:
    """Return what the ranks' losses are: of the batch, summands of it, or of each rank's share.

    Whether shares are weighed rightly is seen in the gradients.
    """
    loss, parts = expected[""], both.device.parts
    shares = [both.share_of(rank) for rank in range(len(own))]
    theirs = [sum(of[share][0] for of in parts) / len(parts) for share in shares]
    is_mean = math.isclose(sum(theirs) / len(theirs), both.device.losses[0], rel_tol=both.rtol)
    pairs = zip(own, theirs, strict=True)
    if all(math.isclose(a, b, rel_tol=both.rtol) for a, b in pairs) if step == 0 else not is_mean:
        return [expected] * len(own)  # unless it is a mean, later ones cannot be told
    joined = [joined for _, joined in forms(own, both.sizes, loss.shape, "mean", "sum")]
    nearest = min(joined, key=lambda values: max(abs(value - loss) for value in values))
    return [{"": value} for value in nearest]


def _parting(both: Both) -> tuple[Parting | None, list[Module]]:
    """Return the first difference of any rank; and the modules, each equal or not."""
    device, rtol = both.device, both.rtol
    parts = [dict(one.stages()) for one in both.seen]
    for (stage, step), theirs in device.stages():
        states = [part[stage, step] for part in parts]
        found = _assembled(both, (stage, step), states, theirs)
        told = [differing(state, theirs, rtol) for state in found]
        wrong = [name for name in theirs if any(name in one for one in told)]
        if wrong:
            break
    else:
        return None, [(name, device.kinds.get(name, ""), "equal") for name in device.outputs]
    owner = {name: _owner(name, device.outputs) for name in theirs}
    if stage == "loss" and step == 0 and not both.trial.is_joined:
        bad = [name for name in device.outputs if both.form_of(name) is None]
        if bad:
            stage, wrong, theirs = "output", bad, device.outputs
            owner = {name: name for name in theirs}
            own = whole([one.outputs[bad[0]] for one in both.seen], both.sizes, theirs[bad[0]])
            found = [{bad[0]: tensor} for tensor in own]
            told = [differing(state, {bad[0]: theirs[bad[0]]}, rtol) for state in found]
    order = {module: i for i, module in enumerate(device.outputs)}
    last_first = -1 if stage == "gradient" else 1
    name = min(wrong, key=lambda name: last_first * order.get(owner[name], -1))
    tensors, expected, module = [state.get(name) for state in found], theirs[name], owner[name]
    if expected is None:
        expected = next(torch.zeros_like(tensor) for tensor in tensors if tensor is not None)
    values = [torch.zeros_like(expected) if t is None else t for t in tensors]
    ranks, step = [rank for rank, one in enumerate(told) if name in one], max(step or 0, 0)
    where = dict(stage=stage, name=name, ranks=ranks, wrong=len(wrong))
    suspect = Suspect(**vars(both), **where, step=step, found=values, expected=expected)
    cause, why = cause_of(suspect)
    said = dict(module=module, words=told[ranks[0]][name], cause=cause, why=why)
    parting = Parting(both.trial.name, step=step + 1, **where, **said)
    states = dict.fromkeys(owner.values(), "equal") | {owner[n]: "differs" for n in wrong}
    states[module] = "parts here"
    has_names = stage in ("initial weights", "gradient", "weights", "buffer")
    others = "no parameters" if has_names else "not compared"
    others = "equal" if stage == "loss" and step == 0 else others  # its outputs were
    return parting, [(n, device.kinds.get(n, ""), states.get(n, others)) for n in device.outputs]
