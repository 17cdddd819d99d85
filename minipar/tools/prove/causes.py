"""Why it parts, from the numbers alone: a table of suspicions, each tested on the tensors.

Most of them solve one equation: with which factors do tensors that are known sum up to the tensor
that a rank has? A gradient is a sum over shares of the batch, and on one device all shares weigh
the same. A rank that never reduced has its own share once and the others not at all.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates, groups_along, rank_at
from minipar.tools.prove.compare import Form, forms, is_close, join
from minipar.tools.prove.job import DATA
from minipar.tools.prove.observe import Seen, Trial

Cause = tuple[str, str]  # what it is called, and what in the numbers speaks for it


@dataclass
class Suspect:
    """A trial on one device and on every rank of a mesh, and the first tensor that differs."""

    trial: Trial
    sizes: dict[str, int]
    device: Seen
    seen: list[Seen]  # by rank
    rtol: float

    stage: str = ""
    step: int = 0
    name: str = ""
    found: list[Tensor] = field(default_factory=list)  # by rank, whole
    expected: Tensor = field(default_factory=lambda: torch.zeros(()))
    ranks: list[int] = field(default_factory=list)  # those that are wrong
    wrong: int = 0  # how many names of this stage are

    def share_of(self, rank: int) -> int:
        """Return the number of the share of the batch that a rank has, in row-major order."""
        data = {axis: size for axis, size in self.sizes.items() if axis in self.device.data}
        return rank_at(coordinates(rank, self.sizes), data)

    def form_of(self, name: str) -> Form | None:
        """Return how ranks hold the output of a module; None where it is not one device's."""
        expected, pieces = self.device.outputs[name], [one.outputs.get(name) for one in self.seen]
        if any(piece is None for piece in pieces):
            return {}  # a module that is not run, or not there, on some rank
        for form, joined in forms(pieces, self.sizes, expected.shape, "sum"):
            if all(is_close(together, expected, self.rtol, 1e-13) for together in joined):
                return form
        return None

    def are(self, values: list[Tensor] | Tensor, rtol: float = 0.0) -> bool:
        """Return True if the wrong ranks have `values`: one tensor for all, or one per rank."""
        own = values if isinstance(values, list) else [values] * len(self.found)
        return all(is_close(self.found[r], own[r], max(rtol, self.rtol)) for r in self.ranks)

    def solve(self, *columns: Tensor) -> list[float] | None:
        """Return the factors with which `columns` sum up to what all wrong ranks have, if any."""
        factors = _solve(columns, self.found[self.ranks[0]], self.rtol)
        if factors is None:
            return None
        together = sum(f * column for f, column in zip(factors, columns, strict=True))
        return factors if self.are(together, 1e-8) else None

    def axes(self) -> Iterator[tuple[str, int]]:
        """Yield axes of several ranks, and all together."""
        several = {axis: size for axis, size in self.sizes.items() if size > 1}
        yield from several.items()
        if len(several) > 1:
            yield " x ".join(several), math.prod(several.values())

    def over_data(self, axes: str) -> bool:
        """Return True if ranks of one of the axes have samples of their own."""
        return any(a in self.device.data or a.startswith(DATA) for a in axes.split(" x "))

    def chunks(self) -> Iterator[tuple[str, int, list[Tensor]]]:
        """Yield axis, dim, and the first wrong rank's tensor, in a piece for each rank."""
        found = self.found[self.ranks[0]]
        # First the axes on which ranks share their samples: tensors are cut for these.
        for axis, size in sorted(self.sizes.items(), key=lambda item: self.over_data(item[0])):
            for dim in range(found.ndim if size > 1 else 0):
                if found.shape[dim] and found.shape[dim] % size == 0:
                    yield axis, dim, list(found.chunk(size, dim))


def cause_of(s: Suspect) -> Cause:
    """Return the first suspicion that the numbers bear out."""
    for suspicion in SUSPICIONS[s.stage]:
        # A rank may lack what a suspicion looks at, as another stage of a pipeline does.
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, RuntimeError):
            if (cause := suspicion(s)) is not None:
                return cause
    if len(s.ranks) < len(s.found):
        return "only some ranks", "the others are right"
    return "unknown", "all ranks are wrong, in no way that is known here"


