"""Problems from real clusters, for notebook 00: the map."""

from minipar.comm.collectives import wire_bytes
from minipar.comm.mesh import rank_at
from minipar.lab.problems import problem


@problem(
    "One rank of 16,384",
    unit="rank",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 4 and section 3.3.2: the "
        "order of the axes, from the innermost: tp, cp, pp, dp"
    ),
    hint=(
        "Count how many ranks you pass when dp grows by one, when pp does, and when tp "
        "does. The last axis moves fastest."
    ),
    slips={
        "tp is the innermost axis: the outermost counts in steps of 128 ranks.": (3 * 16 + 5) * 128
        + 7,
    },
    within=0,
    lesson="A machine has 8 GPUs: ranks that differ only in tp share one.",
)
def a_rank_of_16384():
    """Llama 3 405B trained on a mesh of dp=128, pp=16, tp=8; ranks next to each other have
    neighbouring places along tp, the last axis. Which rank is at dp=7, pp=5, tp=3?"""
    return rank_at({"dp": 7, "pp": 5, "tp": 3}, {"dp": 128, "pp": 16, "tp": 8})


@problem(
    "How fast a link must be",
    unit="Gbit/s",
    source="[Goyal et al. 2017](https://arxiv.org/abs/1706.02677), section 4",
    hint=(
        "Each rank sends its gradients nearly twice in a ring. Mind that a link is sold in bits."
    ),
    slips={
        "An all-reduce sends nearly twice the gradients.": 6.4,
    },
    lesson="The paper comes to 12.8, and to 15 with a margin; its network had 50.",
)
def a_link_for_resnet():
    """ResNet-50 on 256 GPUs, in the paper that trained it in an hour: 100 MB of gradients. How
    many gigabits per second must each rank send, so that a ring all-reduce takes 0.125 s, about
    as long as a backward pass?"""
    return wire_bytes("all_reduce", 100_000_000, 256) / 0.125 * 8 / 1e9


@problem(
    "A small Llama on 16 GPUs",
    unit="days",
    source="[TinyLlama](https://github.com/jzhang38/TinyLlama), its README",
    hint="How many tokens do all GPUs take in together in a second?",
    slips={
        "There are 16 GPUs.": 3e12 / 24_000 / 86_400,
    },
    lesson="One GPU would need four years.",
)
def days_of_tinyllama():
    """TinyLlama, a Llama of 1.1 billion parameters, learnt from 3 trillion tokens on 16 GPUs
    (A100 of 40 GB). Each GPU took in 24,000 tokens per second. How many days did this take?"""
    return 3e12 / (16 * 24_000) / 86_400


@problem(
    "Waiting for three continents",
    unit="% of the time",
    source=("[INTELLECT-1](https://arxiv.org/abs/2412.01152), its table of compute utilisation"),
    hint="The round consists of both parts: what is the all-reduce's share of the whole?",
    slips={
        "Of the whole time, computing and all-reduce.": 100 * 469 / 2280,
        "A minute has 60 seconds.": 100 * 469 / (469 + 38),
    },
    lesson="The report says 83 % utilisation. With all ranks in one country it was 96 %.",
)
def a_meeting_across_the_world():
    """INTELLECT-1 was trained on three continents. All ranks computed for 38 minutes. Then they
    met in one all-reduce, which took 469 seconds (the median), and computed again. What share
    of the time did the ranks spend in the all-reduce?"""
    return 100 * 469 / (38 * 60 + 469)


@problem(
    "One rank is slow, and all wait",
    unit="GPU hours per day",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4, for the cluster; "
        "the slow rank is our assumption"
    ),
    hint=(
        "For how long do the healthy ranks wait in each step, as a share of that "
        "longer step? All of them wait."
    ),
    slips={
        "Of the longer step: 0.02 of 1.02.": 16_383 * 24 * 0.02,
        "The slow one alone: but all others wait for it.": 24 * 0.02 / 1.02,
    },
    within=0.01,
    lesson="That is more than 300 GPUs standing still, for one that is a little slow.",
)
def one_slow_rank():
    """A collective ends when its last rank has come. On 16,384 GPUs, one GPU runs 2 % slower
    than the others, and each step ends in a collective of all. How many GPU hours are lost in a
    day of 24 hours, compared with a day in which that GPU is healthy? (A step takes 2 % longer;
    count the share of the time in which the healthy ranks wait.)"""
    return 16_383 * 24 * 0.02 / 1.02
