"""Problems from real clusters, for notebook 08: sequence parallelism."""

from minipar.lab.problems import problem


@problem(
    "What a layer of GPT-3 keeps",
    unit="GB",
    source="[Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), equation 1",
    hint="Work out the second term first: is it smaller or larger than 34?",
    slips={
        "That is without attention's T x T matrices.": 2048 * 12_288 * 34 / 1e9,
        "The 34 and the 80 are bytes already: 16 bits are counted.": 2 * 2048 * 12_288 * 114 / 1e9,
    },
    lesson="Ninety-six layers of it would be 275 GB, for one sequence.",
)
def a_layer_of_gpt_3():
    """GPT-3 has a width of 12,288 and 96 heads. For its backward, a layer keeps T D (34 + 5 H T
    / D) bytes of a sequence of T tokens in 16 bits: the second term is the T x T matrices of
    attention. How much does a layer keep of one sequence of 2,048 tokens on a single device?"""
    return 2048 * 12_288 * (34 + 5 * 96 * 2048 / 12_288) / 1e9


@problem(
    "Cut over eight ranks, and how much is left",
    unit="GB per GPU",
    source="[Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), equation 2",
    hint="Three kinds of bytes per number: whole, cut of the 34, and attention's.",
    slips={
        "That is with sequence parallelism: here 10 bytes stay whole.": 2048
        * 12_288
        * 114
        / 8
        / 1e9,
        "Nothing is cut yet in that.": 2048 * 12_288 * 114 / 1e9,
    },
    lesson="Of the 23 bytes, the 10 that stay whole are as many as those of attention.",
)
def on_eight_ranks():
    """The same layer with tensor parallelism over 8 ranks, without sequence parallelism: of the
    34 bytes, 24 are cut, and so are all of attention's 80; norms, dropouts and inputs (10
    bytes) stay whole. How much does a GPU keep of this layer?"""
    return 2048 * 12_288 * (10 + (24 + 80) / 8) / 1e9


@problem(
    "Sequence parallelism, and attention computed again",
    unit="% of the last problem",
    source=(
        "[Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), table 2 and the abstract"
    ),
    hint=("What is kept per number now, and what was it in the last problem? The ratio is enough."),
    slips={
        "Attention's matrices are not kept any more: leave out the 80.": 100 * 114 / 8 / 23,
        "Sequence parallelism cuts the 10 bytes, too.": 100 * 13 / 23,
    },
    lesson="The paper's abstract calls it five times less.",
)
def five_times_less():
    """Now with sequence parallelism, which cuts the 10 bytes as well, and with selective
    recomputation, which keeps nothing of attention's T x T matrices. What is left of the 0.579
    GB of the last problem?"""
    return 100 * (34 / 8) / (10 + (24 + 80) / 8)


@problem(
    "What it was worth in time",
    unit="% more throughput",
    source="[Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), table 5",
    hint="Throughput is steps per time, not time per step.",
    slips={
        "That is the time saved: throughput is one over time.": 100 * (1 - 37.83 / 49.05),
    },
    lesson="The paper's table says 29.7 %.",
)
def what_it_was_worth():
    """A model of 530 billion parameters on 280 GPUs fits with full recomputation, at 49.05 s
    per step; or with sequence parallelism and selective recomputation, at 37.83 s. By how many
    per cent does the throughput grow?"""
    return 100 * (49.05 / 37.83 - 1)


@problem(
    "A million tokens, traded for heads",
    unit="MB per GPU",
    source=(
        "[Jacobs et al. 2023](https://arxiv.org/abs/2309.14509), section 3.2; the shape "
        "is that of [Llama 2 7B](https://arxiv.org/abs/2307.09288)"
    ),
    hint=(
        "How many numbers of a token go out, there and back? And which part of the "
        "tokens stays at home?"
    ),
    slips={
        "A GPU has only its own 32,768 tokens.": 31 / 32 * 2**20 * 4 * 4096 * 2 / 1e6,
        "What comes back after attention counts, too.": 31 / 32 * 2**15 * 3 * 4096 * 2 / 1e6,
        "bf16 takes 2 bytes.": 31 / 32 * 2**15 * 4 * 4096 / 1e6,
    },
    lesson=(
        "On half the GPUs each would send about twice that. Gathered, all tokens would reach "
        "each GPU, on however many. With 32 heads there can be no more than 32 ranks."
    ),
)
def ulysses_at_a_million():
    """Ulysses trades tokens for heads before attention (queries, keys and values: 3 D numbers
    per token) and back after it (D). A model of width 4,096 with as many heads of keys as of
    queries, 32, reads a sequence of 1,048,576 tokens on 32 GPUs. How many megabytes does each
    GPU send in one layer's forward, in bf16? A GPU keeps 1/32 of what it has."""
    tokens = 2**20 // 32
    return 31 / 32 * tokens * 4 * 4096 * 2 / 1e6
