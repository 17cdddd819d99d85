"""Why it parts, from the numbers alone: a table of suspicions, each tested on the tensors.

The strongest of them: a gradient is a sum over shares of the batch, so the gradient that a rank
ended with is solved for how often each share is in it. On one device all weigh the same; a rank
that never reduced has its own share once and the others not at all.
"""

import contextlib
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from minipar.comm.mesh import coordinates, groups_along
from minipar.tools.prove.compare import Form, is_close, join
from minipar.tools.prove.suspect import Suspect

Cause = tuple[str, str]  # what it is called, and what in the numbers speaks for it


def cause_of(suspect: Suspect) -> Cause:
    """Return the first suspicion that the numbers bear out."""
    for suspicion in SUSPICIONS[suspect.stage]:
        # A rank may lack what a suspicion looks at, as another stage of a pipeline does.
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, RuntimeError):
            if (cause := suspicion(suspect)) is not None:
                return cause
    if len(suspect.ranks) < len(suspect.found):
        return "only some ranks", "the others are right"
    return "unknown", "all ranks are wrong, in no way that is known here"


# ---------------------------------------------------------------------- any tensor
def _rounding(s: Suspect) -> Cause | None:
    for dtype, rtol, forgives in _ROUNDED:
        # What is far off is taken for rounded only where it has no more digits than that.
        has_few = all(t.to(dtype).to(t.dtype).equal(t) for t in (s.found[r] for r in s.ranks))
        if s.expected.any() and s.are(s.expected, rtol) and (has_few or dtype == torch.float32):
            why = f"as {str(dtype).removeprefix('torch.')} loses: somewhere numbers are cast; if "
            return "rounding", why + f"they are meant to be, --rtol {forgives} forgives it"
    return None


_ROUNDED = (
    (torch.float32, 3e-6, "1e-5"),
    (torch.bfloat16, 3e-2, "0.05"),
    (torch.float16, 5e-3, "1e-2"),
)


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
    if m > 1 and is_exactly(1 / m):
        return "divided by microbatches twice", f"exactly 1/{m}, only where {m} are accumulated"
    for axis, n in s.axes():
        is_data = s.over_data(*axis.split(" x "))
        others = [f" or {other}" for other, size in s.axes() if size == n and other != axis]
        over = axis + "".join(others)
        if is_exactly(n) and is_data:
            return "summed, not averaged", f"exactly {n} times too large: summed over {over}"
        if is_exactly(n):
            why = f"exactly {n} times too large: once for each rank of {over}"
            return "counted on every rank", why
        if is_exactly(1 / n) and is_data and _is_sum(s):
            why = (
                f"exactly 1/{n}: loss() of a batch is the sum of its shares' losses. Divide it, as "
            )
            return "a sum where a mean is meant", why + f"gradients are averaged over {over}"
        if is_exactly(1 / n):
            verb = "averaged twice, or never summed," if is_data else "averaged where to be summed"
            return "divided once too often", f"exactly 1/{n}: {verb} over {over}"
    if not s.expected.ndim:
        return None  # any number is some multiple of another
    if not factor:
        return "zero", "detached, never sent, or sent a step late"
    return "a factor", f"{factor:.9g} x"


def _is_sum(s: Suspect) -> bool:
    """Return True if the losses of the shares of a batch add up to the loss of the batch."""
    losses = [loss for shares in s.device.parts for loss, _ in shares]
    together = s.device.losses[0] * len(s.device.parts)
    return len(losses) > 1 and math.isclose(sum(losses), together, rel_tol=1e-9)


def _pending(s: Suspect) -> Cause | None:
    """Return a missing all-reduce if ranks of an axis have summands of the right value."""
    for axis in s.sizes:
        how = "mean" if s.over_data(axis) else "sum"
        together = join(s.found, s.sizes, {axis: how})
        if all(is_close(each, s.expected, s.rtol) for each in together):
            why = f"each rank of {axis} has a part, and their {how} is right: an all-reduce over "
            why += f"{axis} is missing, of this gradient itself"
            why += ", or of the input's gradient, where a later module is cut" * (s.wrong > 1)
            return "missing all-reduce", why
    return None


