"""Top-k with error feedback.

Send the k numbers of largest magnitude and where they belong. What is not sent is not thrown away:
it is added to the next gradient, so that it is sent as soon as it has grown large. Over many steps
every number arrives, late but whole.
Source: Lin et al. 1712.01887, section 3.1; Karimireddy et al. 1901.09847, algorithm 2.
"""

import torch

from minipar.comm.collectives import all_gather, all_reduce
from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "the textbook's averages in every step, nothing ever lost, 8 k bytes to each other rank"
PRAISE = "What a rank keeps back, it pays back: this is the whole trick of sparse gradients."
SIZES = (4, 3)

STEPS, LENGTH, K = 6, 60, 4


def given(size, random):
    """For each rank a gradient for each of STEPS steps, [LENGTH] in float32, and k."""
    shape = size, STEPS, LENGTH
    gradients = torch.randn(shape, generator=random) + 0.5 * torch.randn(LENGTH, generator=random)
    return [(list(mine), K) for mine in gradients]


def run(answer, axis, gradients, k):
    residue, averages, residues = torch.zeros(LENGTH), [], []
    for gradient in gradients:
        out = answer(gradient.clone(), residue.clone(), k, axis)
        if not isinstance(out, tuple) or len(out) != 2:
            raise CheckFailed("return (average, residue), two tensors")
        average, residue = out
        averages.append(average)
        residues.append(residue)
    return averages, residues


def _textbook(case: Case):
    """Averages, and the residues of each rank, of every step."""
    residues = [torch.zeros(LENGTH) for _ in range(case.size)]
    averages, every = [], []
    for step in range(STEPS):
        total = torch.zeros(LENGTH)
        for rank, (gradients, _) in enumerate(case.given):
            v = gradients[step] + residues[rank]
            places = v.abs().topk(K).indices
            total[places] += v[places]
            residues[rank] = v.clone()
            residues[rank][places] = 0
        averages.append(total / case.size)
        every.append(list(residues))
    return averages, every


def _compare(got, want, what):
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        raise CheckFailed(f"{what}: expected a tensor {list(want.shape)}, got {got!r}")
    differ = ~torch.isclose(got, want, rtol=1e-4, atol=1e-5)
    if differ.any():
        at = int(differ.nonzero()[0])
        raise CheckFailed(
            f"{what}: {int(differ.sum())} of {LENGTH} numbers are not right, the first at {at}: "
            f"expected {want[at].item():.6g}, got {got[at].item():.6g}"
        )


def check_result(case: Case) -> None:
    averages, _ = _textbook(case)
    for rank, (got, _) in enumerate(case.results):
        for step in range(STEPS):
            _compare(got[step], averages[step], f"rank {rank}, step {step}, average")


def check_residue(case: Case) -> None:
    """Those of the last step as well, which no average shows any more."""
    _, residues = _textbook(case)
    for rank, (_, got) in enumerate(case.results):
        for step in range(STEPS):
            _compare(got[step], residues[step][rank], f"rank {rank}, step {step}, residue")


def check_traffic(case: Case) -> None:
    allowed = (case.size - 1) * STEPS * 8 * K
    for rank, sent in enumerate(case.sent):
        total = sum(one.num_bytes for one in sent)
        if total != allowed:
            raise CheckFailed(
                f"rank {rank} of {case.size} sent {total:,} bytes in {STEPS} steps; expected "
                f"{allowed:,}: for each of k = {K} numbers 4 bytes and 4 for its place (int32), "
                f"to each of the others"
            )


def solution(gradient, residue, k, axis):
    v = gradient + residue
    places = v.abs().topk(k).indices
    values, everywhere = all_gather(v[places], axis), all_gather(places.int(), axis)
    total = torch.zeros_like(v).index_add(0, everywhere, values)
    residue = v.clone()
    residue[places] = 0
    return total / axis.size, residue