def _solve(columns: Sequence[Tensor], tensor: Tensor, rtol: float) -> list[float] | None:
    """Return the factors with which `columns` sum up to a tensor; None if there are none, or many."""
    matrix, vector = torch.stack([c.flatten() for c in columns], 1), tensor.flatten()[:, None]
    if torch.linalg.matrix_rank(matrix) < len(columns):
        return None
    factors = torch.linalg.lstsq(matrix, vector).solution
    return (
        factors.flatten().tolist() if is_close(matrix @ factors, vector, max(1e-8, rtol)) else None
    )


# ---------------------------------------------------------------------- any tensor
def _rounding(s: Suspect) -> Cause | None:
    for dtype, rtol, forgives in (
        (torch.float32, 3e-6, "1e-5"),
        (torch.bfloat16, 3e-2, "0.05"),
        (torch.float16, 5e-3, "1e-2"),
    ):
        # What is far off is taken for rounded only where it has no more digits than that.
        has_few = all(t.to(dtype).to(t.dtype).equal(t) for t in (s.found[r] for r in s.ranks))
        if s.expected.any() and s.are(s.expected, rtol) and (has_few or dtype == torch.float32):
            why = f"as {str(dtype).removeprefix('torch.')} loses: somewhere numbers are cast; if "
            return "rounding", why + f"they are meant to be, --rtol {forgives} forgives it"
    return None


def _bias(s: Suspect) -> Tensor:
    """Return the bias that is added into an output; zeros where none is."""
    bias = s.device.before.get(f"{s.name}.bias") if s.stage == "output" else None
    has_bias = bias is not None and bias.shape == s.expected.shape[-1:]
    return bias.expand_as(s.expected) if has_bias else torch.zeros_like(s.expected)


def _factor(s: Suspect) -> Cause | None:
    """Solve for how often the right value is in it; of a linear layer, product and bias apart."""
    factors = s.solve(s.expected - _bias(s), _bias(s)) or s.solve(s.expected)
    if factors is None:
        return None
    factor, biases = factors[0], factors[-1]

    def is_exactly(value: float) -> bool:
        return math.isclose(factor, value, rel_tol=max(1e-9, s.rtol))

    m = s.trial.microbatches
    if m > 1 and is_exactly(m):
        return "not divided by microbatches", f"{m} times too large: of {m} microbatches"
    if m > 1 and is_exactly(1 / m):
        return "divided by microbatches twice", f"exactly 1/{m}, only where {m} are accumulated"
    for axis, n in s.axes():
        is_data, over = s.over_data(axis), " or ".join(a for a, size in s.axes() if size == n)
        if is_exactly(1) and math.isclose(biases, n):
            why = f"the bias is in the sum {n} times, once for each rank of {over}: add it after"
            return "bias on every rank", why
        if is_exactly(n) and is_data:
            return "summed, not averaged", f"exactly {n} times too large: summed over {over}"
        if is_exactly(n):
            why = f"exactly {n} times too large: once for each rank of {over}"
            return "counted on every rank", why
        if is_exactly(1 / n) and not is_data:
            return "averaged, not summed", f"exactly 1/{n}: averaged over {over}"
        if is_exactly(1 / n) and _is_sum(s):
            why = f"exactly 1/{n}: loss() of a batch is the sum of its shares' losses. Divide it, "
            return "a sum where a mean is meant", f"{why}as gradients are averaged over {over}"
        if is_exactly(1 / n):
            why = f"exactly 1/{n}: averaged twice, or never summed, over {over}"
            return "divided once too often", why
    if not s.expected.ndim or is_exactly(1):
        return None  # any number is some multiple of another
    if abs(factor) < 1e-12:
        return "zero", "detached, never sent, or sent a step late"
    return "a factor", f"{factor:.9g} x"


def _is_sum(s: Suspect) -> bool:
    """Return True if the losses of the shares of a batch add up to the loss of the batch."""
    losses = [loss for shares in s.device.parts for loss, _ in shares]
    together = s.device.losses[0] * len(s.device.parts)
    return len(losses) > 1 and math.isclose(sum(losses), together, rel_tol=1e-9)


