"""Problems from real clusters, for notebook 05: mixed precision."""

import torch

from minipar.lab.problems import problem
from minipar.sim.hardware import load
from minipar.sim.memory import Recipe, model_state


@problem(
    "The state of GPT-3 in FP8",
    unit="GB",
    source="[FP8-LM](https://arxiv.org/abs/2310.18313), section 2.2",
    hint="How many bytes has each of the four? Add them up for one parameter first.",
    slips={
        "That is all in float32: 16 bytes.": 175 * 16,
        "The gradient counts as well: one byte.": 175 * 5,
        "fp8 takes one byte.": 175 * 8,
    },
    lesson="In float32 these four take 16 bytes per parameter, 2,800 GB.",
)
def six_bytes():
    """FP8-LM keeps, for each parameter, a master weight in fp16, a gradient in fp8, and of
    Adam's moments the first in fp8 and the second in fp16. How much do these take for GPT-3's
    175 billion parameters, over all GPUs? (Do not count the copies of the weights that the
    matmuls use.)"""
    recipe = Recipe(parameters=2, gradients=1, optimizer=1 + 2)
    return sum(model_state(175e9, recipe=recipe).values()) / 1e9


@problem(
    "How much of a step was products?",
    unit="% of the bf16 step",
    source=(
        "[FP8-LM](https://arxiv.org/abs/2310.18313), abstract: 75 % faster than bf16 on "
        "H100s; [H100](https://www.nvidia.com/en-us/data-center/h100/): 1,979 TFLOP/s "
        "in fp8, 989 in bf16"
    ),
    hint="Let the share be x. How long is the new step, in terms of x, if the old one is 1?",
    slips={
        "That is the time saved: products save only half of their time.": 100 * (1 - 1 / 1.75),
        "Of the bf16 step, not of the new one.": 75.0,
    },
    lesson="Messages in fp8 helped as well, so it was somewhat less.",
)
def share_of_products():
    """FP8-LM trained GPT-3 1.75 times as fast as bf16 did. Suppose that matmuls ran twice as
    fast, and nothing else changed. What share of the bf16 step must the matmuls have taken?"""
    peak = load("h100-ndr").device.peak
    return 100 * (1 - 1 / 1.75) / (1 - peak["bf16"] / peak["fp8"])


@problem(
    "What finer scales cost",
    unit="% more bytes",
    source=(
        "[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.3.2; float32 scales "
        "are our assumption"
    ),
    hint="One scale belongs to each tile. How many bytes do the tile's numbers take?",
    slips={
        "A float32 has 4 bytes.": 100 / 128,
        "FP8 numbers take one byte, not two.": 100 * 4 / 256,
    },
    lesson="For weights, with a scale per 128 x 128, it is 0.02 %.",
)
def scales_of_deepseek():
    """DeepSeek-V3 multiplies in FP8, with a scale for each 128 numbers of an activation, so
    that one large number spoils no more than its own tile. Let a scale be a float32. How many
    per cent more bytes are numbers and scales than the numbers alone?"""
    return 100 * 4 / 128


@problem(
    "A scale for SSD's gradients",
    unit="times",
    source="[Micikevicius et al. 2017](https://arxiv.org/abs/1710.03740), section 3.2",
    hint="fp16 has numbers below its smallest *normal* one: down to that times its eps.",
    slips={
        "That is the smallest normal number: below it fp16 goes on, with fewer bits.": 2.0**13,
    },
    within=0,
    lesson=("The paper says that 8 is enough. Room above decides how much more one may take."),
)
def smallest_scale():
    """Micikevicius and colleagues found that gradients of their detector SSD matter down to
    2^-27, while fp16 has nothing between zero and its smallest number. By how much must the
    loss be multiplied at least, so that 2^-27 becomes that number?"""
    fp16 = torch.finfo(torch.float16)
    return fp16.tiny * fp16.eps / 2**-27


@problem(
    "When bf16 weights stop learning",
    unit="parts in a thousand",
    source=(
        "[Kalamkar et al. 2019](https://arxiv.org/abs/1905.12322), table 1: bf16 has 7 "
        "bits of mantissa"
    ),
    hint=(
        "bf16 stores 7 bits behind the point. What is the next number above 1, and "
        "where between the two does rounding turn?"
    ),
    slips={
        "Half of the step is enough: it is rounded to the nearest.": 7.8125,
        "That is fp16: bf16 has 7 bits of mantissa, not 10.": 0.48828125,
    },
    lesson=(
        "A learning rate of 6e-5, as BLOOM's, is far below that, and Adam moves a "
        "weight by about as much."
    ),
)
def smallest_update():
    """BLOOM multiplied in bf16 and kept its weights in float32. Suppose that it had kept a
    weight of 1 in bf16. How large must an update be, at least, to make the weight larger?
    Answer in thousandths of the weight. (Rounding is to the nearest.)"""
    return 1000 * torch.finfo(torch.bfloat16).eps / 2
