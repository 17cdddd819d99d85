"""Problems from real clusters, for notebook 03: data parallel."""

from minipar.comm.collectives import wire_bytes
from minipar.lab.problems import problem


@problem(
    "A step of ImageNet in an hour",
    unit="ms",
    source="[Goyal et al. 2017](https://arxiv.org/abs/1706.02677)",
    hint="How many steps are ninety epochs?",
    slips={
        "8,192 is the batch of all GPUs together.": 3600e3 / (90 * 1_281_167 / (8192 * 256)),
        "Ninety epochs, not one.": 90 * 255.8,
    },
    lesson=(
        "A GPU had 32 images: a quarter of a second for forward, backward, and an "
        "all-reduce of 100 MB."
    ),
)
def an_hour_of_imagenet():
    """ResNet-50 learnt ImageNet (1,281,167 images, 90 epochs) in an hour, with 8,192 images per
    step over 256 GPUs. How many milliseconds did a step take?"""
    return 3600e3 / (90 * 1_281_167 / 8192)


@problem(
    "And how much of it was the network?",
    unit="ms",
    source="[Goyal et al. 2017](https://arxiv.org/abs/1706.02677), sections 4 and 5.1",
    hint="The ring has one member per server. Its link is given in bits.",
    slips={
        "50 Gbit/s are 6.25 GB/s: 8 bits to a byte.": 31 / 8,
        "An all-reduce sends nearly twice the gradients.": 15.5,
    },
    lesson=("Of a backward pass of 120 ms: it can be hidden, if it begins before backward ends."),
)
def ethernet_between_servers():
    """Those 256 GPUs sat in 32 servers. GPUs of one server summed up their 100 MB of gradients
    first; then the 32 servers all-reduced them over 50 Gbit/s each. How many milliseconds does
    that take in a ring, without latency?"""
    return 1e3 * wire_bytes("all_reduce", 100_000_000, 32) / (50e9 / 8)


@problem(
    "The gradients of BLOOM",
    unit="seconds",
    source=(
        "[BigScience 2022](https://arxiv.org/abs/2211.05100), section 3.4: 48 nodes of "
        "8 GPUs, four Omni-Path links of 100 Gbit/s per node; eight different nodes and "
        "bf16 gradients are our assumption"
    ),
    hint=(
        "Three divisions before the ring: parameters over GPUs, bytes per parameter, "
        "and a node's link over its GPUs."
    ),
    slips={
        "The 8 GPUs of a node share its links.": 2.05625 / 8,
        "All parameters: a GPU has a 48th of them.": 2.056 * 48,
    },
    lesson=("Once per step, and a step took more than a minute and a half: no need to hide it."),
)
def gradients_of_bloom():
    """BLOOM's 176.25 billion parameters were cut over 48 GPUs, and there were 8 replicas. The 8
    GPUs with the same part of the model are in eight different nodes. At the end of a step they
    all-reduce their gradients, in bf16. A node's 8 GPUs share 400 Gbit/s. How many seconds does
    it take in rings, if nothing hides it?"""
    gradients = 2 * 176.25e9 / 48
    return wire_bytes("all_reduce", int(gradients), 8) / (400e9 / 8 / 8)


@problem(
    "Sequences of a replica",
    unit="sequences",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), table 4",
    hint="First the sequences of the whole batch.",
    slips={
        "That is the whole batch: 128 replicas share it.": 2048.0,
        "Replicas share the batch, not GPUs.": 2048 / 16_384,
    },
    within=0,
    lesson=(
        "Twice the replicas would have left 8: the batch limits how many GPUs data "
        "parallelism can use."
    ),
)
def sequences_of_a_replica():
    """Llama 3 405B had a batch of 2^24 tokens, in sequences of 8,192, and 128 replicas of the
    model along dp. How many sequences does a replica compute in each step?"""
    return 2**24 // 8192 // 128


@problem(
    "Twelve thousand GPUs, one step",
    unit="million tokens per second",
    source="[MegaScale](https://arxiv.org/abs/2402.15627), table 2",
    hint="Tokens of a step, over its time.",
    slips={
        "That is a step's.": 6144 * 2048 / 1e6,
        "Sequences have 2,048 tokens.": 6144 / 6.34 / 1e6,
    },
    lesson="At that pace 300 billion tokens, GPT-3's whole training, take 1.75 days.",
)
def throughput_of_megascale():
    """MegaScale trained a model of 175 billion parameters on 12,288 GPUs, 6,144 sequences of
    2,048 tokens per step, in 6.34 s. How many million tokens per second is that?"""
    return 6144 * 2048 / 6.34 / 1e6
