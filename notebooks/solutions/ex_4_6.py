"""Documents packed into rows, and dealt out so that attention is even work.

Attention over a document of n tokens costs n^2. So documents go to ranks by the squares of their
lengths, the heaviest first, each to the rank that has least; then each rank lays its own into rows,
the longest first, each into the first row with room. Within a row, attention ends at the border of
a document, positions start again, and no document predicts the first token of the next. A share of
the loss is divided by the targets of all ranks.
Source: Graham 1969; Johnson et al. 1974 (first-fit decreasing); Krell et al. 2021 (arXiv
2107.02027).
"""

import torch
import torch.nn.functional as F
from torch import nn

from minipar.lab import draw
from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.model.masks import document_mask, document_positions
from minipar.train.data import IGNORE

LEVEL, MINUTES = "hard", 40
GOOD = "losses and gradients as of each document alone, even squares of lengths, no row too many"
PRAISE = "No place wasted, no rank that waits, and not a number has changed."
SIZES = (4, 3)

DOCUMENTS, SEQ_LEN, VOCAB, WIDTH = 24, 24, 32, 8


class Reader(nn.Module):
    """One attention; positions are rows of a table, so that it matters where a document starts."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Parameter(0.5 * torch.randn(n, WIDTH, generator=random, dtype=torch.float64))
            for n in (VOCAB, SEQ_LEN)
        )

    def forward(self, x, positions, mask):
        """Tokens and positions [B, T], mask [B, 1, T, T] -> logits [B, T, VOCAB]."""
        h = self.tokens[x] + self.places[positions]
        h = h + F.scaled_dot_product_attention(h, h, h, attn_mask=mask[:, 0])
        return h @ self.tokens.T


def given(size, random):
    """The same for all ranks: a model, the documents, each [n + 1] for n targets, and T.

    Such that it matters: neither cards nor even tokens make squares even, and rows have gaps.
    """
    while True:
        shares = torch.rand(DOCUMENTS, generator=random)
        lengths = (2 + (SEQ_LEN - 1) * shares**1.5).long().tolist()
        best = _squares(lengths, _deal(lengths, size, 2))
        others = [_squares(lengths, owner) for owner in (_cards(size), _deal(lengths, size, 1))]
        rows = [_rows(lengths, mine) for mine in _deal(lengths, size, 2)]
        loose = [_rows(lengths, mine, last_only=True) for mine in _deal(lengths, size, 2)]
        gaps = any(len(row) < len(more) for row, more in zip(rows, loose, strict=True))
        if gaps and all(max(other) > 1.05 * max(best) for other in others):
            break
    documents = [torch.randint(VOCAB, (n + 1,), generator=random) for n in lengths]
    model = Reader(random)
    return [(model, documents, SEQ_LEN)] * size


def _cards(size):
    return [list(range(rank, DOCUMENTS, size)) for rank in range(size)]


def _deal(lengths, size, power):
    """The documents of each rank: heaviest first, each to the rank with the least so far."""
    ranks, loads = [[] for _ in range(size)], [0] * size
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = loads.index(min(loads))
        ranks[least].append(i)
        loads[least] += lengths[i] ** power
    return ranks


def _squares(lengths, owners):
    return [sum(lengths[i] ** 2 for i in mine) for mine in owners]


def _rows(lengths, mine, last_only=False):
    """First-fit decreasing: each document into the first row with room."""
    rows = []
    for i in sorted(mine, key=lambda i: -lengths[i]):
        fits = [r for r in rows if sum(lengths[j] for j in r) + lengths[i] <= SEQ_LEN]
        fits = [r for r in fits if r is rows[-1]] if last_only else fits
        if fits:
            fits[0].append(i)
        else:
            rows.append([i])
    return rows


def run(answer, axis, model, documents, seq_len):
    model.zero_grad()
    loss, rows = answer(model, [d.clone() for d in documents], seq_len, axis)
    loss.backward()
    rows = [[int(i) for i in row] for row in rows]
    return loss.detach(), rows, [p.grad for p in model.parameters()]


def _lengths(case: Case) -> list[int]:
    return [len(document) - 1 for document in case.given[0][1]]


def _owned(case: Case) -> list[list[int]]:
    return [[i for row in rows for i in row] for _, rows, _ in case.results]


def check_documents(case: Case) -> None:
    """Each on one rank, in one row that has room for it."""
    owned, lengths = _owned(case), _lengths(case)
    for i in range(DOCUMENTS):
        count = sum(mine.count(i) for mine in owned)
        if count != 1:
            raise CheckFailed(f"document {i} is in {count} rows of all ranks together; expected 1")
    for rank, (_, rows, _) in enumerate(case.results):
        for row in rows:
            if (used := sum(lengths[i] for i in row)) > SEQ_LEN:
                raise CheckFailed(f"rank {rank}: row {row} has {used} tokens; at most {SEQ_LEN}")


def check_balance(case: Case) -> None:
    lengths = _lengths(case)
    squares = _squares(lengths, _owned(case))
    best = max(_squares(lengths, _deal(lengths, case.size, 2)))
    if max(squares) > 1.02 * best:
        raise CheckFailed(
            f"the sums of n^2 of the ranks are {squares}: the largest is {max(squares)}, where "
            f"{best} is possible"
        )


def check_rows(case: Case) -> None:
    for rank, (_, rows, _) in enumerate(case.results):
        mine = [i for row in rows for i in row]
        best = len(_rows(_lengths(case), mine))
        if len(rows) > best:
            raise CheckFailed(
                f"rank {rank}: {len(rows)} rows, where {best} hold the same {len(mine)} documents"
            )


def _alone(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each document's part of the mean loss of all targets, alone; gradients of that mean."""
    model, documents, _ = case.given[0]
    model.zero_grad()
    parts = []
    for document in documents:
        n = len(document) - 1
        mask = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
        logits = model(document[None, :-1], torch.arange(n)[None], mask)
        parts.append(F.cross_entropy(logits[0], document[1:], reduction="sum"))
    parts = [part / sum(_lengths(case)) for part in parts]
    sum(parts).backward()
    return [part.detach() for part in parts], [p.grad for p in model.parameters()]


