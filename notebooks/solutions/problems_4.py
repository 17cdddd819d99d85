"""Problems from real clusters, for notebooks 04a (the first three), 04b and 04c."""

from minipar.lab.problems import problem


@problem(
    "One gradient in hundreds",
    unit="times fewer bytes",
    source="[Lin et al. 2017](https://arxiv.org/abs/1712.01887), abstract",
    hint=("It is one ratio. Each number brings its place along, so it is smaller than a thousand."),
    slips={
        "A place is sent with each number, so it is not 1,000 times.": 1000.0,
    },
    lesson="The abstract speaks of 270 to 600 times.",
)
def deep_gradient_compression():
    """Deep gradient compression sends 0.35 MB of the 97 MB of gradients that ResNet-50 has, the
    largest 0.1 % with their places. How many times fewer bytes is that?"""
    return 97 / 0.35


@problem(
    "One bit, after a warm-up",
    unit="times fewer bytes",
    source=(
        "[1-bit Adam](https://arxiv.org/abs/2102.02888), and [its "
        "announcement](https://github.com/deepspeedai/DeepSpeed/blob/master/docs/_posts/2020-09-09-onebit-adam-blog-post.md)"
    ),
    hint=(
        "Take the mean cost of a step in both phases, with fp16 as 1; bits of one "
        "number are 16 there."
    ),
    slips={
        "The warm-up is not compressed.": 16.0,
        "fp16 has 16 bits, not 32.": 1 / (0.15 + 0.85 / 32),
    },
    lesson=("The warm-up sends three quarters of all bytes. The announcement says up to 5 times."),
)
def one_bit_adam():
    """1-bit Adam sends fp16 gradients during the first 15 % of the steps, until Adam's variance
    has settled, and one bit per number for the rest. Over the whole training, how many times
    fewer bytes is this than fp16 in every step?"""
    warm_up = 0.15
    return 1 / (warm_up + (1 - warm_up) / 16)


@problem(
    "PowerSGD on a table of words",
    unit="times fewer bytes",
    source=(
        "[Vogels et al. 2019](https://arxiv.org/abs/1905.13727), section 3 and the "
        "appendix's list of layers"
    ),
    hint="Count the numbers of the matrix, and those of both thin ones.",
    slips={
        "Both thin matrices travel.": 650 / 4,
        "That is rank 1: rank 4 sends four times as much.": 28_869 * 650 / 29_519,
    },
    within=0.01,
    lesson=(
        "A square matrix of as many numbers would gain 541 times: the flatter a matrix, "
        "the less it gains."
    ),
)
def powersgd_on_an_lstm():
    """The largest matrix of PowerSGD's language model is an embedding of 28,869 words by 650
    numbers. With rank 4 its gradient travels as two thin matrices, 28,869 x 4 and 650 x 4. How
    many times fewer numbers is that?"""
    rows, columns, rank = 28_869, 650, 4
    return rows * columns / (rank * (rows + columns))


@problem(
    "Eight bits, every hundred steps",
    unit="times fewer bytes",
    source="[INTELLECT-1](https://arxiv.org/abs/2412.01152), abstract",
    hint="Two savings multiply: how seldom, and how many bits.",
    slips={
        "int8 takes a byte where float32 takes 4.": 100.0,
        "float32, not bf16.": 200.0,
    },
    lesson="As the abstract says.",
)
def int8_every_hundred_steps():
    """INTELLECT-1 lets its nodes meet every 100 steps and sends int8 when they do. Data
    parallelism would all-reduce float32 gradients in each step. How many times fewer bytes is
    that?"""
    float32, int8, steps = 4, 1, 100
    return steps * float32 / int8


@problem(
    "How large a batch may be",
    unit="million tokens",
    source="[Kaplan et al. 2020](https://arxiv.org/abs/2001.08361), section 5.1",
    hint="Only the power needs a calculator: 1/0.21 is a little less than 5.",
    slips={
        "The exponent is 1/0.21 = 4.76, not 0.21.": 200 / 2.5**0.21,
        "Divided, not multiplied.": 200 * 2.5 ** (1 / 0.21),
    },
    lesson=(
        "GPT-3 had 3.2 million tokens in a batch. Measure it for your own model, as "
        "this notebook does."
    ),
)
def critical_batch():
    """Kaplan and colleagues find that the batch beyond which more sequences hardly save steps
    grows as the loss falls: 2 · 10^8 tokens divided by L to the power 1/0.21. How many million
    tokens is it at a loss of L = 2.5?"""
    return 2e8 / 2.5 ** (1 / 0.21) / 1e6
