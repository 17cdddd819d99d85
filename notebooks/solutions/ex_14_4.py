"""Run D: a different rank is late in each step; deal its documents out differently.

Attention grows with the square of a document, so a rank with long documents computes for longer
than one with as many tokens in short ones. All others wait for it, and
which rank that is changes from step to step.
Source: Lin et al. 2025 (2505.05713), section 5.3: sequence-length imbalance; WLB-LLM (2503.17924).
"""

from contextlib import nullcontext

import torch
from torch import nn

from minipar.lab.exercises import Case, fails
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import ddp
from minipar.sim import emulate

SECONDS = 60  # two runs on emulated GPUs
LEVEL, MINUTES = "hard", 25
GOOD = "every document once, and no rank more than 5 % above what is possible"
PRAISE = "Ranks now compute for equally long, and hold unequal numbers of tokens."

BUGS = {
    "a slow GPU": "A slow GPU is the last one in every step. Here it is a different rank "
    "each time.",
    "a slow network": "Where nobody is late, the bars of the link are as long as in the healthy "
    "picture. What is longer is the white in front of them.",
    "work that is dealt out unevenly": "",
    "a process that is interrupted": "An interrupted rank would have a hole in its row. The late "
    "rank computes without a gap.",
    "gradients that are sent in every microbatch": "Each rank sends once a step: between two "
    "documents there is no bar.",
}


def seconds(length):
    """Of forward and backward of a document of so many tokens, measured: see the notebook."""
    return 1.3e-3 + 30e-6 * length + 182e-9 * length**2


def given(size, random):
    """Lengths of documents, and for how many ranks they are. Several batches."""
    batches = []
    for ranks in (4, 4, 8, 16):
        some = 2 ** (4 + 5 * torch.rand(12 * ranks, generator=random, dtype=torch.float64) ** 1.5)
        batches.append(([int(length) for length in some], ranks))
    return [(batches,)] * size


def run(answer, axis, batches):
    """Return who gets which documents; if that will do, two steps before and after as well."""
    found = [_plain(answer(list(lengths), seconds, ranks)) for lengths, ranks in batches]
    if any(map(_refused, found, batches)):
        return found, None, None
    return found, *(_film(deal, axis) for deal in (by_tokens, answer))


def _plain(hands):
    """Lists of whole numbers, out of tensors or tuples as well."""
    if isinstance(hands, torch.Tensor):
        return hands.tolist()
    if isinstance(hands, list | tuple):
        return [list(map(int, own)) if isinstance(own, list | tuple) else own for own in hands]
    return hands


STEPS = [  # as many tokens for each rank; where the long documents come differs
    [*[128] * 8, *[512] * 2, *[128] * 8, *[256] * 4],
    [*[128] * 8, *[256] * 4, *[128] * 8, *[512] * 2],
]


def _film(deal, axis):
    """Two steps of a Llama on emulated GPUs, data parallel, a microbatch for each document."""
    config = LlamaConfig(64, 8, 16, num_layers=4, num_heads=2, num_kv_heads=2)
    model = Llama(config)
    data = ddp.apply(model, axis)

    def steps(batches=STEPS):
        for lengths in batches:
            mine = deal(lengths, seconds, axis.size)[axis.rank]
            for i, document in enumerate(mine):
                rows = torch.arange(lengths[document] + 1)[None] % 64
                with data.no_sync() if i < len(mine) - 1 else nullcontext():
                    logits = model(rows[:, :-1]).flatten(0, 1)
                    nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).backward()
            data.finish_backward()
            model.zero_grad()

    steps([[16] * axis.size])
    gpu = emulate.device("h100/10", magnify=64)
    return emulate.film(steps, model, axis, device=gpu, wire="100gbe")


def _refused(hands, batch):
    """(check, sentence) of the first that is not met, or None."""
    lengths, ranks = batch
    shown = f"{len(lengths)} documents, {ranks} ranks"
    if not isinstance(hands, list) or not all(isinstance(own, list) for own in hands):
        return "once", f"{shown}: expected a list of documents for each rank, got {str(hands)[:60]}"
    if len(hands) != ranks or sorted(map(str, sum(hands, []))) != sorted(
        map(str, range(len(lengths)))
    ):
        return "once", (
            f"{shown}: {len(hands)} lists with {len(sum(hands, []))} documents; expected {ranks}, "
            f"with each of 0 to {len(lengths) - 1} once"
        )
    every = [seconds(length) for length in lengths]
    longest = max(sum(every[document] for document in own) for own in hands)
    least = max(sum(every) / ranks, max(every))
    if longest > 1.05 * least:
        return "even", (
            f"{shown}: the last rank computes for {1e3 * longest:.0f} ms; less than "
            f"{1e3 * least:.0f} ms is not possible, and 5 % more will do"
        )
    return None


def check_once(case: Case) -> None:
    case.expect_accepted(_refused, "once")


def check_even(case: Case) -> None:
    case.expect_accepted(_refused, "even")


def drawn(case: Case):
    from minipar.lab import draw  # takes long to import, and no rank needs it

    _, before, after = case.results[0]
    titles = {"By tokens": before, "By your deal": after}
    return draw.before_after(titles, unit="for two steps")


def by_tokens(lengths, seconds, num_ranks):
    hands, tokens = [[] for _ in range(num_ranks)], [0] * num_ranks
    room = sum(lengths) / num_ranks
    for document, length in enumerate(lengths):
        fits = [rank for rank in range(num_ranks) if tokens[rank] + length <= room]
        rank = fits[0] if fits else tokens.index(min(tokens))
        hands[rank].append(document)
        tokens[rank] += length
    return hands


def solution(lengths, seconds, num_ranks):
    hands, busy = [[] for _ in range(num_ranks)], [0.0] * num_ranks
    for document in sorted(range(len(lengths)), key=lambda d: lengths[d], reverse=True):
        rank = busy.index(min(busy))
        hands[rank].append(document)
        busy[rank] += seconds(lengths[document])
    return hands


@fails(
    "even",
    "Tokens are even, and time is not: count seconds(length).",
)
def wrong_leaves_it_as_it_was(lengths, seconds, num_ranks):
    return by_tokens(lengths, seconds, num_ranks)


@fails(
    "even",
    "As many documents on every rank: they are of different lengths.",
)
def wrong_deals_by_number(lengths, seconds, num_ranks):
    return [list(range(rank, len(lengths), num_ranks)) for rank in range(num_ranks)]


@fails(
    "even",
    "Time is counted, but a long document that comes late spoils it: begin with the longest.",
)
def wrong_takes_them_as_they_come(lengths, seconds, num_ranks):
    hands, busy = [[] for _ in range(num_ranks)], [0.0] * num_ranks
    for document, length in enumerate(lengths):
        rank = busy.index(min(busy))
        hands[rank].append(document)
        busy[rank] += seconds(length)
    return hands


@fails(
    "once",
    "A list of lengths: asked are the numbers of the documents.",
)
def wrong_returns_lengths(lengths, seconds, num_ranks):
    return [[lengths[d] for d in own] for own in solution(lengths, seconds, num_ranks)]