def _summands(s: Suspect) -> Cause | None:
    """Return a missing all-reduce if ranks of an axis have summands of the right value."""
    for axis, n in s.sizes.items():
        how = "mean" if s.over_data(axis) else "sum"
        together, bias = join(s.found, s.sizes, {axis: how}), _bias(s)
        if all(is_close(each, s.expected + (n - 1) * bias, s.rtol) for each in together):
            if s.stage == "output":
                why = f"each rank of {axis} has a part: no all-reduce over {axis}"
                return "unfinished sum", why
            why = f"each rank of {axis} has a part, and their {how} is right: an all-reduce over "
            why += f"{axis} is missing, of this gradient itself"
            why += ", or of the input's gradient, where a later module is cut" * (s.wrong > 1)
            return "missing all-reduce", why
    return None


def _pieces(s: Suspect) -> Cause | None:
    for axis, dim, pieces in s.chunks():
        right = list(s.expected.chunk(len(pieces), dim))
        if all(is_close(piece, pieces[0], s.rtol) for piece in pieces):
            if is_close(pieces[0], right[0], s.rtol):
                why = f"every rank of {axis} has taken the first piece of dim {dim}"
                return "first piece everywhere", why
            if s.stage == "gradient":
                why = f"cut along dim {dim}, and yet equal on all ranks of {axis}: reduced over "
                return "pieces were mixed", why + "it, though each rank of it has rows of its own"
            why = f"the pieces of all ranks of {axis} are equal, along dim {dim}: drawn under one "
            return "one seed", why + "seed, they never part; draw the whole, then cut"
        places = [[j for j, r in enumerate(right) if is_close(p, r, s.rtol)] for p in pieces]
        if all(len(place) == 1 for place in places):
            order = ", ".join(str(place[0]) for place in places)
            return "pieces in another order", f"the ranks of {axis} have {order} of dim {dim}"
    return None


def _tie_lost(s: Suspect) -> Cause | None:
    for tie in s.device.ties:
        if s.name in tie and tie not in s.seen[s.ranks[0]].ties:
            return "tie lost", f"{' and '.join(tie)} are one on one device, and two here"
    return None


# ---------------------------------------------------------------------- initial weights
def _not_broadcast(s: Suspect) -> Cause | None:
    """Look for the numbers that build() drew on this rank, on another, or in pieces on all."""
    own = [seen.built[s.name] for seen in s.seen]
    drawn = {r: [q for q, t in enumerate(own) if is_close(s.found[r], t, s.rtol)] for r in s.ranks}
    who, where = "", ""
    if s.are(own):
        who = "that rank"
    elif all(drawn.values()):
        sources = sorted({ranks[0] for ranks in drawn.values()})
        places = [coordinates(rank, s.sizes) for rank in sources]
        apart = " x ".join(axis for axis in s.sizes if any(at[axis] for at in places))
        who, where = (
            f"rank {', '.join(map(str, sources))}",
            f"alike over some axes, never over {apart}: ",
        )
    for axis, dim, pieces in s.chunks() if not who else ():
        group = next(g for g in groups_along([axis], s.sizes) if s.ranks[0] in g)
        theirs = [own[r].chunk(len(group), dim)[i] for i, r in enumerate(group)]
        if all(is_close(a, b, s.rtol) for a, b in zip(pieces, theirs, strict=True)):
            who = f"each rank of {axis}"
    why = f"{where}drawn by build() on {who}, under its own seed, and never made alike: broadcast, "
    why += "load a checkpoint, or seed build() (torch's fully_shard sends no weights)"
    return ("never broadcast", why) if who else None


def _made_anew(s: Suspect) -> Cause | None:
    why = "no rank has the value of build(), nor a piece of it: drawn again after build(), loaded "
    return "made anew", why + "from elsewhere, or changed by parallelize()"


# ---------------------------------------------------------------------- gradients
def _microbatches(s: Suspect) -> Cause | None:
    if not s.trial.is_joined:
        return None
    why = "such samples in one batch were equal; here each microbatch counts alike. Divide by the "
    why += "tokens of the step; accumulate(model, batches) in the file can say how"
    return "microbatches weigh alike", why


def _none(s: Suspect) -> Cause | None:
    if all(seen.gradients[s.step].get(s.name) is not None for seen in s.seen):
        return None
    return "no gradient", "None there: detached, frozen, or not used"