def check_loss(case: Case) -> None:
    parts, _ = _alone(case)
    for rank, (loss, mine) in enumerate(zip(case.results, _owned(case), strict=True)):
        expected = sum(parts[i] for i in mine)
        found = f"{loss[0].item():.6g}" if loss[0].shape == () else loss[0]
        if loss[0].shape != () or not torch.isclose(loss[0], expected, rtol=1e-9):
            raise CheckFailed(
                f"rank {rank}: expected a loss of {expected.item():.6g}, the sum over its targets "
                f"divided by the {sum(_lengths(case))} targets of all ranks; "
                f"got {found}"
            )


def check_gradients(case: Case) -> None:
    _, truth = _alone(case)
    total = [sum(grads) for grads in zip(*(g for _, _, g in case.results), strict=True)]
    summed = Case(1, case.given, [total], case.sent)
    summed.expect_close([truth], "the sum of the ranks' gradients (0 tokens, 1 places)")


def drawn(case: Case):
    lengths, stacks = _lengths(case), {}
    for rank, mine in enumerate(_cards(case.size)):
        stacks[f"dealt like cards, rank {rank}"] = sum(lengths[i] ** 2 for i in mine)
    for rank, mine in enumerate(_owned(case)):
        stacks[f"yours, rank {rank}"] = sum(lengths[i] ** 2 for i in mine)
    return draw.bars(
        stacks,
        title="Your shares: attention is even work",
        note=f"sum of n^2 over the documents of a rank; {DOCUMENTS} documents, computed",
    )


def _loss(model, documents, rows, seq_len):
    """The sum over the targets of packed rows."""
    x = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    y, ids = torch.full_like(x, IGNORE), torch.full_like(x, -1)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            places = slice(start, start + len(documents[i]) - 1)
            x[r, places], y[r, places], ids[r, places] = documents[i][:-1], documents[i][1:], i
            start = places.stop
    logits = model(x, document_positions(ids), document_mask(ids))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")


def solution(model, documents, seq_len, axis):
    lengths = [len(document) - 1 for document in documents]
    shares, loads = [[] for _ in range(axis.size)], [0] * axis.size
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += lengths[i] ** 2

    rows = []
    for i in shares[axis.rank]:  # the longest first, as they were dealt
        fits = (row for row in rows if sum(lengths[j] for j in row) + lengths[i] <= seq_len)
        if (row := next(fits, None)) is None:
            rows.append(row := [])
        row.append(i)

    x = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    y, ids = torch.full_like(x, IGNORE), torch.full_like(x, -1)  # padding is a document, too
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            end = start + lengths[i]
            x[r, start:end], y[r, start:end] = documents[i][:-1], documents[i][1:]
            ids[r, start:end], start = i, end
    logits = model(x, document_positions(ids), document_mask(ids))
    total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    return total / sum(lengths), rows


def _of_rows(model, documents, seq_len, rows):
    targets = sum(len(document) - 1 for document in documents)
    return _loss(model, documents, rows, seq_len) / targets, rows


def _my_rows(documents, axis):
    lengths = [len(document) - 1 for document in documents]
    return _rows(lengths, _deal(lengths, axis.size, 2)[axis.rank])


