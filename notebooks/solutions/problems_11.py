"""Problems from real clusters, for notebook 11: expert parallelism."""

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
    32,000 words. Each token goes to 2 experts. How many parameters does a token use, tables
    included?"""
    return PRESETS["mixtral-8x7b"].num_active_parameters / 1e9


@problem(
    "Empty seats in Switch",
    unit="% of the seats",
    source="[Fedus et al. 2021](https://arxiv.org/abs/2101.03961), section 2.2 and table 1",
    hint="Take the even share as 1. How many seats has an expert, and how many of them are taken?",
    slips={
        "That is the share of tokens that are dropped.": 100 * 0.5 * 0.35,
        "Of the seats: there are 1.25 for each token.": 100 * (1.25 - 0.825),
        "A full expert has 1.25 times its even share, and no more.": 100 * (1.25 - 1) / 1.25,
    },
    lesson="Empty seats are computed all the same. And the full experts drop 17.5 % of the tokens.",
)
def empty_seats():
    """In Switch Transformers each token goes to one of 128 experts, and an expert has seats for
    1.25 times its even share of the tokens. Say that one half of the experts are chosen for 1.6
    times their even share, and the other half for 0.4 times. How many per cent of all seats stay
    empty?"""
    taken = (min(1.6, 1.25) + min(0.4, 1.25)) / 2
    return 100 * (1.25 - taken) / 1.25


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
    unit="% less time",
    source="[DeepSeek-V3](https://arxiv.org/abs/2412.19437), sections 3.2.1 and 3.2.2",
    hint="How long do the multiprocessors that are left compute? How long was the step before?",
    slips={
        "The 112 that are left compute longer.": 50.0,
        "That is how many more steps fit into an hour. Asked is the time of one.": 100
        * (2 * 112 / 132 - 1),
        "Before, communication came on top of computing.": 100 * 20 / 132,
    },
    lesson="The report asks makers of GPUs for a unit that does this instead.",
)
def multiprocessors_that_talk():
    """In a layer of DeepSeek-V3, communication takes about as long as computing, if one follows
    the other. To hide it, 20 of an H800's 132 multiprocessors only move tokens. The other 112
    compute all the time. How much less time does a layer take, if all communication is hidden?"""
    return 100 * (1 - 132 / 112 / 2)
