"""Why it parts, from the numbers alone: a table of suspicions, each tested on the tensors.

The strongest of them: a gradient is a sum over shares of the batch, so the gradient that a rank
ended with is solved for how often each share is in it. On one device all weigh the same; a rank
that never reduced has its own share once and the others not at all.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates, groups_along, rank_at
from minipar.prove.compare import Form, forms, is_close, join
from minipar.prove.observe import Seen, Trial

Cause = tuple[str, str]  # what it is called, and what in the numbers speaks for it


@dataclass(frozen=True)
class Both:
    """A trial on one device, and on every rank of a mesh."""

    trial: Trial
    sizes: dict[str, int]
    device: Seen
    seen: list[Seen]  # by rank
    rtol: float

    def share_of(self, rank: int) -> int:
        """The number of the share of the batch that a rank has, in row-major order."""
        data = {axis: size for axis, size in self.sizes.items() if axis in self.device.data}
        return rank_at(coordinates(rank, self.sizes), data)

    def form_of(self, name: str) -> Form | None:
        """How ranks hold the output of a module; None where it is none of one device's."""
        expected, pieces = self.device.outputs[name], [one.outputs.get(name) for one in self.seen]
        if any(piece is None for piece in pieces):
            return {}  # a module that is not run, or not there, on some rank
        for form, joined in forms(pieces, self.sizes, expected.shape, "sum"):
            if all(is_close(together, expected, self.rtol, 1e-13) for together in joined):
                return form
        return None


@dataclass(frozen=True)
class Suspect(Both):
    """The first tensor, or number, that differs, as every rank has it."""

    stage: str
    step: int
    name: str
    found: list[Tensor]  # by rank, whole
    expected: Tensor
    ranks: list[int]  # those that are wrong
    wrong: int  # how many names of this stage are

    def are(self, values: list[Tensor] | Tensor, rtol: float = 0.0) -> bool:
        """Whether what the ranks that are wrong have is that, each the same or its own."""
        own = values if isinstance(values, list) else [values] * len(self.found)
        return all(is_close(self.found[r], own[r], max(rtol, self.rtol)) for r in self.ranks)

    def axes(self) -> Iterator[tuple[str, int]]:
        """Axes of several ranks, and all together."""
        several = {axis: size for axis, size in self.sizes.items() if size > 1}
        yield from several.items()
        if len(several) > 1:
            yield " x ".join(several), math.prod(several.values())

    def chunks(self) -> Iterator[tuple[str, int, list[Tensor]]]:
        """What the first wrong rank has in equal pieces, one per rank of an axis, along a dim."""
        found = self.found[self.ranks[0]]
        for axis, size in self.sizes.items():
            for dim in range(found.ndim if size > 1 else 0):
                if found.shape[dim] and found.shape[dim] % size == 0:
                    yield axis, dim, list(found.chunk(size, dim))


def cause_of(suspect: Suspect) -> Cause:
    """The first suspicion that the numbers bear out."""
    for suspicion in SUSPICIONS[suspect.stage]:
        if (cause := suspicion(suspect)) is not None:
            return cause
    if len(suspect.ranks) < len(suspect.found):
        return "only some ranks", "the others are right"
    return "unknown", "all ranks are wrong, in no way that is known here"


# ---------------------------------------------------------------------- any tensor
def _shape(s: Suspect) -> Cause | None:
    odd = [list(found.shape) for found in s.found if found.shape != s.expected.shape]
    if not odd:
        return None
    why = f"pieces of {odd[0]} make no {list(s.expected.shape)} in rank order; a function "
    return "cut in an unknown way", why + "gather(name, tensor, mesh) in the file can join them"


def _rounding(s: Suspect) -> Cause | None:
    if not s.expected.any() or not s.are(s.expected, rtol=3e-6):
        return None
    why = "as float32 loses: somewhere numbers are cast; if they are meant to be, --rtol 1e-5 "
    return "rounding", why + "forgives it"


def _factor(s: Suspect) -> Cause | None:
    size = s.expected.square().sum().item()
    factor = (s.found[s.ranks[0]] * s.expected).sum().item() / size if size else math.nan
    if not s.are(factor * s.expected):
        return None

    def is_exactly(value: float) -> bool:
        return math.isclose(factor, value, rel_tol=max(1e-9, s.rtol))

    m = s.trial.microbatches
    if m > 1 and is_exactly(m):
        return "not divided by microbatches", f"{m} times too large: of {m} microbatches"
    for axis, n in s.axes():
        is_data = bool(set(axis.split(" x ")) & set(s.device.data))
        others = [f" or {other}" for other, size in s.axes() if size == n and other != axis]
        over = axis + "".join(others)
        if is_exactly(n) and is_data:
            return "summed, not averaged", f"exactly {n} times too large: summed over {over}"
        if is_exactly(n):
            why = f"exactly {n} times too large: once for each rank of {over}"
            return "counted on every rank", why
        if is_exactly(1 / n):
            verb = "averaged twice, or never summed," if is_data else "averaged where to be summed"
            return "divided once too often", f"exactly 1/{n}: {verb} over {over}"
    return ("zero", "detached, or never sent") if not factor else ("a factor", f"{factor:.9g} x")