@fails(
    "result",
    "Each rank uses only what it picked itself: nothing was sent.",
)
def wrong_sends_nothing(gradient, residue, k, axis):
    v = gradient + residue
    places = v.abs().topk(k).indices
    sent = torch.zeros_like(v)
    sent[places] = v[places]
    return sent, v - sent


@fails(
    "result",
    "The old residue is lost: add it to the gradient before you choose.",
)
def wrong_forgets_what_it_kept(gradient, residue, k, axis):
    return solution(gradient, torch.zeros_like(residue), k, axis)


@fails(
    "result",
    "The largest were chosen, not the strongest: by magnitude, -5 counts like 5.",
)
def wrong_the_largest_not_the_strongest(gradient, residue, k, axis):
    """-5 is a strong gradient, too."""
    v = gradient + residue
    places = v.topk(k).indices
    values, everywhere = all_gather(v[places], axis), all_gather(places.int(), axis)
    residue = v.clone()
    residue[places] = 0
    return torch.zeros_like(v).index_add(0, everywhere, values) / axis.size, residue


@fails(
    "result",
    "Two ranks sent the same place, and one overwrote the other: index_add adds.",
)
def wrong_the_last_rank_wins(gradient, residue, k, axis):
    """Where two ranks send the same place, both count."""
    v = gradient + residue
    places = v.abs().topk(k).indices
    values, everywhere = all_gather(v[places], axis), all_gather(places.int(), axis)
    total = torch.zeros_like(v)
    total[everywhere.long()] = values
    residue = v.clone()
    residue[places] = 0
    return total / axis.size, residue


@fails(
    "result",
    "The residue still has what was sent: zeros at your own places.",
)
def wrong_keeps_what_was_sent(gradient, residue, k, axis):
    average, _ = solution(gradient, residue, k, axis)
    return average, gradient + residue


@fails(
    "traffic",
    "A whole vector travels, zeros included: send k values and k places.",
)
def wrong_sends_zeros_too(gradient, residue, k, axis):
    v = gradient + residue
    places = v.abs().topk(k).indices
    sent = torch.zeros_like(v)
    sent[places] = v[places]
    return all_reduce(sent, axis, "avg"), v - sent


@fails(
    "result",
    "The residue is what this rank did not send: v, with zeros at its own places.",
)
def wrong_keeps_what_is_not_in_the_average(gradient, residue, k, axis):
    average, _ = solution(gradient, residue, k, axis)
    return average, gradient + residue - average


@fails(
    "result",
    "Exactly n times the average: divide by axis.size.",
)
def wrong_forgets_to_divide(gradient, residue, k, axis):
    average, residue = solution(gradient, residue, k, axis)
    return average * axis.size, residue


@fails(
    "result",
    "The residue is what this rank did not send: v, with zeros at its own places.",
)
def wrong_forgets_what_others_sent(gradient, residue, k, axis):
    v = gradient + residue
    places = all_gather(v.abs().topk(k).indices.int(), axis).long()
    average, _ = solution(gradient, residue, k, axis)
    return average, v.index_fill(0, places, 0)


@fails(
    "result",
    "Signs are lost: topk of v.abs() gives places, and v at these places is sent.",
)
def wrong_sends_magnitudes(gradient, residue, k, axis):
    v = gradient + residue
    values, places = v.abs().topk(k)
    values, everywhere = all_gather(values, axis), all_gather(places.int(), axis)
    total = torch.zeros_like(v).index_add(0, everywhere, values)
    return total / axis.size, v.index_fill(0, places, 0)


@fails(
    "result",
    "The gradient was sent without the residue: send v, which is their sum.",
)
def wrong_sends_the_gradient_alone(gradient, residue, k, axis):
    v = gradient + residue
    places = v.abs().topk(k).indices
    values, everywhere = all_gather(gradient[places], axis), all_gather(places.int(), axis)
    total = torch.zeros_like(v).index_add(0, everywhere, values)
    return total / axis.size, v.index_fill(0, places, 0)
