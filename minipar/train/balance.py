"""Even work for uneven ranks: microbatches by speed, and documents packed so that tokens are even.

A step lasts as long as its slowest rank computes. There are two causes, with a remedy for each.

**Ranks of different speed.** Each rank gets as many microbatches as fit its speed. The gradient
stays the same. It is a sum over tokens, divided by the number of tokens of *all* ranks, so any rank
may compute a token. A mean of the ranks' means would change (tests/law/test_tokens.py).

**Documents of different length.** With one document per row, rows are mostly padding, and a rank
with long documents has more to do. `pack` puts several documents into each row of T tokens. A mask
keeps them apart, and positions restart with each. Graham's rule: longest first, each into the
emptiest row. The fullest row then has at most 4/3 of the tokens of the best packing's fullest row.

Source. Graham 1969, "Bounds on Multiprocessing Timing Anomalies", section 5 (longest first). Krell
et al. 2021, "Efficient Sequence Packing without Cross-contamination" (arXiv 2107.02027).
"""

import heapq
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm.collectives import all_gather
from minipar.comm.hostcopy import look
from minipar.comm.mesh import Axis
from minipar.model.masks import document_mask, document_positions
from minipar.train.data import IGNORE, share


def imbalance(loads: Sequence[float]) -> float:
    """Return the largest load over the mean load, at least 1; loads that are all 0 give 1."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


# ---------------------------------------------------------------------- 1. microbatches by speed
def shares(speeds: Sequence[float], num_microbatches: int) -> list[int]:
    """Return how many of `num_microbatches` each rank should do, given microbatches per second.

    Each microbatch goes to the rank that would finish it first. No other shares finish earlier;
    rounded proportional shares can finish later. Every rank gets at least one microbatch, because
    the speed of an idle rank cannot be measured. Ties go to the lower rank.

    Raises `ValueError` for fewer microbatches than ranks.
    """
    if num_microbatches < len(speeds):
        raise ValueError(f"{num_microbatches} microbatches are too few for {len(speeds)} ranks")
    counts = [1] * len(speeds)
    soonest = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # when its second is done
    heapq.heapify(soonest)
    for _ in range(num_microbatches - len(speeds)):
        _, rank = soonest[0]
        counts[rank] += 1
        heapq.heapreplace(soonest, ((counts[rank] + 1) / speeds[rank], rank))
    return counts


class Balancer:
    """Shares of all ranks along `axis`, set anew every `every` steps by how fast each has been.

    Comms: one all-gather of 8 bytes per rank, every `every` steps. All ranks compute the same
    shares from the gathered speeds.
    """

    def __init__(self, axis: Axis, every: int) -> None:
        self.axis, self.every = axis, every
        self.speeds = [1.0] * axis.size  # microbatches per second; all equal until measured
        self._steps, self._microbatches, self._seconds = 0, 0, 0.0

    def shares(self, num_microbatches: int) -> list[int]:
        """Return how many of `num_microbatches` each rank should do."""
        return shares(self.speeds, num_microbatches)

    def update(self, num_microbatches: int, seconds: float, device: torch.device) -> None:
        """Note this rank's microbatches of a step, and the seconds for which it computed.

        Every `every`-th call is a collective.
        """
        self._steps += 1
        self._microbatches += num_microbatches
        self._seconds += seconds
        if self._steps < self.every:
            return
        speed = self._microbatches / max(self._seconds, 1e-9)
        own = torch.tensor([speed], dtype=torch.float64, device=device)
        self.speeds = look(all_gather(own, self.axis), on_meta=self.speeds)
        self._steps, self._microbatches, self._seconds = 0, 0, 0.0


# ---------------------------------------------------------------------- 2. documents into rows
def pack(lengths: Sequence[int], seq_len: int, multiple_of: int = 1) -> list[list[int]]:
    """Lay documents into rows of at most `seq_len` tokens, evenly; return the indices in each row.

    The number of rows is the smallest multiple of `multiple_of` (such as the number of ranks) with
    which Graham's rule finds room for all documents. Rows are ordered so that ``rows[r::n]`` is an
    even share for rank r of n = `multiple_of`. Raises `ValueError` for a length below 1 or above
    `seq_len`: cut long documents first.
    """
    for i, length in enumerate(lengths):
        if not 1 <= length <= seq_len:
            row = f"a row takes 1 to {seq_len}"
            raise ValueError(f"document {i} has {length} tokens, and {row}; cut it first")
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    num_rows = multiple_of * max(1, math.ceil(sum(lengths) / (seq_len * multiple_of)))
    while (rows := _lay_out(longest_first, lengths, seq_len, num_rows)) is None:
        num_rows += multiple_of
    # The rank with the fullest row of one round gets the emptiest row of the next.
    rows.sort(key=lambda row: -sum(lengths[i] for i in row))
    rounds = [rows[i : i + multiple_of] for i in range(0, num_rows, multiple_of)]
    return [row for i, cards in enumerate(rounds) for row in (cards[::-1] if i % 2 else cards)]


def _lay_out(
    order: Sequence[int], lengths: Sequence[int], seq_len: int, num_rows: int
) -> list[list[int]] | None:
    """Put each document into the emptiest of `num_rows` rows; return None if one has no room."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    emptiest = [(0, row) for row in range(num_rows)]
    for i in order:
        used, row = emptiest[0]
        if used + lengths[i] > seq_len:
            return None
        rows[row].append(i)
        heapq.heapreplace(emptiest, (used + lengths[i], row))
    return rows


def packed_batch(
    documents: Sequence[Tensor], rows: Sequence[Sequence[int]], seq_len: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (inputs, targets, positions, mask) of packed rows: a microbatch for `train_step`.

    `documents[i]` holds the tokens [n + 1] of a document of n targets; `rows` come from
    ``pack([len(d) - 1 for d in documents], seq_len)``. Targets are shifted before packing, so that
    no document predicts the first token of its neighbour. Inputs, targets, positions [B, T] int64,
    mask [B, 1, T, T] bool; the rest of a row is padding, a document of its own without targets.
    """
    inputs = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    document_ids = torch.full_like(inputs, -1)
    for row, members in enumerate(rows):
        start = 0
        for i in members:
            end = start + len(documents[i]) - 1
            inputs[row, start:end], targets[row, start:end] = documents[i][:-1], documents[i][1:]
            document_ids[row, start:end] = i
            start = end
    return inputs, targets, document_positions(document_ids), document_mask(document_ids)


def rank_loads(lengths: Sequence[int], rows: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the tokens of each rank, when rank r takes every `num_ranks`-th row from row r on."""
    tokens = torch.tensor([sum(lengths[i] for i in row) for row in rows], dtype=torch.int64)
    return [int(share(tokens, rank, num_ranks).sum()) for rank in range(num_ranks)]
