"""Problems from real clusters, for notebook 02: collectives."""

from minipar.comm.collectives import wire_bytes
from minipar.emulate import link
from minipar.lab.problems import problem


@problem(
    "What nccl-tests calls bus bandwidth",
    unit="GB/s",
    source=(
        "[ml-engineering](https://github.com/stas00/ml-engineering/tree/master/network), "
        "network/README.md; "
        "[nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)"
    ),
    hint="First bytes over time. Then: how often does a byte leave a rank of a ring?",
    slips={
        "That is the algorithm's bandwidth: a ring sends 2 (n-1)/n times the bytes.": 4.294967296
        / 0.03214,
        "With 8 ranks it is 7/8 of twice the bytes.": 2 * 4.294967296 / 0.03214,
    },
    lesson="The hardware has 300: nearly four fifths of it arrive.",
)
def bus_bandwidth():
    """On a node of 8 A100s, an all-reduce of 4,294,967,296 bytes took 32.14 ms. The bus
    bandwidth is what each rank sends in a ring, divided by that time. How much is it?"""
    return wire_bytes("all_reduce", 4_294_967_296, 8) / 0.03214 / 1e9


@problem(
    "A switch that adds",
    unit="times as fast",
    source=(
        "[ml-engineering](https://github.com/stas00/ml-engineering/tree/master/network), "
        "network/README.md: all-reduce of 16 GiB with and without NVLS on 8 H200s"
    ),
    hint="N cancels: compare how many bytes each rank sends in both ways.",
    slips={
        "A ring sends 2 (n-1)/n, not 2: 14/8.": 16 / 9,
        "n + 1 over n: 9/8, not 1.": 1.75,
    },
    lesson="Measured: 480 against 367 GB/s of bus bandwidth, 1.31 times.",
)
def reduced_by_the_switch():
    """With NVLink SHARP, the switch adds. Each rank sends its N bytes to the switch, and gets
    the sums of one n-th of them. Then it sends these sums once more, and the switch spreads
    them. So a rank sends N (n+1)/n bytes; in a ring it sends 2 N (n-1)/n. On 8 ranks, how many
    times as fast would an all-reduce be?"""
    ring = wire_bytes("all_reduce", 8, 8) / 8
    return ring / (9 / 8)


@problem(
    "A ring through 128 replicas",
    unit="ms",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 4: dp=128; 9.6 µs per step "
        "of a ring between nodes is what [NCCL 2.17]"
        "(https://github.com/NVIDIA/nccl/blob/v2.17.1-1/src/graph/tuning.cc) assumed; newer "
        "versions assume 14"
    ),
    hint="How many steps has a ring all-reduce: one round, or two?",
    slips={
        "An all-reduce goes around twice: 2 (n-1) steps.": 127 * 9.6e-3,
    },
    lesson="In that time a link of 400 Gbit/s carries 120 MB. A tree would need 14 steps.",
)
def latency_of_a_long_ring():
    """Llama 3 405B had 128 replicas. An all-reduce among them in one ring: how many
    milliseconds pass in latency alone, at 9.6 µs per step?"""
    return 1e3 * link.seconds("all_reduce", 0, 128, link.parse("ib-ndr"))


@problem(
    "Rings in two dimensions",
    unit="times fewer steps",
    source=(
        "[Mikami et al. 2018](https://arxiv.org/abs/1811.05233v1), 2D-torus all-reduce; "
        "the grid is our assumption"
    ),
    hint=(
        "A reduce-scatter along a row of k ranks takes k - 1 steps, and so does an "
        "all-gather. An all-reduce takes both."
    ),
    slips={
        "The columns all-reduce: 2 (n-1) steps.": 4350 / (63 + 33 + 63),
        "Rows twice: a reduce-scatter, and later an all-gather.": 4350 / (63 + 66),
    },
    lesson="Each rank sends as many bytes as before, in larger and fewer messages.",
)
def two_dimensions():
    """ResNet-50 learnt ImageNet in 224 s on 2,176 GPUs. One ring through all of them has 2 ·
    2,175 steps. On a grid of 34 x 64, reduce-scatter along rows of 64, all-reduce along columns
    of 34, all-gather along rows. How many times fewer steps is that?"""
    ring = 2 * (2176 - 1)
    grid = (64 - 1) + 2 * (34 - 1) + (64 - 1)
    return ring / grid


@problem(
    "From pod to pod",
    unit="Tbit/s",
    source=(
        "[PaLM](https://arxiv.org/abs/2204.02311), section 4: two pods of 3,072 TPUs, 4 "
        "to a host; 1.3 GB per host is from there, the time is our assumption"
    ),
    hint="All hosts of a pod send at the same time. Then bits, and seconds.",
    slips={
        "One pod has 768 hosts of 4 TPUs.": 4 * 79.872,
        "Both directions: count what one pod sends.": 2 * 79.872,
    },
    lesson="The paper speaks of bursts of 81 Tbit/s.",
)
def between_two_pods():
    """PaLM 540B was trained on two pods of 768 hosts. Once per step, each host exchanges about
    1.3 GB of gradients with its partner in the other pod. This exchange must take 0.1 s. How
    much do all hosts of one pod send together, in terabits per second?"""
    return 768 * 1.3e9 * 8 / 0.1 / 1e12
