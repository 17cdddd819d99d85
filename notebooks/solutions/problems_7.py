"""Problems from real clusters, for notebook 07: tensor parallel."""

from minipar.comm.collectives import wire_bytes
from minipar.lab.problems import problem
from minipar.model.llama import LlamaConfig


@problem(
    "The bytes of one layer of GPT-3",
    unit="MB per GPU",
    source="[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), sections 2.3 and 5",
    hint=(
        "How many bytes has one activation? How many all-reduces are there, and how "
        "many bytes does each send per rank?"
    ),
    slips={
        "That is one all-reduce: a layer has four.": 1.75 * 2048 * 12_288 * 2 / 1e6,
        "Half of it: is that forward alone, or an all-reduce counted as one journey?": 4
        * 0.875
        * 2048
        * 12_288
        * 2
        / 1e6,
        "That is 2 N for each all-reduce: with 8 ranks it is 7/8 of it.": 8
        * 2048
        * 12_288
        * 2
        / 1e6,
    },
)
def bytes_of_a_layer():
    """GPT-3 (width 12,288) is trained with tensor parallelism over 8 GPUs, in microbatches of
    one sequence of 2,048 tokens. A layer all-reduces its activation twice in forward and twice
    in backward, in 16 bits. How many megabytes does each GPU send for one layer and one
    microbatch, forward and backward together, in a ring?"""
    activation = 2 * 2048 * 12_288
    return 4 * wire_bytes("all_reduce", activation, 8) / 1e6


@problem(
    "What that takes on NVLink",
    unit="% of the computing time",
    source=(
        "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 5: A100 "
        "(300 GB/s of NVLink in one direction), 140 TFLOP/s per GPU for GPT-3"
    ),
    hint=("Two times: FLOPs of an eighth of the layer over its speed, and bytes over the link's."),
    slips={
        "A GPU does an eighth of the FLOPs.": 100
        * 352.3e6
        / 300e9
        / (72 * 12_288**2 * 2048 / 140e12),
        "6 FLOPs per parameter and token: 2 are forward alone.": 300
        * 352.3e6
        / 300e9
        / (72 * 12_288**2 * 2048 / 8 / 140e12),
    },
    lesson="And none of it is hidden, as the next product waits for it.",
)
def inside_a_node():
    """The same layer and microbatch, forward and backward. Its matrices have 12 D² parameters,
    and each parameter costs 6 FLOPs per token; leave attention out. A GPU does an eighth of
    that, at the 140 TFLOP/s that the paper measured, and sends the bytes of the last problem
    (352 MB) at 300 GB/s. How long is communication, in per cent of computing?"""
    communication = 4 * wire_bytes("all_reduce", 2 * 2048 * 12_288, 8) / 300e9
    computing = 6 * 12 * 12_288**2 * 2048 / 8 / 140e12
    return 100 * communication / computing


@problem(
    "And across nodes",
    unit="% of the computing time",
    source=(
        "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 5: eight "
        "InfiniBand cards of 200 Gbit/s per node"
    ),
    hint="Only the link has changed: by what factor?",
    slips={
        "200 Gbit/s are 25 GB/s: 8 bits to a byte.": 100
        * 352.3e6
        / 200e9
        / (72 * 12_288**2 * 2048 / 8 / 140e12),
    },
    lesson="Therefore tensor parallelism ends where NVLink does.",
)
def across_nodes():
    """Now the 8 GPUs of the last problem sit in eight different nodes, and each sends its 352
    MB over a card of 200 Gbit/s. How long is communication, in per cent of the same computing
    time?"""
    communication = 4 * wire_bytes("all_reduce", 2 * 2048 * 12_288, 8) / (200e9 / 8)
    computing = 6 * 12 * 12_288**2 * 2048 / 8 / 140e12
    return 100 * communication / computing


@problem(
    "A loss without logits in one place",
    unit="times fewer bytes",
    source=(
        "[Megatron-LM](https://arxiv.org/abs/1909.08053), section 3; "
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 3"
    ),
    hint=(
        "Per token: what does a rank send in an all-gather of all words, and what in three "
        "all-reduces of one number?"
    ),
    slips={
        "An all-reduce sends twice what an all-gather sends.": 128_256 * 2 / (3 * 4),
        "There are three numbers: maximum, sum, and the target's logit.": 128_256 * 2 / (2 * 2 * 4),
    },
    lesson="In float32, the logits of one sequence of 8,192 tokens would also be 4.2 GB.",
)
def loss_by_words():
    """Llama 3 has a vocabulary of 128,256 words, and 8 tensor-parallel ranks cut the head along
    the words. For the loss, the ranks could all-gather the logits in bf16. Or they all-reduce
    three float32 numbers per token: the largest logit, the sum of the exponentials, and the logit
    of the target. How many times fewer bytes does a rank send in the second way?"""
    gathered = wire_bytes("all_gather", 2 * 128_256, 8)
    return gathered / (3 * wire_bytes("all_reduce", 4, 8))


@problem(
    "The weights of 405 billion parameters",
    unit="GB per GPU",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 3; the checkpoint's "
        "configuration for 128,256 words and a hidden layer of 53,248"
    ),
    hint=(
        "Exercise 1.2 counts such a model. Everything that was counted is shared out "
        "over ranks *and* stages."
    ),
    slips={
        "Tensor parallelism alone: there are 16 stages, too.": 405.85 * 2 / 8,
        "Stages alone: each is cut over 8 ranks.": 405.85 * 2 / 16,
        "bf16 takes 2 bytes.": 405.85 * 4 / 128,
    },
    lesson=(
        "With gradients and Adam at 16 bytes, it would be 51 GB of the 80: hence "
        "sharding over the 128 replicas."
    ),
)
def weights_of_405b():
    """Llama 3 405B has 126 layers of width 16,384, 128 heads of queries and 8 of keys and
    values, a hidden layer of 53,248, and a vocabulary of 128,256 (embedding and head are two
    tables). It is cut over 8 tensor-parallel ranks and 16 stages. How large are the bf16
    weights of a GPU, on average?"""
    llama = LlamaConfig(128_256, 16_384, 53_248, num_layers=126, num_heads=128, num_kv_heads=8)
    return 2 * llama.num_parameters / (8 * 16) / 1e9
