"""Why a training differs, from the numbers alone: a table of suspicions, each tested on tensors.

Most suspicions solve one equation: which factors make known tensors sum up to the tensor of a rank?
A gradient is a sum over shares of the batch; on one device all shares have the same factor. A rank
that never reduced has its own share once, and the others not at all.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates, rank_at
from minipar.tools.prove.compare import Form, forms, is_close
from minipar.tools.prove.job import DATA, WrongFile, is_among
from minipar.tools.prove.observe import Seen, Trial

Cause = tuple[str, str]  # its name, and the evidence for it in the numbers


@dataclass
class Parting:
    """A trial on one device and on every rank of a mesh, and the first difference."""

    trial: Trial
    sizes: dict[str, int]  # of axes with several ranks
    device: Seen
    seen: list[Seen]  # by rank
    rtol: float

    stage: str = ""  # initial weights, output, loss, gradient, gradient norm, weights, buffer
    step: int = 0
    name: str = ""  # of the parameter, or of the module
    module: str = ""
    found: list[Tensor] = field(default_factory=list)  # by rank, whole
    expected: Tensor = field(default_factory=lambda: torch.zeros(()))
    ranks: list[int] = field(default_factory=list)  # those that are wrong
    words: str = ""
    wrong: int = 0  # how many tensors differ at this stage
    modules: list[tuple[str, str]] = field(default_factory=list)
    """Names in order of execution, and "equal", "parts here", "differs", "no parameters" ..."""
    cause: Cause = ("", "")
    averaged: list[str] = field(default_factory=list)
    """Axes whose ranks have the same rows, where only the mean of the ranks' losses is right."""

    def share_of(self, rank: int) -> int:
        """Return the number of the share of the batch that a rank has, in row-major order."""
        data = {axis: size for axis, size in self.sizes.items() if axis in self.device.data}
        return rank_at(coordinates(rank, self.sizes), data)

    def form_of(self, name: str) -> Form | None:
        """Return how ranks hold the output of a module; None if no form gives one device's."""
        expected, pieces = self.device.outputs[name], [one.outputs.get(name) for one in self.seen]
        if any(piece is None for piece in pieces):
            return {}  # a module that is not run, or not there, on some rank
        for form, joined in forms(pieces, self.sizes, expected.shape, "sum"):
            right, dims = expected, [how for how in form.values() if isinstance(how, int)]
            for dim in dims * (not self.device.has_whole_batch):  # dealt in the file's own order
                right, *joined = (tensor.sort(dim).values for tensor in (right, *joined))
            if all(is_close(together, right, self.rtol, 1e-13) for together in joined):
                return form
        return None

    def are(self, value: Tensor, rtol: float = 0.0) -> bool:
        """True if all wrong ranks have `value`."""
        return all(is_close(self.found[r], value, max(rtol, self.rtol)) for r in self.ranks)

    def solve(self, *columns: Tensor) -> list[float] | None:
        """Return the factors with which `columns` sum up to what all wrong ranks have, if any."""
        factors = _solve(columns, self.found[self.ranks[0]], self.rtol)
        if factors is None or not self.are(torch.stack(columns, -1) @ factors, 1e-8):
            return None
        return factors.tolist()

    def bias(self) -> Tensor:
        """Return the bias that a module adds into its output; zeros where none is."""
        bias = self.device.before.get(f"{self.name}.bias") if self.stage == "output" else None
        has_bias = bias is not None and bias.shape == self.expected.shape[-1:]
        return bias.expand_as(self.expected) if has_bias else torch.zeros_like(self.expected)

    def over_data(self, axis: str) -> bool:
        """Return True if ranks of the axis have samples of their own."""
        return axis in self.device.data or is_among(axis, DATA)


def cause_of(s: Parting) -> Cause:
    """Return the first suspicion that the numbers confirm."""
    if s.trial.is_joined and s.stage in ("loss", "gradient"):
        why = "such samples in one batch were equal: divide by the tokens of a step"
        return "microbatches weigh alike", why
    for suspicion in SUSPICIONS[s.stage]:
        # A rank may lack what a suspicion looks at, as another stage of a pipeline does.
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, RuntimeError):
            if (cause := suspicion(s)) is not None:
                return cause
    if s.step > 0 and s.stage in ("loss", "gradient"):
        why = "something stays (a buffer, a handle, an error fed back), or begins (another branch)"
        return "kept between steps", f"all was equal until step {s.step + 1}: {why}"
    if s.averaged and s.stage == "gradient":
        why = f"only their mean over {' x '.join(s.averaged)} is right, not the loss of each rank"
        return "in the loss", why
    return OTHERWISE[s.stage]