def _kept(s: Suspect) -> Cause | None:
    if s.step == 0:
        return None
    before = s.device.gradients[s.step - 1].get(s.name) if s.stage == "gradient" else None
    if before is not None and s.are(before):
        why = f"exactly the gradient of step {s.step}: a bucket that is not filled anew, or sent "
        return "of the step before", why + "late"
    if s.stage == "gradient" and (missing := _summands(s)) is not None:
        return "not reduced any more", f"step 1 was equal. In step {s.step + 1} {missing[1]}"
    why = f"equal weights before step {s.step + 1}, and step 1 was equal: something stays from step"
    return "kept between steps", why + " to step (a buffer, a handle, an error fed back)"


def _shares(s: Suspect) -> Cause | None:
    """Solve for how often each share of each microbatch is in the gradient."""
    if s.step > 0:
        return None
    parts = [gradients.get(s.name) for shares in s.device.parts for _, gradients in shares]
    columns = [torch.zeros_like(s.expected) if p is None else p for p in parts]
    own, m, n = s.ranks[0], len(s.device.parts), len(s.device.parts[0])
    here, there = (_solve(columns, tensor, s.rtol) for tensor in (s.found[own], s.expected))
    if here is None or len(columns) == 1:
        return None
    if there is None:
        first = next((name for name in s.device.outputs if s.form_of(name) is None), None)
        where = f"{first} ({s.device.kinds[first]})" if first else "loss() or a module"
        why = f"no sum of the shares' gradients is one device's: {where} looks at several samples, "
        why += (
            "as BatchNorm, a contrastive or a balance loss does, and each rank sees its own alone"
        )
        return "samples see each other", why
    factors = torch.tensor(here, dtype=torch.float64).view(m, n)
    before, mine = factors[:-1], torch.arange(n) == s.share_of(own)

    def is_nothing(factors: Tensor) -> bool:
        return bool((factors.abs() < max(1e-7, 100 * s.rtol)).all())

    sent = [share for share in range(n) if is_nothing(factors[:, torch.arange(n) != share])]
    are_apart = len({s.share_of(rank) for rank in s.ranks}) > 1 and s.are(s.found[own])
    is_own, is_even = is_nothing(factors[:, ~mine]), is_nothing(factors - 1 / (m * n))
    again = is_nothing(before - n * factors[1:]) and is_nothing(factors[-1] - 1 / (m * n))
    alone = f"its own share alone: there was no all-reduce over {' x '.join(s.device.data)}"
    for holds, name, why in (
        (n > 1 and sent and are_apart, "broadcast, not reduced",
            f"all ranks have share {sent}'s gradient: sent by one rank, and not summed"),
        (n > 1 and is_own and is_nothing(factors[:, mine] - 1 / (m * n)),
            "divided, but never summed", alone),
        (n > 1 and is_own, "not reduced", alone),
        (m > 1 and is_nothing(before), "last microbatch only",
            "the gradients accumulated before are lost"),
        (m > 1 and is_nothing(before[:, ~mine]), "accumulated gradients are not reduced",
            "those before the last stay here"),
        (m > 1 and again, "accumulated gradients reduced again",
            "a sum over the ranks is summed again with the next microbatch"),
        (is_even, "mean of means", "each share counts alike, whatever its tokens: divide by all "
            "tokens of the batch, or weigh each rank by its own"),
        (True, "shares weighed wrongly",
            "as where each rank clips, or divides by a count of its own, before the sum"),
    ):  # fmt: skip
        if holds:
            return (
                name,
                f"{why}. rank {own} has {_times(here, m)}; one device has {_times(there, m)}",
            )
    return None


def _times(factors: list[float], m: int) -> str:
    rows, n = [], len(factors) // m
    for k in range(m):
        row = [f if abs(f) > 1e-9 else 0.0 for f in factors[k * n : (k + 1) * n]]
        of = f" of microbatch {k + 1}" * (m > 1)
        rows.append(" + ".join(f"{f:.4g} x share {i}" for i, f in enumerate(row)) + of)
    return ", ".join(rows)


