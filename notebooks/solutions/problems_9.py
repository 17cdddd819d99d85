"""Problems from real clusters, for notebook 09: context parallel."""

from minipar.comm.collectives import wire_bytes
from minipar.lab.problems import problem
from minipar.model.llama import LlamaConfig

LLAMA_3_405B = LlamaConfig(128_256, 16_384, 53_248, num_layers=126, num_heads=128, num_kv_heads=8)


@problem(
    "How long a block must be",
    unit="tokens per GPU",
    source="[Liu et al. 2023](https://arxiv.org/abs/2310.01889), section 3 and table 2",
    hint="Set computing time equal to sending time. Two of the three letters cancel.",
    slips={
        "Keys and values travel in bf16: 2 d numbers are 4 d bytes.": 312e12 / 12.5e9 / 2,
        "12.5 GB/s are bytes already.": 8 * 312e12 / 12.5e9,
    },
    lesson="Within one node, with NVLink's 300 GB/s, about 1,000 tokens do.",
)
def a_block_that_hides_the_next():
    """In ring attention a rank multiplies its c queries with c keys and values (4 c² d FLOPs
    for a width of d) while the next keys and values arrive (4 c d bytes in bf16). On A100s of
    312 TFLOP/s with 12.5 GB/s of InfiniBand each, from how many tokens c per GPU on does the
    ring hide itself, at peak?"""
    return 312e12 / 12.5e9


@problem(
    "Keys and values of 131,072 tokens",
    unit="MB per GPU",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), tables 3 and 4 and section 3.3.2: "
        "context parallelism by an all-gather of keys and values"
    ),
    hint="How many bytes do keys and values of *all* tokens take? Which part is not its own?",
    slips={
        "One head is left on each tensor-parallel rank, not 8.": 15
        / 16
        * 131_072
        * 2
        * 8
        * 128
        * 2
        / 1e6,
        "Keys and values: two of them.": 15 / 16 * 131_072 * 128 * 2 / 1e6,
        "That is what a GPU has itself: it receives the other 15/16.": 131_072
        / 16
        * 2
        * 128
        * 2
        / 1e6,
    },
    lesson=(
        "The queries would be 8 times as much: with few heads of keys, gathering these is cheap."
    ),
)
def keys_and_values():
    """Llama 3 405B reads 131,072 tokens on 16 context-parallel ranks, and each of them shares
    its 8 heads of keys and values with 8 tensor-parallel ranks: a GPU has one head of 128
    numbers for keys, and one for values. How many megabytes of keys and values does a GPU
    receive in one layer's forward, in bf16?"""
    keys_and_values = 131_072 * 2 * 128 * 2
    return wire_bytes("all_gather", keys_and_values, 16) / 1e6


@problem(
    "The rank that has the end of the text",
    unit="times the average",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.2: each rank gets two "
        "of 2 cp chunks; [Brandon et al. 2023](https://arxiv.org/abs/2311.09431)"
    ),
    hint=(
        "How many pieces does rank r see, with half of its own? Then the average over all ranks."
    ),
    slips={
        "Its own piece counts half.": 16 / 8.5,
        "That is against the first rank: compare with the average.": 31.0,
    },
    within=0.01,
    lesson=(
        "So all wait for it almost half of the time; two chunks for each rank, from "
        "both ends, make it 1."
    ),
)
def the_last_rank():
    """A causal text on 16 ranks, cut into 16 pieces in order. The rank with the last piece has
    the most to do: its queries see everything before them. How many times the average of all
    ranks does it compute in attention? (Its own piece counts as half, for the causal mask.)"""
    work = [rank + 0.5 for rank in range(16)]
    return work[-1] / (sum(work) / len(work))


@problem(
    "What attention costs at 131,072 tokens",
    unit="% of all FLOPs",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), table 3",
    hint="Compare two costs of one token: matrices, and attention over half of the square.",
    slips={
        "That is without the mask: causal attention is half.": 57.3,
        "Relative to the matrices, not to all.": 67.0,
    },
    lesson="At 8,192 tokens it is 4 %.",
)
def share_of_attention():
    """At 8,192 tokens, attention's products are a small part of the FLOPs of Llama 3 405B (126
    layers of width 16,384; 403.8 billion parameters that multiply). What share do they have at
    131,072 tokens, if a kernel skips what the causal mask hides?"""
    total = LLAMA_3_405B.flops_per_token(131_072, causal=True)
    matrices = LLAMA_3_405B.flops_per_token(0)
    return 100 * (total - matrices) / total


@problem(
    "Keys and values that are squeezed",
    unit="times fewer numbers",
    source="[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 4.2",
    hint="Count the numbers of one token on both sides: keys *and* values on one of them.",
    slips={
        "Keys and values: two of them.": 128 * 128 / 576,
        "The 64 numbers for the position travel, too.": 2 * 128 * 128 / 512,
    },
    lesson="Eight heads of keys and values, as in Llama 3, would be 16 times fewer.",
)
def compressed_keys():
    """DeepSeek-V3 has 128 heads of 128 numbers. Plain attention has keys and values for each
    head; instead, the model compresses both into one vector of 512 numbers per token, plus 64
    for the position, that all heads share. If that is what travels around a ring, how many
    times fewer numbers per token is it?"""
    return 2 * 128 * 128 / (512 + 64)
