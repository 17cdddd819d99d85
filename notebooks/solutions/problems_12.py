"""Problems from real clusters, for notebook 12: all together."""

import math

from minipar.lab.problems import problem
from minipar.model.llama import LlamaConfig
from minipar.sim.memory import MIXED_ADAM, Recipe, model_state

LLAMA_3_405B = LlamaConfig(128_256, 16_384, 53_248, num_layers=126, num_heads=128, num_kv_heads=8)


@problem(
    "The state of 405 billion parameters, on one GPU",
    unit="GB per GPU",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), tables 3 and 4; float32 "
        "gradients, section 3.3.2"
    ),
    hint="Parameters of one GPU first. Then bytes: one part is whole, two are cut.",
    slips={
        "Gradients and optimizer are cut over the 128 replicas.": 405.85 / 128 * 18,
        "The weights are not sharded over the replicas.": 405.85 / 128 * 18 / 128,
    },
    lesson=(
        "Less than a tenth of the 80 GB: the rest is for activations of up to 16 microbatches."
    ),
)
def state_of_405b():
    """Llama 3 405B (405.9 billion parameters) is cut over 8 tensor-parallel ranks and 16
    stages, and sharded over 128 replicas: bf16 weights stay whole on each replica, float32
    gradients (4 bytes) and the optimizer (12 bytes) are cut. How much does a GPU hold of all
    three, on average?"""
    recipe = Recipe(parameters=2, gradients=4, optimizer=12)
    part = LLAMA_3_405B.num_parameters / (8 * 16)
    return sum(model_state(part, 128, "zero2", recipe).values()) / 1e9


@problem(
    "A checkpoint of BLOOM",
    unit="TiB",
    source=(
        "[BigScience 2022](https://arxiv.org/abs/2211.05100); [its "
        "engineers](https://huggingface.co/blog/bloom-megatron-deepspeed): 329 GB and "
        "2.3 TB"
    ),
    hint="Which four things are in it, at how many bytes per parameter? Then mind the unit.",
    slips={
        "A tebibyte is 2^40 bytes, not 10^12.": 176.25e9 * 14 / 1e12,
        "And the bf16 weights themselves: 2 bytes more.": 176.25e9 * 12 / 2**40,
        "Gradients are not saved.": 176.25e9 * 16 / 2**40,
    },
    lesson="They say 2.3 TB.",
)
def checkpoint_of_bloom():
    """BLOOM has 176.25 billion parameters. Its checkpoint holds bf16 weights, and in float32 a
    copy of them and Adam's two moments. Its engineers say that the bf16 weights are 329 GB, so
    its GB must be 2^30 bytes. How large is the checkpoint in units of 2^40 bytes?"""
    saved = MIXED_ADAM.parameters + MIXED_ADAM.optimizer
    return 176.25e9 * saved / 2**40


@problem(
    "How often 16,384 GPUs fail",
    unit="hours",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4",
    hint="Which of the interruptions count?",
    slips={
        "Planned ones are counted there.": 54 * 24 / 466,
    },
    lesson="That is nearly eight a day.",
)
def between_failures():
    """In 54 days of training on 16,384 GPUs, Llama 3 405B was interrupted 466 times: 47 times
    for maintenance, and 419 times unexpectedly. How many hours lie between two unexpected
    interruptions?"""
    return 54 * 24 / 419


@problem(
    "How often to save",
    unit="minutes",
    source=(
        "[Young 1974](https://doi.org/10.1145/361147.361115); [Llama "
        "3](https://arxiv.org/abs/2407.21783), section 3.3.1: 2 TB/s sustained"
    ),
    hint="First C, from the size of a checkpoint; then M in seconds.",
    slips={
        "The rule has a 2 under the root.": math.sqrt(2.841 * 11_135) / 60,
        "That is in seconds.": math.sqrt(2 * 2.841 * 11_135),
    },
    lesson=("Then C / 251 s, about 1 %, goes into saving, and as much into work that is lost."),
)
def when_to_save():
    """Saving too often costs time, saving too seldom loses work. For a job that fails every M
    seconds, and a checkpoint that takes C seconds, Young's rule is to save every sqrt(2 C M)
    seconds. Take M = 3.093 hours, 405.9 billion parameters of 14 bytes (bf16 weights, float32
    copy and moments), and storage of 2 TB/s, while training stands still. How many minutes are
    between two checkpoints?"""
    failure = 54 * 24 * 3600 / 419
    saving = 14 * LLAMA_3_405B.num_parameters / 2e12
    return math.sqrt(2 * saving * failure) / 60


@problem(
    "Half again as many nodes",
    unit="seconds per step",
    source="[Smith et al. 2022](https://arxiv.org/abs/2201.11990), section 2.4",
    hint=(
        "How many microbatches has a replica in both cases? A step lasts as long as "
        "these *and* its bubble."
    ),
    slips={
        "That is without the bubble, which does not shrink.": 60.1 * 160 / 240,
        "p - 1 = 34 microbatches, not 35.": 60.1 * 195 / 240,
    },
    within=0.01,
    lesson="Measured: 44.4 s. The reduction over more replicas is not in our prediction.",
)
def half_again_as_many_nodes():
    """Megatron-Turing NLG 530B ran in replicas of 280 GPUs (8 tensor-parallel ranks, 35 stages)
    with a global batch of 1,920 sequences, one per microbatch. On 280 nodes of 8 GPUs, a step
    took 60.1 s. How long should it take on 420 nodes? There are more replicas, so each has
    fewer microbatches, but the bubble is still 34 of them."""
    before, after = 1920 // (280 * 8 // 280), 1920 // (420 * 8 // 280)  # microbatches of a replica
    return 60.1 * (after + 35 - 1) / (before + 35 - 1)
