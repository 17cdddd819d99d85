"""Problems from real clusters, for notebook 11: expert parallelism."""

import math

from minipar.lab.problems import problem
from minipar.model.llama import PRESETS
from minipar.model.moe import MoEConfig

DEEPSEEK = MoEConfig(256, 8, 2048, num_shared=1)


@problem(
    "Where 671 billion parameters are",
    unit="billion parameters",
    source="[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 4.2",
    hint=(
        "Begin with one expert's three matrices. How many experts does a layer have, "
        "with the shared one?"
    ),
    slips={
        "The first three layers are dense.": 61 * 257 * 3 * 7168 * 2048 / 1e9,
        "A SwiGLU has three matrices.": 58 * 257 * 2 * 7168 * 2048 / 1e9,
    },
    lesson="That is 98 % of the model's 671 billion.",
)
def parameters_in_experts():
    """DeepSeek-V3 has 61 layers of width 7,168; all but the first three have 256 experts and
    one that all tokens share, each a SwiGLU (three matrices) with a hidden layer of 2,048, and
    a router of one weight per width and expert. How many parameters are in these 58 layers'
    experts and routers?"""
    return 58 * DEEPSEEK.num_parameters(7168) / 1e9


@problem(
    "What a token of Mixtral passes",
    unit="billion parameters",
    source="[Mixtral](https://arxiv.org/abs/2401.04088), table 1",
    hint=(
        "Per layer: two experts, and attention with fewer heads of keys. A token "
        "passes both tables."
    ),
    slips={
        "That is all of them: a token passes 2 of 8 experts.": 46.7,
        "8 x 7 is not 56, and two of them are not 14: attention and tables are shared.": 14.0,
    },
    lesson="The paper says 13 billion active of 47.",
)
def mixtral():
    """Mixtral 8x7B has 32 layers of width 4,096 with 8 experts (SwiGLUs with a hidden layer of
    14,336), 32 heads of queries and 8 of keys and values (128 numbers each), and two tables of
    32,000 words. Each token goes to 2 experts. How many parameters does it pass, tables
    included?"""
    return PRESETS["mixtral-8x7b"].num_active_parameters / 1e9


@problem(
    "Seats of an expert in Switch",
    unit="tokens",
    source="[Fedus et al. 2021](https://arxiv.org/abs/2101.03961), section 2.2 and table 1",
    hint="What would be its even share?",
    slips={
        "That is the even share: there is a quarter more room.": 2**20 / 128,
    },
    within=0,
    lesson="What comes beyond is dropped: the layer passes it on unchanged.",
)
def capacity():
    """Switch Transformers train on 2^20 tokens per batch; each goes to one of 128 experts, and
    an expert has room for 1.25 times its even share. How many tokens of a batch can one expert
    take, over all devices?"""
    return math.ceil(1.25 * 2**20 / 128)


@problem(
    "Why a token visits at most four nodes",
    unit="µs per layer",
    source=(
        "[DeepSeek-V3](https://arxiv.org/abs/2412.19437), sections 3.2.2 and 3.3.3: at "
        "most four nodes per token, 50 GB/s of InfiniBand per GPU, dispatch in FP8"
    ),
    hint="How many copies of a token leave the GPU, and of how many bytes each?",
    slips={
        ("Twice that: a token crosses once per node, not per expert; and FP8 takes one byte."): 4096
        * 8
        * 7168
        / 50e3,
        "50 GB/s are bytes already.": 4096 * 4 * 7168 * 8 / 50e3,
    },
    lesson="One message for each of 8 experts would take twice as long.",
)
def bytes_between_nodes():
    """DeepSeek-V3 sends each token to 8 experts on at most 4 nodes. It crosses InfiniBand once
    per node, and goes on to its experts over NVLink. Its 7,168 numbers travel in FP8. A GPU has
    4,096 tokens. How many microseconds does dispatching them to 4 nodes take at 50 GB/s, if all
    4 are other nodes?"""
    return 4096 * 4 * 7168 / 50e9 * 1e6


@problem(
    "Multiprocessors that only talk",
    unit="% less computing",
    source="[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.2.2",
    hint="It is one ratio.",
    slips={
        "Of all 132, not of the 112 that are left.": 100 * 20 / 112,
    },
    lesson="The report asks makers of GPUs for a unit that does this instead.",
)
def multiprocessors_that_talk():
    """To move tokens between nodes and GPUs, DeepSeek-V3 sets 20 of an H800's 132
    multiprocessors aside: they compute nothing. How much of the GPU's computing is given up
    while they do?"""
    return 100 * 20 / 132
