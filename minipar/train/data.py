"""From a long text to this rank's share of every batch: sequences and distributed sampling.

    sequences = Sequences(corpus.train, seq_len=256)             # sample i: inputs [T], targets [T]
    batches = Batches(sequences, 32, mesh.dp.rank, mesh.dp.size, seed=0, microbatches=2)
    for microbatches in batches.forever():                       # list of (inputs, targets) [B, T]

Tests hold three promises. A target token is seen exactly once per epoch, on any number of ranks.
All ranks take the same number of steps, with tensors of the same shape: rows of `IGNORE` targets
fill up the last batch of an epoch. They add nothing to a loss that is divided by the number of
valid targets. A run that stopped after any step goes on exactly where it was, also on another
number of ranks.

In torch: `torch.utils.data.distributed.DistributedSampler`, which repeats or drops samples to make
the ranks even.
"""

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.model.llama import IGNORE_INDEX as IGNORE


class Sequences:
    """A long text cut into samples of T tokens and their targets, the tokens that come next.

    Sample i is inputs [T] = tokens[iT : iT + T] and targets [T] = tokens[iT + 1 : iT + T + 1], both
    int64. Each token but the first is a target exactly once. The targets are shifted *here*,
    before anything splits a sequence: the last target of a piece is the first input of the next
    piece, which another rank holds. The last sample is filled up with inputs 0 and targets
    `IGNORE`. Raises `ValueError` when seq_len is below 1 or longer than the text allows.
    """

    def __init__(self, tokens: Tensor, seq_len: int, name: str = "a text") -> None:
        if not 1 <= seq_len < len(tokens):  # the last token is only a target
            asked = f"seq_len={seq_len} does not fit {name} of {len(tokens):,} tokens"
            raise ValueError(f"{asked}; use 1 to {len(tokens) - 1:,}")
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1]
        num_valid = len(window) - 1
        inputs = torch.zeros(self.seq_len, dtype=torch.int64)
        targets = torch.full((self.seq_len,), IGNORE, dtype=torch.int64)
        inputs[:num_valid] = window[:-1]
        targets[:num_valid] = window[1:]
        return inputs, targets

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any token."""
        return hashlib.sha256(self.tokens.contiguous().numpy()).hexdigest()[:16]


def check_same(source: str, texts: Mapping[str, Sequences], axis: Axis) -> None:
    """Raise `ValueError` on all ranks of `axis` where some have another text than rank 0.

    `texts` are parts of `source` by name. A collective.
    """
    own = {part: text.fingerprint for part, text in texts.items()}
    (first, theirs), *others = all_gather_object((platform.node(), own), axis)
    for part in texts:
        hosts = dict.fromkeys(host for host, prints in others if prints[part] != theirs[part])
        if hosts:
            where = f"on {', '.join([*hosts][:8])} differs from the text of rank 0 on {first}"
            raise ValueError(f"the {part} text of {source} {where}; copy the files from there")


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in one epoch: a permutation from (seed, epoch) alone.

    Every rank computes the same order by itself, so ranks agree without a message.
    """
    # A hash, not seed + epoch: the second epoch of seed 0 must not be the first of seed 1.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_samples, generator=generator)


def share(indices: Tensor, rank: int, size: int) -> Tensor:
    """Return the indices of a rank: every `size`-th one, from number `rank` on."""
    return indices[rank::size]


class Batches:
    """This rank's share of each global batch: a list of microbatches (inputs, targets), [B, T].

    A global batch is the next `batch_size` samples of the epoch's order, the same for any number of
    ranks. Its samples go to the microbatches of all ranks in turn (`share`), so B is
    ceil(batch_size / (size * microbatches)). Where samples run out, rows of `IGNORE` targets take
    their place. The place in the epoch is counted in samples.

    `for microbatches in batches` ends with the epoch; the next `for` is the next epoch. Training
    for a number of steps reads `batches.forever()`. Raises `ValueError` for a count below 1 and for
    a rank outside of 0..size-1.
    """

    def __init__(
        self,
        sequences: Sequences,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        *,
        seed: int = 0,
        microbatches: int = 1,
    ) -> None:
        if min(batch_size, size, microbatches) < 1 or not 0 <= rank < size:
            given = f"batch_size={batch_size}, {microbatches=}, {rank=}, {size=}"
            raise ValueError(f"{given}: use counts of 1 or more, and a rank below size")
        self.sequences, self.batch_size = sequences, batch_size
        self.rank, self.size = rank, size
        self.seed = seed
        self.shares = [microbatches] * size  # microbatches of each rank
        self.epoch = 0
        self.position = 0  # samples of this epoch that were handed out, over all ranks

    def __len__(self) -> int:
        """Return the steps of a whole epoch, the same on every rank."""
        return -(-len(self.sequences) // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        num_samples, epoch = len(self.sequences), self.epoch
        order = epoch_order(num_samples, self.seed, epoch)
        while self.epoch == epoch:
            batch = order[self.position : self.position + self.batch_size]
            # Count before the yield: a state saved during the step does not repeat the step.
            self.position += len(batch)
            if self.position == num_samples:
                self.epoch, self.position = epoch + 1, 0
            turns = self._turns()
            mine = [turn for turn, rank in enumerate(turns) if rank == self.rank]
            yield [self._rows(share(batch, turn, len(turns))) for turn in mine]

    def deal(self, batch_size: int, shares: Sequence[int]) -> None:
        """Give rank r ``shares[r]`` microbatches of `batch_size` samples, from the next batch on.

        All ranks call this with the same values. A share of 0 gives an empty list. All microbatches
        have one shape, B = ceil(batch_size / sum(shares)).
        """
        self.batch_size, self.shares = batch_size, list(shares)

    def _turns(self) -> list[int]:
        """Return the rank of each microbatch of a global batch: ranks take turns."""
        rounds = range(max(self.shares))
        return [rank for m in rounds for rank in range(self.size) if m < self.shares[rank]]

    def forever(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield one epoch after another, from wherever this object stands."""
        while True:
            yield from self

    def _rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = -(-self.batch_size // sum(self.shares))
        inputs = torch.zeros(num_rows, self.sequences.seq_len, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORE)
        for row, index in enumerate(indices.tolist()):
            inputs[row], targets[row] = self.sequences[index]
        return inputs, targets

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, in samples over all ranks: the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "seq_len": self.sequences.seq_len,
            "fingerprint": self.sequences.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was saved, maybe with other ranks and another batch_size.

        Raises `ValueError` for another seed, another seq_len, another text.
        """
        here = self.state_dict()
        for key in ("seed", "seq_len", "fingerprint"):
            if state[key] != here[key]:
                name = "text (its fingerprint)" if key == "fingerprint" else key
                change = f"saved with {state[key]}, now {here[key]}"
                raise ValueError(f"cannot resume the data with another {name}: {change}")
        self.epoch, self.position = state["epoch"], state["position"]


def on_device(
    batches: Iterable[Sequence[tuple[Tensor, Tensor]]],
    device: torch.device,
    shard: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield `batches` on `device`, each microbatch cut by `shard`; none is read before its turn.

    A GPU copies each batch from pinned memory by itself, so that the host need not wait.
    """

    def moved(tokens: Tensor) -> Tensor:
        if device.type == "cuda":
            return tokens.pin_memory().to(device, non_blocking=True)
        return tokens.to(device)

    for batch in batches:
        yield [shard((moved(inputs), moved(targets))) for inputs, targets in batch]