@fails(
    "documents",
    "Every rank computes all documents: each belongs to one rank.",
)
def wrong_everybody_does_everything(model, documents, seq_len, axis):
    rows = _rows([len(document) - 1 for document in documents], range(len(documents)))
    return _of_rows(model, documents, seq_len, rows)


@fails(
    "balance",
    "Dealt like cards: whoever gets the long documents keeps the others waiting.",
)
def wrong_like_cards(model, documents, seq_len, axis):
    lengths = [len(document) - 1 for document in documents]
    return _of_rows(model, documents, seq_len, _rows(lengths, _cards(axis.size)[axis.rank]))


@fails(
    "balance",
    "Tokens are even, their squares are not: attention costs n^2.",
)
def wrong_even_tokens(model, documents, seq_len, axis):
    lengths = [len(document) - 1 for document in documents]
    rows = _rows(lengths, _deal(lengths, axis.size, 1)[axis.rank])
    return _of_rows(model, documents, seq_len, rows)


@fails(
    "rows",
    "Rows have room left: look for it in all of them, not in the last one alone.",
)
def wrong_only_the_last_row(model, documents, seq_len, axis):
    lengths = [len(document) - 1 for document in documents]
    rows = _rows(lengths, _deal(lengths, axis.size, 2)[axis.rank], last_only=True)
    return _of_rows(model, documents, seq_len, rows)


@fails(
    "rows",
    "A row for each document: lay several into one.",
)
def wrong_a_row_each(model, documents, seq_len, axis):
    rows = [[i] for row in _my_rows(documents, axis) for i in row]
    return _of_rows(model, documents, seq_len, rows)


def _with(model, change):
    """The model, with something else in the place of its positions or its mask."""
    return lambda x, positions, mask: model(x, *change(x, positions, mask))


def _causal(x):
    return torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()


@fails(
    "loss",
    "Documents see their neighbours in the row: mask attention at their borders.",
)
def wrong_sees_neighbours(model, documents, seq_len, axis):
    model = _with(model, lambda x, positions, mask: (positions, _causal(x)))
    return _of_rows(model, documents, seq_len, _my_rows(documents, axis))


@fails(
    "loss",
    "Positions count along the row: they start at 0 with each document.",
)
def wrong_positions_run_on(model, documents, seq_len, axis):
    model = _with(model, lambda x, *rest: (torch.arange(x.shape[1]).expand_as(x), rest[1]))
    return _of_rows(model, documents, seq_len, _my_rows(documents, axis))


@fails(
    "loss",
    "Divided by this rank's targets: a token would weigh more where there are few.",
)
def wrong_mean_of_its_own(model, documents, seq_len, axis):
    rows = _my_rows(documents, axis)
    targets = sum(len(documents[i]) - 1 for row in rows for i in row)
    return _loss(model, documents, rows, seq_len) / targets, rows


@fails(
    "loss",
    "Padding is learnt, too: its targets are to be ignored.",
)
def wrong_learns_padding(model, documents, seq_len, axis):
    rows = _my_rows(documents, axis)
    targets, wasted = sum(len(document) - 1 for document in documents), 0
    for row in rows:
        room = seq_len - sum(len(documents[i]) - 1 for i in row)
        if room:
            x, n = torch.zeros(1, room, dtype=torch.int64), range(room)
            logits = model(x, torch.tensor([[*n]]), _causal(x))
            wasted = wasted + F.cross_entropy(logits[0], x[0], reduction="sum")
    return (_loss(model, documents, rows, seq_len) + wasted) / targets, rows


@fails(
    "gradients",
    "The loss is right, its gradient is lost: do not detach it, nor use no_grad.",
)
def wrong_cuts_the_graph(model, documents, seq_len, axis):
    loss, rows = _of_rows(model, documents, seq_len, _my_rows(documents, axis))
    return loss.detach() + 0 * sum(p.sum() for p in model.parameters()), rows


@fails(
    "loss",
    "The sum is not divided: divide it by the targets of all documents.",
)
def wrong_forgets_to_divide(model, documents, seq_len, axis):
    rows = _my_rows(documents, axis)
    return _loss(model, documents, rows, seq_len), rows


@fails(
    "loss",
    "Targets are not shifted: a token at d[i] predicts d[i + 1].",
)
def wrong_predicts_what_it_sees(model, documents, seq_len, axis):
    targets, rows = sum(len(d) - 1 for d in documents), _my_rows(documents, axis)
    total = 0
    for i in (i for row in rows for i in row):
        x = documents[i][None, :-1]
        logits = model(x, torch.arange(x.shape[1])[None], _causal(x))
        total = total + F.cross_entropy(logits[0], x[0], reduction="sum")
    return total / targets, rows