def _solve(columns: Sequence[Tensor], tensor: Tensor, rtol: float) -> Tensor | None:
    """Return the factors with which columns sum up to a tensor; None if there are none, or many."""
    matrix, vector = torch.stack([c.flatten() for c in columns], 1), tensor.flatten()[:, None]
    if torch.linalg.matrix_rank(matrix) < len(columns):
        return None
    factors = torch.linalg.lstsq(matrix, vector).solution
    return factors.flatten() if is_close(matrix @ factors, vector, max(1e-8, rtol)) else None


# ---------------------------------------------------------------------- any tensor
def _rounding(s: Parting) -> Cause | None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rtol, name = 16 * torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
        # A large difference counts as rounding only if the tensor has no more digits than `dtype`.
        has_few = all(s.found[r].to(dtype).double().equal(s.found[r]) for r in s.ranks)
        if s.expected.any() and s.are(s.expected, rtol) and (has_few or dtype == torch.float32):
            return "rounding", f"as {name} loses; if it is meant, --rtol {rtol:.0e} forgives it"
    return None


def _unused(s: Parting) -> Cause | None:
    if s.device.gradients[s.step][s.name] is not None:
        return None
    if any(g.get(s.name) is not None for shares in s.device.parts for _, g in shares):
        why = "one device has it with the rows of one rank alone: a branch depends on the rows"
        return "a gradient that one device has not", why
    why = "None there: frozen, or not used. An optimizer leaves it alone; zeros decay, or move on"
    return "a gradient that one device has not", why


def _factor(s: Parting) -> Cause | None:
    """Solve for the factor of the right value; of a linear layer, for product and bias apart."""
    factors = s.solve(s.expected - s.bias(), s.bias()) or s.solve(s.expected)
    if factors is None:
        return None
    is_exactly = partial(math.isclose, rel_tol=max(1e-9, s.rtol))
    factor, biases = factors[0], factors[-1]
    m, known = s.trial.microbatches, dict[float, Cause]()
    if m > 1:
        known[m] = "not divided by microbatches", f"{m} times too large: of {m} microbatches"
        why = f"exactly 1/{m}, only where {m} are accumulated"
        known[1 / m] = "divided by microbatches twice", why
    losses = [loss for shares in s.device.parts for loss, _ in shares]
    is_sum = math.isclose(sum(losses), s.device.losses[0] * m, rel_tol=1e-9) and len(losses) > m
    holders = sum(one.gradients[s.step].get(s.name) is not None for one in s.seen)
    for axis, n in s.sizes.items():
        if s.stage == "gradient" and 0 < holders * n <= len(s.seen):
            continue  # one rank of the axis alone has it, as in a pipeline
        over = " or ".join(a for a, size in s.sizes.items() if size == n)
        if is_exactly(factor, 1) and is_exactly(biases, n):
            return "bias on every rank", f"the sum over {over} has it {n} times: add it after"
        more = "summed, not averaged" if s.over_data(axis) else "counted on every rank"
        less = "divided once too often"
        why = f"exactly 1/{n}: divided once more, by the ranks of {over} or {n} of something else"
        if is_sum:
            less = "a sum where a mean is meant"
            why = f"exactly 1/{n}: a batch's loss() is the sum of its shares' losses"
        known.setdefault(n, (more, f"exactly {n} times too large: summed over {over}"))
        known.setdefault(1 / n, (less, why))
    for value, cause in known.items():
        if is_exactly(factor, value):
            return cause
    if abs(factor) < 1e-12:
        name = "no gradient" if s.stage == "gradient" else "zero"
        return name, "None, or zero: detached, frozen, not used, or never sent"
    if s.expected.numel() > 1 and not is_exactly(factor, 1):  # one number is some multiple of any
        why = f"{factor:.9g} x: a loss scale, or a schedule's microbatches? Undo it after backward"
        return "a factor", why
    return None