def _pending(s: Suspect) -> Cause | None:
    """Ranks of an axis have summands of the right value."""
    for axis in s.sizes:
        how = "mean" if axis in s.device.data else "sum"
        together = join(s.found, s.sizes, {axis: how})
        if all(is_close(each, s.expected, s.rtol) for each in together):
            why = f"each rank of {axis} has a part, and their {how} is right: an all-reduce over "
            why += f"{axis} is missing, of this gradient itself"
            why += ", or of that of the input, where a later module is cut" * (s.wrong > 1)
            return "missing all-reduce", why
    return None


# ---------------------------------------------------------------------- initial weights
def _tie_lost(s: Suspect) -> Cause | None:
    for tie in s.device.ties:
        if s.name in tie and tie not in s.seen[s.ranks[0]].ties:
            return "tie lost", f"{' and '.join(tie)} are one on one device, and two here"
    return None


def _not_broadcast(s: Suspect) -> Cause | None:
    why = "drawn by build() on {}, under its own seed, and never made alike: broadcast, load a "
    why += "checkpoint, or seed build() (torch's fully_shard sends no weights)"
    own = [seen.built.get(s.name) for seen in s.seen]
    if any(t is None or t.shape != s.expected.shape for t in own):
        return None
    if s.are(own):
        return "never broadcast", why.format("that rank")
    for axis, dim, pieces in s.chunks():
        group = next(g for g in groups_along([axis], s.sizes) if s.ranks[0] in g)
        theirs = [own[r].chunk(len(group), dim)[i] for i, r in enumerate(group)]
        if all(is_close(a, b, s.rtol) for a, b in zip(pieces, theirs, strict=True)):
            return "never broadcast", why.format(f"each rank of {axis}")
    return None


def _pieces(s: Suspect) -> Cause | None:
    for axis, dim, pieces in s.chunks():
        right = list(s.expected.chunk(len(pieces), dim))
        if all(is_close(piece, pieces[0], s.rtol) for piece in pieces):
            if is_close(pieces[0], right[0], s.rtol):
                why = f"every rank of {axis} has taken the first piece of dim {dim}"
                return "first piece everywhere", why
            why = f"the pieces of all ranks of {axis} are equal, along dim {dim}: drawn under one "
            return "one seed", why + "seed, they never part; draw the whole, then cut"
        places = [[j for j, r in enumerate(right) if is_close(p, r, s.rtol)] for p in pieces]
        if all(len(place) == 1 for place in places):
            order = ", ".join(str(place[0]) for place in places)
            return "pieces in another order", f"the ranks of {axis} have {order} of dim {dim}"
    return None


# ---------------------------------------------------------------------- gradients
def _none(s: Suspect) -> Cause | None:
    if all(seen.gradients[s.step].get(s.name) is not None for seen in s.seen):
        return None
    return "no gradient", "None there: detached, frozen, or not used"


def _kept(s: Suspect) -> Cause | None:
    if s.step == 0:
        return None
    why = f"equal weights before step {s.step + 1}, and step 1 was equal: something stays from step"
    return "kept between steps", why + " to step (a buffer, a handle, an error fed back)"


def _shares(s: Suspect) -> Cause | None:
    """Solve for how often each share of each microbatch is in the gradient."""
    parts = [gradients.get(s.name) for shares in s.device.parts for _, gradients in shares]
    columns = [torch.zeros_like(s.expected) if p is None else p for p in parts]
    matrix = torch.stack([column.flatten() for column in columns], 1)  # [N, m n]
    if s.step > 0 or len(parts) == 1 or torch.linalg.matrix_rank(matrix) < len(parts):
        return None
    m, n, own = len(s.device.parts), len(s.device.parts[0]), s.ranks[0]
    mine = torch.arange(n) == s.share_of(own)

    def solve(tensor: Tensor) -> Tensor | None:
        vector = tensor.flatten()[:, None]
        solution = torch.linalg.lstsq(matrix, vector).solution
        fits = is_close(matrix @ solution, vector, max(1e-8, s.rtol))
        return solution.view(m, n) if fits else None

    def is_nothing(weights: Tensor) -> bool:
        return bool((weights.abs() < max(1e-7, 100 * s.rtol)).all())

    here, there = solve(s.found[own]), solve(s.expected)
    if here is None:
        return None
    told = f"rank {own} has {_times(here)}; one device has {_times(there)}"
    over = " x ".join(s.device.data)
    if n > 1 and is_nothing(here[:, ~mine]):
        divided = is_nothing(here[:, mine] - 1 / (m * n))
        name = "divided, but never summed" if divided else "not reduced"
        return name, f"its own share alone: there was no all-reduce over {over}. {told}"
    if m > 1 and is_nothing(here[:-1]):
        return "last microbatch only", f"what was accumulated before is lost. {told}"
    if m > 1 and n > 1 and is_nothing(here[:-1, ~mine]):
        return "accumulated gradients are not reduced", f"those before the last stay here. {told}"
    if is_nothing(here - 1 / (m * n)):
        why = "each share counts alike, whatever its tokens: divide by all tokens of the batch, or "
        return "mean of means", why + f"weigh each rank by its own. {told}"
    return "shares weighed wrongly", told