# ---------------------------------------------------------------------- initial weights
def _made_anew(s: Suspect) -> Cause | None:
    why = "no rank has the value of build(), nor a piece of it: drawn again after build(), loaded "
    return "made anew", why + "from elsewhere, or changed by parallelize()"


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
    drawn = {r: [q for q, t in enumerate(own) if is_close(s.found[r], t, s.rtol)] for r in s.ranks}
    if all(drawn.values()):
        sources = sorted({ranks[0] for ranks in drawn.values()})
        places = [coordinates(rank, s.sizes) for rank in sources]
        apart = " x ".join(axis for axis in s.sizes if any(at[axis] for at in places))
        who = "rank " + ", ".join(map(str, sources))
        return "never broadcast", f"alike over some axes, never over {apart}: " + why.format(who)
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


# ---------------------------------------------------------------------- gradients
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
    if s.stage == "gradient" and (missing := _pending(s)) is not None:
        return "not reduced any more", f"step 1 was equal. In step {s.step + 1} {missing[1]}"
    why = f"equal weights before step {s.step + 1}, and step 1 was equal: something stays from step"
    return "kept between steps", why + " to step (a buffer, a handle, an error fed back)"


def _microbatches(s: Suspect) -> Cause | None:
    if not s.trial.is_joined:
        return None
    why = "such samples in one batch were equal; here each microbatch counts alike. Divide by the "
    why += "tokens of the step; accumulate(model, batches) in the file can say how"
    return "microbatches weigh alike", why


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
    if there is None and n > 1:
        first = next((name for name in s.device.outputs if s.form_of(name) is None), None)
        where = f"{first} ({s.device.kinds[first]})" if first else "loss() or a module"
        why = f"no sum of the shares' gradients is one device's: {where} looks at several samples, "
        why += (
            "as BatchNorm, a contrastive or a balance loss does, and each rank sees its own alone"
        )
        return "samples see each other", why
    told = f"rank {own} has {_times(here)}; one device has {_times(there)}"
    for share in range(n if n > 1 and len({s.share_of(r) for r in s.ranks}) > 1 else 0):
        if all(s.are(s.found[own]) and is_nothing(row[torch.arange(n) != share]) for row in here):
            why = f"all ranks have share {share}'s gradient: sent by one rank, and not summed. "
            return "broadcast, not reduced", why + told
    over = " x ".join(s.device.data)
    if n > 1 and is_nothing(here[:, ~mine]):
        divided = is_nothing(here[:, mine] - 1 / (m * n))
        name = "divided, but never summed" if divided else "not reduced"
        return name, f"its own share alone: there was no all-reduce over {over}. {told}"
    if m > 1 and is_nothing(here[:-1]):
        return "last microbatch only", f"the gradients accumulated before are lost. {told}"
    if m > 1 and n > 1 and is_nothing(here[:-1, ~mine]):
        return "accumulated gradients are not reduced", f"those before the last stay here. {told}"
    if m > 1 and is_nothing(here[:-1] - n * here[1:]) and is_nothing(here[-1] - 1 / (m * n)):
        why = "a sum over the ranks is summed again with the next microbatch. "
        return "accumulated gradients reduced again", why + told
    if is_nothing(here - 1 / (m * n)):
        why = "each share counts alike, whatever its tokens: divide by all tokens of the batch, or "
        return "mean of means", why + f"weigh each rank by its own. {told}"
    why = "as where each rank clips, or divides by a count of its own, before the sum. "
    return "shares weighed wrongly", why + told


def _times(weights: Tensor | None) -> str:
    if weights is None:
        return "no sum of shares"
    rows = []
    for m, row in enumerate(weights.tolist()):
        of = f" of microbatch {m + 1}" * (len(weights) > 1)
        row = [w if abs(w) > 1e-9 else 0.0 for w in row]
        rows.append(" + ".join(f"{w:.4g} x share {i}" for i, w in enumerate(row)) + of)
    return ", ".join(rows)


# ---------------------------------------------------------------------- norm, weights
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
    # How much of the right step, and of the weight itself?
    times, decay = _solve([s.expected - before, before], s.found[s.ranks[0]] - before) or (0, 0)
    if times and s.are(before + times * (s.expected - before) + decay * before, 1e-7):
        if abs(decay) < 1e-7:
            return "another learning rate", f"the step is {times:.6g} times as long as it should be"
        if abs(times - 1) < 1e-7:
            more = "less" if decay > 0 else "more"
            why = f"it shrinks by {abs(decay):.3g} of itself {more}, a step"
            return "another weight decay", why
    return "another update", "gradients and their norm are right; the optimizer does another step"


def _solve(columns: list[Tensor], vector: Tensor) -> list[float] | None:
    """Return factors of the columns that sum up to the vector; None if they are dependent."""
    matrix = torch.stack([column.flatten() for column in columns], 1)
    if torch.linalg.matrix_rank(matrix) < len(columns):
        return None
    return torch.linalg.lstsq(matrix, vector.flatten()[:, None]).solution.flatten().tolist()