def _summands(s: Parting) -> Cause | None:
    """Return a missing all-reduce if the sum or the mean of the ranks' tensors is right."""
    for form, joined in forms(s.found, s.sizes, s.expected.shape, "sum", "mean"):
        n = math.prod(s.sizes[axis] for axis, how in form.items() if how == "sum")
        right = s.expected + (n - 1) * s.bias()  # each rank has added it
        if all(is_close(each, right, s.rtol) for each in joined):
            over = " and the ".join(f"{how} over {axis}" for axis, how in form.items())
            name, why = "missing all-reduce", "none here, or of the gradient of a later module"
            if s.stage == "output":
                name, why = "unfinished sum", "sum up, then add the bias, if there is one"
            if s.stage == "buffer":
                name, why = "a buffer of own samples", "forward fills it from them"
            return name, f"each rank has a part, and the {over} is right: {why}"
    return None


def _pieces(s: Parting) -> Cause | None:
    """Compare the pieces of a rank's weight with the right weight, and with each build()'s."""
    found, built = s.found[s.ranks[0]], [one.built[s.name] for one in s.seen]
    axes = sorted(s.sizes, key=s.over_data)  # shared samples first
    for axis, dim in [("", 0), *itertools.product(axes, range(found.ndim))]:
        count = s.sizes[axis] if axis else 1
        pieces, right, *drawn = (t.chunk(count, dim) for t in (found, s.expected, *built))
        same = [[is_close(p, t[i], s.rtol) for t in drawn] for i, p in enumerate(pieces)]
        if all(any(row) for row in same):
            sources = ", ".join(map(str, sorted({row.index(True) for row in same})))
            why = f"drawn by build() on rank {sources}, under its own seed, and never made alike: "
            why += "broadcast, load a checkpoint, or seed build() (torch's fully_shard sends no "
            return "never broadcast", why + "weights)"
        places = [[j for j, r in enumerate(right) if is_close(p, r, s.rtol)] for p in pieces]
        if all(len(place) == 1 for place in places):
            order = ", ".join(str(place[0]) for place in places)
            return "pieces in another order", f"the ranks of {axis} have {order} of dim {dim}"
        alike = [all(is_close(t, some[0], s.rtol) for t in some) for some in (pieces, right)]
        if axis and alike == [True, False]:
            why = f"the ranks of {axis} drew equal pieces along dim {dim}; draw the whole, then cut"
            return "one seed", why
    return None


def _dealt(s: Parting) -> None:
    """Refuse a weight that has the right numbers in another order: the file may want this."""
    if all(s.found[r].flatten().sort()[0].equal(s.expected.flatten().sort()[0]) for r in s.ranks):
        why = "ranks hold its numbers in an order of their own. If that is meant, "
        why += "gather(name, tensor, mesh) in the file can restore it"
        raise WrongFile(f"initial weights {s.name} cannot be compared: {why}")


# ---------------------------------------------------------------------- gradients, and the loss
def _kept(s: Parting) -> Cause | None:
    before = s.device.gradients[s.step - 1].get(s.name) if s.step else None
    if before is not None and s.are(before):
        return "of the step before", f"a bucket of step {s.step} not filled anew, or sent late"
    return None


def _shares(s: Parting) -> Cause | None:
    """Solve for how often each share of each microbatch is in the gradient."""
    parts = [gradients.get(s.name) for shares in s.device.parts for _, gradients in shares]
    columns = [torch.zeros_like(s.expected) if p is None else p for p in parts]
    own, m, n = s.ranks[0], len(s.device.parts), len(s.device.parts[0])
    here, there = (_solve(columns, tensor, s.rtol) for tensor in (s.found[own], s.expected))
    is_any = s.expected.numel() < 2 * len(columns)  # any shares can be mixed to few numbers
    if s.step > 0 or here is None or len(columns) == 1 or is_any:
        return None
    if there is None:
        first = next((name for name in s.device.outputs if s.form_of(name) is None), None)
        kind = s.device.kinds.get(first)
        who = f"{first} ({kind}) or its caller" if first else "loss() or a module"
        why = f"{who} looks at several samples, and each rank sees its own alone: as BatchNorm, "
        return "samples see each other", why + "a contrastive or a balance loss"
    factors = here.view(m, n)
    others = torch.arange(n) != s.share_of(own)

    def is_nothing(factors: Tensor) -> bool:
        return bool((factors.abs() < max(1e-7, 100 * s.rtol)).all())

    is_same = len({s.share_of(rank) for rank in s.ranks}) > 1 and s.are(s.found[own])
    causes = {
        "not reduced": (n > 1 and is_nothing(factors[:, others]) and not is_same,
            f"its own share alone: there was no all-reduce over {' x '.join(s.device.data)}"),
        "microbatches are reduced differently": (not is_nothing(factors - factors[:1]),
            "some are lost, or stay here, or are reduced again with the next"),
        "mean of means": (is_nothing(factors - 1 / (m * n)),
            "each share counts alike, whatever its tokens: divide by all tokens of the batch, or "
            "weigh each rank by its own"),
        "shares weighed wrongly": (True,
            "as where a rank gives nothing, a group is too small, or something is scaled too soon"),
    }  # fmt: skip
    name = next(name for name, (holds, _) in causes.items() if holds)
    told = f"rank {own} has {_times(factors)}; one device has {_times(there.view(m, n))}"
    return name, f"{causes[name][1]}. {told}"