# ---------------------------------------------------------------------- norm, weights, buffers
def _norms(s: Suspect) -> Cause | None:
    alone = {n: g for n, g in s.device.gradients[s.step].items() if g is not None}
    pieces = [seen.gradients[s.step] for seen in s.seen]
    own = [torch.tensor(seen.own_norms[s.step], dtype=torch.float64) for seen in s.seen]
    if s.are(own):
        return "norm of own pieces", "each rank has the norm of its own pieces"
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
    """Solve for how often the right step, and the weight itself, are in the weight."""
    before = (s.device.weights[s.step - 1] if s.step else s.device.before)[s.name]
    if len(s.ranks) < len(s.found) and s.are(before):
        why = "there it did not move, and elsewhere it did: what its owner has updated was not sent"
        return "updated on some ranks only", why
    if s.step > 0:
        why = f"step 1 was equal, and so are the gradients of step {s.step + 1}: it is what the "
        return "optimizer state", why + "optimizer keeps, or its schedule"
    if s.are(before):
        why = "it did not move, though its gradient is right: make the optimizer of the parameters "
        return "not in the optimizer", why + "that parallelize() leaves, and send what each updates"
    times, kept = s.solve(s.expected - before, before) or (math.nan, math.nan)
    if abs(kept - 1) < 1e-7:
        return "another learning rate", f"the step is {times:.6g} times as long as it should be"
    if abs(times - 1) < 1e-7:
        how = f"{abs(kept - 1):.3g} of itself {'less' if kept > 1 else 'more'}"
        return "another weight decay", f"it shrinks by {how}, a step"
    return "another update", "gradients and their norm are right; the optimizer does another step"


def _buffer(s: Suspect) -> Cause | None:
    why = "forward fills it on each rank, from the samples of that rank alone"
    for axis in s.sizes:
        if all(is_close(t, s.expected, s.rtol) for t in join(s.found, s.sizes, {axis: "mean"})):
            why += f"; the mean over {axis} is right"
    return "a buffer of own samples", why


# ---------------------------------------------------------------------- outputs, and the loss
def _ran_before(s: Suspect) -> Cause | None:
    """Look at how ranks hold what the module before returned: as summands, or in pieces?"""
    names = list(s.device.outputs)
    at = names.index(s.name) if s.stage == "output" else len(names)
    before, kind = names[at - 1] if at else "", s.device.kinds.get(s.name, "")
    for axis, how in (s.form_of(before) or {}).items():
        if how == "sum":
            why = f"{before}, which ran before, has a part on each rank of {axis}, and the sum of "
            return "unfinished sum", why + f"them is right: an all-reduce over {axis} is missing"
        if s.stage == "loss" or s.over_data(axis):
            continue
        why = (
            f"{before}, which ran before, is right, in pieces along dim {how} on ranks of {axis}: "
        )
        if _ROW_BY_ROW.search(kind):
            why += (
                f"a {kind} needs no more, so what is added in between is wrong. Do positions, or "
            )
            why += f"a mask, begin at 0 on every rank of {axis}?"
            return "positions, or another piece", why
        return "pieces kept apart", why + "this module needs the other ranks' pieces"
    return None


_ROW_BY_ROW = re.compile(r"(Layer|RMS)Norm|Linear|Dropout|LU$|Embedding|Identity")


def _inside(s: Suspect) -> Cause | None:
    """Blame the first wrong module: its input was right, unless it is the first of all."""
    own = {n: t for n, t in s.device.before.items() if n.startswith(f"{s.name}.")}
    found = [(seen.before.get(name), tensor) for seen in s.seen for name, tensor in own.items()]
    is_untouched = all(a is not None and a.shape == t.shape for a, t in found)
    if s.name == next(iter(s.device.outputs)) and is_untouched:
        why = "the first module that runs, and its weights are right: ranks have other samples "
        return "another input", why + "than their shares of the batch, or use them otherwise"
    why = "modules before it returned the right values, and weights are right: this module "
    return "in this module", why + "does, or what else it is given"


def _in_the_loss(s: Suspect) -> Cause | None:
    why = "what every module returned is right: it is loss() itself, as its targets, its "
    return "in the loss", why + "denominator, or a softmax over words that are cut"


SUSPICIONS: dict[str, list[Callable[[Suspect], Cause | None]]] = {
    "initial weights": [_rounding, _tie_lost, _not_broadcast, _pieces, _made_anew],
    "output": [_factor, _summands, _rounding, _pieces, _ran_before, _inside],
    "loss": [_microbatches, _rounding, _ran_before, _kept, _factor, _in_the_loss],
    "gradient": [
        _microbatches,
        _none,
        _rounding,
        _tie_lost,
        _kept,
        _factor,
        _shares,
        _summands,
        _pieces,
    ],
    "gradient norm": [_rounding, _norms, _factor],
    "weights": [_rounding, _tie_lost, _update],
    "buffer": [_rounding, _buffer],
}