# ---------------------------------------------------------------------- outputs, and the loss
def _bias(s: Suspect) -> Cause | None:
    """Solve for how often the product and the bias are in the output."""
    bias = s.device.before.get(f"{s.name}.bias")
    if bias is None or bias.shape != s.expected.shape[-1:]:
        return None
    bias = bias.expand_as(s.expected)
    for axis, n in s.axes():
        products, biases = _solve([s.expected - bias, bias], s.found[s.ranks[0]]) or (0, 0)
        if s.are(products * (s.expected - bias) + biases * bias):
            if math.isclose(products, 1) and math.isclose(biases, n):
                why = f"the bias is in the sum {n} times, once for each rank of {axis}: "
                return "bias on every rank", why + "add it after"
            if math.isclose(products, 1 / n):
                why = f"the product is exactly 1/{n}: averaged over {axis}, where it is to be "
                return "averaged, not summed", why + "summed"
            if math.isclose(products, n):
                return "summed twice", f"the product is {n} times too large, once more over {axis}"
        summed = join(s.found, s.sizes, {axis: "sum"}) if axis in s.sizes else s.found
        if all(is_close(together, s.expected + (n - 1) * bias, s.rtol) for together in summed):
            return "unfinished sum", f"each rank of {axis} has a part: no all-reduce over {axis}"
    return None


def _ran_before(s: Suspect) -> tuple[str, Form]:
    """Return the module that ran just before, and how ranks hold its output."""
    names = list(s.device.outputs)
    at = names.index(s.name) if s.name in names else len(names)
    return (names[at - 1], s.form_of(names[at - 1]) or {}) if at else ("", {})


def _unfinished(s: Suspect) -> Cause | None:
    """Return an unfinished sum if the module that ran just before holds summands."""
    name, form = _ran_before(s)
    axis = next((axis for axis, how in form.items() if how == "sum"), None)
    if axis is None:
        return None
    why = f"{name}, which ran before, has a part on each rank of {axis}, and the sum of "
    return "unfinished sum", why + f"them is right: an all-reduce over {axis} is missing"


def _kept_apart(s: Suspect) -> Cause | None:
    """Return a cause if the output of the module before is right, in pieces."""
    name, form = _ran_before(s)
    axis = next((axis for axis, how in form.items() if isinstance(how, int)), None)
    if axis is None or s.over_data(axis):
        return None
    dim, kind = form[axis], s.device.kinds.get(s.name, "")
    why = f"{name}, which ran before, is right, in pieces along dim {dim} on ranks of {axis}: "
    if _ROW_BY_ROW.search(kind):
        why += f"a {kind} needs no more, so what is added in between is wrong. Do positions, or a "
        return "positions, or another piece", why + f"mask, begin at 0 on every rank of {axis}?"
    return "pieces kept apart", why + "this module needs the other ranks' pieces"


_ROW_BY_ROW = re.compile(
    r"^(Layer|RMS)Norm|RMSNorm$|LayerNorm$|Linear|Dropout|LU$|Embedding|Identity"
)


def _buffer(s: Suspect) -> Cause | None:
    why = "forward fills it on each rank, from the samples of that rank alone"
    for axis in s.sizes:
        if all(is_close(t, s.expected, s.rtol) for t in join(s.found, s.sizes, {axis: "mean"})):
            why += f"; the mean over {axis} is right"
    return "a buffer of own samples", why


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
    if s.step > 0:
        return None
    why = "what every module returned is right: it is loss() itself, as its targets, its "
    return "in the loss", why + "denominator, or a softmax over words that are cut"


SUSPICIONS: dict[str, list[Callable[[Suspect], Cause | None]]] = {
    "initial weights": [_rounding, _tie_lost, _not_broadcast, _pieces, _factor, _made_anew],
    "output": [_bias, _unfinished, _rounding, _factor, _pending, _pieces, _kept_apart, _inside],
    "loss": [_microbatches, _rounding, _unfinished, _kept, _factor, _in_the_loss],
    "gradient": [
        _microbatches,
        _none,
        _rounding,
        _tie_lost,
        _kept,
        _factor,
        _shares,
        _pending,
        _pieces,
    ],
    "gradient norm": [_rounding, _norms, _factor],
    "weights": [_rounding, _tie_lost, _update],
    "buffer": [_rounding, _buffer],
}