def _times(factors: Tensor) -> str:
    rows = []
    for m, row in enumerate(factors.tolist()):
        terms = [f"{f:.4g} x share {i}" for i, f in enumerate(row) if abs(f) > 1e-9]
        of = f" of microbatch {m + 1}" * (len(factors) > 1)
        rows.append((" + ".join(terms) or "nothing") + of)
    return ", ".join(rows)


# ---------------------------------------------------------------------- norm, weights, buffers
def _norms(s: Parting) -> Cause | None:
    own = [(s.found[rank].item(), s.seen[rank].own_norms[s.step]) for rank in s.ranks]
    is_own = all(math.isclose(norm, theirs, rel_tol=s.rtol) for norm, theirs in own)
    return ("norm of own pieces", "as each rank finds it alone") if is_own else None


def _update(s: Parting) -> Cause | None:
    """Solve for how often the right step, and the weight itself, are in the first step's weight."""
    before = s.device.before[s.name]
    if s.step == 0 and s.are(before):
        why = "it did not move: it has no gradient there, or its owner has not sent it, or the "
        return "not in the optimizer", why + "optimizer has not the parameters of parallelize()"
    if s.step > 0 or not s.device.gradients[0]:
        return None
    times, kept = s.solve(s.expected - before, before) or (math.nan, math.nan)
    if abs(kept - 1) < 1e-7:
        return "another learning rate", f"the step is {times:.6g} times as long as it should be"
    if abs(times - 1) < 1e-7:
        how = f"{abs(kept - 1):.3g} of itself {'less' if kept > 1 else 'more'}"
        return "another weight decay", f"it shrinks by {how}, a step"
    return None


# ---------------------------------------------------------------------- outputs
def _ran_before(s: Parting) -> Cause | None:
    """Look at how ranks hold what the module before returned: as summands, or in pieces?"""
    names = list(s.device.outputs)
    at = names.index(s.name) if s.stage == "output" else len(names)
    if at == 0:
        return None
    before = names[at - 1]
    for axis, how in (s.form_of(before) or {}).items():
        if how == "sum":
            why = f"{before}, which ran before, is a part on each rank of {axis}: no all-reduce"
            return "unfinished sum", why
        if s.stage == "output" and not s.over_data(axis):
            why = f"{before}, which ran before, is right, in pieces along dim {how} over {axis}. "
            why += "Do positions, or a mask, begin at 0 on every rank? Does this module need the "
            why += "other ranks' pieces? Are q, k and v, or gate and up, in one weight?"
            return "positions, a mask, or another piece", why
    return None


SUSPICIONS: dict[str, list[Callable[[Parting], Cause | None]]] = {
    "initial weights": [_rounding, _pieces, _dealt],
    "output": [_factor, _summands, _rounding, _ran_before],
    "loss": [_rounding, _ran_before, _factor],
    "gradient": [_rounding, _unused, _factor, _kept, _shares, _summands],
    "gradient norm": [_rounding, _norms, _factor],
    "weights": [_update, _rounding],
    "buffer": [_rounding, _summands, _factor],
}
OTHERWISE: dict[str, Cause] = {
    "initial weights": ("made anew", "no rank has what build() made: drawn again, or loaded"),
    "output": ("in this module", "all before it is right. Has it its rows? Random, or in eval()?"),
    "loss": ("in the loss", "all modules are right: loss() or accumulate(), as a mean of means, of "
        "cut words, or divided by another number"),
    "gradient": ("unknown", "forward is right: does a collective lack its backward, is something "
        "detached, a tie lost, a rank not weighed by its tokens, or a piece mixed with others?"),
    "gradient norm": ("another norm", "equal gradients: which squares are added up, how often?"),
    "weights": ("another update", "clip() or step() does, or remembers, something else"),
    "buffer": ("another buffer", "forward or step() fills it otherwise than on one device"),
}  # fmt: skip
