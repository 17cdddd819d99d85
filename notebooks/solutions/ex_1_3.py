"""What a training step costs: FLOPs and bytes, before it runs.

A matrix that multiplies costs 2 FLOPs per parameter and token in forward, and twice as many in
backward, for the gradients of its input and of itself. Attention adds QK^T and AV, each 2·T·H·K
per token. In fp32, weights, gradients and Adam's two moments take 4 times 4 bytes a parameter.
Source: Chowdhery et al. 2204.02311, appendix B.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.model.llama import Llama, LlamaConfig, token_loss

LEVEL, MINUTES = "medium", 20
GOOD = "equal to what is counted while a real model runs: FLOPs to the last one, bytes as well"
PRAISE = "This is the sum that every plan for a cluster begins with."
SIZES = (1,)


def given(size, random):
    """A list of (config, batch_size, seq_len)."""

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    cases = []
    for tied in (True, False):
        groups, share = draw(1, 4), draw(2, 4)
        config = LlamaConfig(
            vocab_size=draw(100, 300),
            hidden_size=draw(16, 64),
            intermediate_size=draw(50, 200),
            num_layers=draw(2, 5),
            num_heads=groups * share,
            num_kv_heads=groups,
            head_dim=2 * draw(2, 9),
            tie_embeddings=tied,
        )
        cases.append((config, draw(2, 6), draw(10, 60)))
    return [(cases,)] * size


def run(answer, axis, cases):
    return [answer(*case) for case in cases]


def counted_flops(config: LlamaConfig, batch_size: int, seq_len: int) -> int:
    """Count, in forward and backward of a real model, all matrix products."""
    model, tokens = Llama(config), torch.zeros(batch_size, seq_len, dtype=torch.int64)
    # The plain version of attention: fused ones compute products again in backward.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_loss(model(tokens), tokens).backward()
    return counter.get_total_flops()


def _compare(case: Case, place: int, what: str, truth) -> None:
    for (config, batch_size, seq_len), got in zip(case.given[0][0], case.results[0], strict=True):
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise CheckFailed(f"expected (flops, num_bytes), got {got!r}")
        want = truth(config, batch_size, seq_len)
        if got[place] != want:
            raise CheckFailed(
                f"expected {want:,} {what}, got {got[place]:,}, {got[place] / want:.3f} times as "
                f"many, for\n    batch_size={batch_size}, seq_len={seq_len}, {config}"
            )


def check_flops(case: Case) -> None:
    _compare(case, 0, "FLOPs", counted_flops)


def check_bytes(case: Case) -> None:
    _compare(case, 1, "bytes", lambda config, *_: 4 * 4 * config.num_parameters)


def solution(config, batch_size, seq_len):
    norms = (2 * config.num_layers + 1) * config.hidden_size
    multiplying = config.num_parameters - norms
    if not config.tie_embeddings:  # a look-up does not multiply, the head does
        multiplying -= config.vocab_size * config.hidden_size
    square = seq_len * config.num_heads * config.head_dim
    per_token = 2 * multiplying + config.num_layers * 2 * (2 * square)
    return 3 * batch_size * seq_len * per_token, 4 * 4 * config.num_parameters


@fails(
    "flops",
    "Both numbers are 0.",
)
def wrong_says_nothing(config, batch_size, seq_len):
    return 0, 0


@fails(
    "flops",
    "Attention is missing: two products of T x T per head and layer.",
)
def wrong_forgets_attention(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * seq_len
    return flops - batch_size * seq_len * attention, num_bytes


@fails(
    "flops",
    "The look-up of an untied embedding multiplies nothing.",
)
def wrong_lets_the_look_up_multiply(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return flops + 6 * batch_size * seq_len * table, num_bytes


@fails(
    "flops",
    "Two thirds of the truth: forward is one part, backward two.",
)
def wrong_takes_backward_for_forward(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    return flops * 2 // 3, num_bytes


@fails(
    "bytes",
    "Three quarters of the truth: weight, gradient and two moments are four numbers.",
)
def wrong_forgets_the_gradients(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    return flops, num_bytes * 3 // 4


@fails(
    "flops",
    "Nearly right: the weights of norms are no matrices, so leave them out.",
)
def wrong_lets_norms_multiply(config, batch_size, seq_len):
    tokens = batch_size * seq_len
    return config.flops_per_token(seq_len) * tokens, 16 * config.num_parameters


@fails(
    "flops",
    "Half of attention: two products per head and layer, each of the full T x T square.",
)
def wrong_forgets_a_product_of_attention(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    square = seq_len * config.num_heads * config.head_dim
    return flops - 6 * batch_size * seq_len * config.num_layers * square, num_bytes


@fails(
    "flops",
    "This is 6 N per token: attention is missing, and not every parameter multiplies.",
)
def wrong_takes_six_times_all(config, batch_size, seq_len):
    return 6 * config.num_parameters * batch_size * seq_len, 16 * config.num_parameters


@fails(
    "flops",
    "Half of the truth: a multiplication and an addition are two FLOPs.",
)
def wrong_counts_multiplications_alone(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    return flops // 2, num_bytes


@fails(
    "flops",
    "A third of the truth: this is forward, and backward costs twice as much.",
)
def wrong_forgets_backward(config, batch_size, seq_len):
    flops, num_bytes = solution(config, batch_size, seq_len)
    return flops // 3, num_bytes


@fails(
    "flops",
    "One sequence alone: the batch has batch_size of them.",
)
def wrong_forgets_the_batch(config, batch_size, seq_len):
    return solution(config, 1, seq_len)
