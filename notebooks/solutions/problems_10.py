"""Problems from real clusters, for notebook 10: pipeline parallelism."""

from minipar.lab.problems import problem
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.simulate import bubble, simulate


@problem(
    "BLOOM's bubble",
    unit="% of the computing time",
    source="[BigScience 2022](https://arxiv.org/abs/2211.05100), section 3.4",
    hint=(
        "How many microbatches does *one* replica have? The bubble of 1F1B is notebook "
        "10's formula."
    ),
    slips={
        "The replicas share the batch: divide by 8.": 100 * 11 / 1024,
        "A microbatch has 2 sequences: half as many microbatches.": 100 * 11 / 256,
        "Of p stages, p - 1 are waited for.": 100 * 12 / 128,
        "That is the share of the whole step: the question is idle over computing.": 100 * 11 / 139,
    },
    lesson=("With GPipe it would be as much, but 128 microbatches would be held instead of 12."),
)
def bubble_of_bloom():
    """BLOOM (176 billion parameters) was trained with 12 stages of a pipeline and 8 replicas. A
    step had 2,048 sequences, in microbatches of 2, in the order of 1F1B. How long is a rank
    idle, in per cent of the time that it computes? Stages take equally long, and messages take
    no time."""
    microbatches = 2048 // 8 // 2
    return 100 * bubble(simulate(make("1f1b", 12, microbatches)))


@problem(
    "Sixteen microbatches for sixteen ranks",
    unit="% of the computing time",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 4 and section 3.3.2; eight "
        "stages per rank are our assumption"
    ),
    hint="What does interleaving over v stages do to the bubble's formula?",
    slips={
        "That is 1F1B: divide by the eight stages of a rank.": 100 * 15 / 16,
        "p - 1 = 15, not 16.": 100 / 8,
        "That is the share of the whole step: the question is idle over computing.": 100
        * 15
        / (15 + 8 * 16),
    },
    lesson=(
        "And eight times as many messages. With few microbatches per replica, "
        "interleaving is no luxury."
    ),
)
def llama_3_and_eight_stages_per_rank():
    """Llama 3 405B was trained with 16 ranks along the pipeline. Each replica had 16 sequences
    per step: let them be 16 microbatches. In the order of 1F1B, ranks would be idle for 94 % of
    the time that they compute. With the 126 layers (and embedding and head) spread over eight
    stages per rank, interleaved, how much is it?"""
    return 100 * bubble(simulate(make("interleaved_1f1b", 16, 16, 8)))


@problem(
    "The bubble of a trillion parameters",
    unit="% of the computing time",
    source=(
        "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1; one "
        "sequence per microbatch is our assumption"
    ),
    hint=("Find the replicas first: which GPUs are left for them? Then the microbatches of one."),
    slips={
        "The replicas share the batch: how many are there?": 100 * 63 / 3072,
        "Of p stages, p - 1 are waited for.": 100 * 64 / 512,
        "That is the share of the whole step: the question is idle over computing.": 100 * 63 / 575,
    },
    within=0.01,
    lesson=("The paper reports 52 % of peak with interleaving, which makes the bubble smaller."),
)
def a_trillion_parameters():
    """Megatron-LM ran a model of a trillion parameters on 3,072 GPUs: tensor parallelism over
    8, a pipeline of 64 stages. The global batch had 3,072 sequences; let a microbatch be one of
    them. How long is a rank of plain 1F1B idle, in per cent of the time that it computes?"""
    replicas = 3072 // (8 * 64)
    p, m = 64, 3072 // replicas  # (p - 1) / m; simulated for smaller pipelines in the notebook
    return 100 * (p - 1) / m


@problem(
    "One message between two stages",
    unit="MB per GPU",
    source="[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), sections 4.1 and 5",
    hint="How large is the whole activation, and which part of it crosses?",
    slips={
        "That is the whole activation: each of 8 ranks sends an eighth.": 2048 * 25_600 * 2 / 1e6,
        "16 bits are 2 bytes.": 2048 * 25_600 / 8e6,
        "16 bits, not 32.": 2048 * 25_600 * 4 / 8e6,
    },
    lesson="Without the trick, eight times the bytes would cross between nodes.",
)
def a_message_between_stages():
    """The same model has a width of 25,600 and sequences of 2,048 tokens. A microbatch of one
    sequence goes from stage to stage in 16 bits. All 8 tensor-parallel ranks hold the same
    activation, so each sends only an eighth to its counterpart, and they gather it again over
    NVLink. How many megabytes does each GPU send to the next stage, for each microbatch?"""
    return 2048 * 25_600 * 2 / 8 / 1e6


@problem(
    "What DualPipe leaves of the bubble",
    unit="% of 1F1B's bubble",
    source="[DeepSeek-V3](https://arxiv.org/abs/2412.19437), table 2",
    hint=("Put the numbers into both formulas. Mind that half of the ranks count in one of them."),
    slips={
        "B is a whole backward already: do not add W to it.": 100 * 14 / 60,
        "p/2 - 1 = 7, not 8.": 100 * 16 / 45,
    },
    lesson=(
        "And with X = 3 nothing was gained yet by overlapping: hiding the all-to-all "
        "makes X shorter."
    ),
)
def dual_pipe():
    """DeepSeek-V3 was trained with 16 ranks along the pipeline. Its report gives the bubble of
    1F1B as (p - 1)(F + B), and that of DualPipe as (p/2 - 1)(X + B - 3W): F is a forward, B a
    whole backward, W its part for the weights, and X a forward and a backward that run
    together. Let F = 1, B = 2, W = 1 and X = 3. What is left of 1F1B's bubble?"""
    p, forward, backward, weights, together = 16, 1, 2, 1, 3
    one_f_one_b = (p - 1) * (forward + backward)
    return 100 * (p // 2 - 1) * (together + backward - 3 * weights) / one_f_one_b