def _times(weights: Tensor | None) -> str:
    if weights is None:
        return "no sum of shares"
    rows = []
    for m, row in enumerate(weights.tolist()):
        of = f" of microbatch {m + 1}" * (len(weights) > 1)
        rows.append(" + ".join(f"{w:.4g} x share {i}" for i, w in enumerate(row)) + of)
    return ", ".join(rows)


# ---------------------------------------------------------------------- norm, weights
def _norms(s: Suspect) -> Cause | None:
    alone = {n: g for n, g in s.device.gradients[s.step].items() if g is not None}
    pieces = [seen.gradients[s.step] for seen in s.seen]
    own = [sum(g.square().sum() for g in p.values() if g is not None) ** 0.5 for p in pieces]
    if s.are(own):
        return "norm of own pieces", "each rank has the norm of what it has itself"
    whole = {n for n, g in alone.items() if all(p[n].shape == g.shape for p in pieces)}
    for axis, n in s.axes():
        for kind, names in (("replicated", whole), ("cut", alone.keys() - whole)):
            part = sum(alone[name].square().sum() for name in names)
            for factor, words in ((n, f"counted {n} times"), (0, "left out")):
                if names and s.are((s.expected.square() + (factor - 1) * part).sqrt(), 1e-9):
                    why = f"squares of parameters that are {kind} along {axis} are {words}"
                    return f"norm: {kind} parameters {words.split()[0]}", why
    return None


def _update(s: Suspect) -> Cause | None:
    if s.step > 0:
        why = f"step 1 was equal, and so are the gradients of step {s.step + 1}: it is what the "
        return "optimizer state", why + "optimizer keeps, or its schedule"
    if s.are(s.device.before[s.name]):
        why = "it did not move, though its gradient is right: make the optimizer of the parameters "
        return "not in the optimizer", why + "that parallelize() leaves behind"
    return "another update", "gradients and their norm are right; the optimizer does another step"


# ---------------------------------------------------------------------- outputs, and the loss
def _bias(s: Suspect) -> Cause | None:
    bias = s.device.before.get(f"{s.name}.bias")
    if bias is None or bias.shape != s.expected.shape[-1:]:
        return None
    for axis, n in s.axes():
        if s.are(s.expected + (n - 1) * bias):
            why = f"the bias is in the sum {n} times, once for each rank of {axis}: add it after"
            return "bias on every rank", why
        summed = join(s.found, s.sizes, {axis: "sum"}) if axis in s.sizes else s.found
        if all(is_close(together, s.expected + (n - 1) * bias, s.rtol) for together in summed):
            return "unfinished sum", f"each rank of {axis} has a part: no all-reduce over {axis}"
    return None


def _unfinished(s: Suspect) -> Cause | None:
    """Does what ran just before hold summands?"""
    names = list(s.device.outputs)
    at = names.index(s.name) if s.name in names else len(names)
    form = s.form_of(names[at - 1]) if at else None
    axis = next((axis for axis, how in (form or {}).items() if how == "sum"), None)
    if axis is None:
        return None
    why = f"{names[at - 1]}, which ran before, has a part on each rank of {axis}, and the sum of "
    return "unfinished sum", why + f"them is right: an all-reduce over {axis} is missing"


def _log(s: Suspect) -> Cause | None:
    for axis, n in s.axes():
        if s.are(s.expected + math.log(n)):
            why = f"too large by exactly log {n}: each word is in the softmax {n} times, once for "
            return "logits counted on every rank", why + f"each rank of {axis}"
    return None


_ANY: list[Callable[[Suspect], Cause | None]] = [_shape, _rounding]
SUSPICIONS = {
    "initial weights": [*_ANY, _tie_lost, _not_broadcast, _pieces, _factor],
    "output": [_shape, _bias, _unfinished, _rounding, _factor, _pending, _pieces],
    "loss": [_rounding, _log, _unfinished, _kept, _factor],
    "gradient": [_none, *_ANY, _tie_lost, _kept, _factor, _shares, _pending, _pieces],
    "gradient norm": [_rounding, _norms, _factor],
    "weights": [*_ANY, _tie_lost, _update],
}
