"""Problems from real clusters, for notebook 13: choosing."""

from minipar.lab.problems import problem
from minipar.model.llama import LlamaConfig
from minipar.sim.hardware import load

LLAMA_3_405B = LlamaConfig(128_256, 16_384, 53_248, num_layers=126, num_heads=128, num_kv_heads=8)


@problem(
    "A step of Llama 3 405B",
    unit="seconds",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), table 4",
    hint=("FLOPs of a token in two parts, times the tokens, over what all GPUs do in a second."),
    slips={
        "That is at the peak of 989 TFLOP/s.": 2**24 * 2.6256e12 / (16_384 * 989e12),
        "6 FLOPs per parameter and token: 2 are forward alone.": 2**24
        * 2.6256e12
        / (16_384 * 400e12)
        / 3,
    },
    within=0.03,
    lesson="Almost 17 million tokens in less than seven seconds.",
)
def step_of_405b():
    """Llama 3 405B trained on 16,384 H100s with 2^24 tokens per step (2,048 sequences of
    8,192), at 400 TFLOP/s per GPU. How long is a step? Count 6 FLOPs for each of 403.8 billion
    multiplying parameters and token, and attention over the whole T x T square of 126 layers of
    width 16,384 (12 L D T per token)."""
    flops = 2**24 * LLAMA_3_405B.flops_per_token(8192)
    return flops / (16_384 * 400e12)


@problem(
    "DeepSeek-V3's step, from its bill",
    unit="% of the bf16 peak",
    source="[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 1 and table 1",
    hint="FLOPs that were needed over FLOPs that the hours could have done.",
    slips={
        "A token passes 37 billion parameters, not 671.": 100
        * 6
        * 671e9
        * 1e12
        / (180e3 * 3600 * 989e12),
        "That is of the FP8 peak.": 100 * 6 * 37e9 * 1e12 / (180e3 * 3600 * 1979e12),
    },
    lesson="Its products run in FP8, whose peak is twice as high: of that it is 17 %.",
)
def mfu_of_deepseek():
    """DeepSeek-V3 needs 180,000 GPU hours of H800s (989 TFLOP/s in bf16, as an H100) for each
    trillion tokens. Each token uses 37 billion parameters. What share of the bf16 peak is this,
    at 6 FLOPs per parameter and token, with attention left out?"""
    peak = load("h100-ndr").device.peak["bf16"]
    return 100 * 6 * 37e9 * 1e12 / (180e3 * 3600 * peak)


@problem(
    "Tokens per second and GPU",
    unit="times as many tokens",
    source=(
        "[DeepSeek-V3](https://arxiv.org/abs/2412.19437), table 1 and section 1; "
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 4"
    ),
    hint="Tokens over GPUs and seconds, for each of the two. An hour has 3,600 seconds.",
    slips={
        "That is the ratio of the parameters that a token passes.": 405 / 37,
        "That is DeepSeek-V3's number alone.": 14.8e12 / (2.664e6 * 3600),
    },
    within=0.03,
    lesson="A token passes 37 billion parameters there and 405 billion here: 11 times as many.",
)
def tokens_per_second():
    """DeepSeek-V3 was pre-trained on 14.8 trillion tokens in 2,664,000 GPU hours. Llama 3 405B
    trains 2^24 tokens in a step of 6.7 seconds, on 16,384 GPUs. How many times as many tokens
    per second does one GPU train for DeepSeek-V3 as one GPU for Llama 3?"""
    deepseek = 14.8e12 / (2.664e6 * 3600)
    return deepseek / (2**24 / 16_384 / 6.7)


@problem(
    "Twice the GPUs, the same batch",
    unit="% of perfect",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), table 4",
    hint="Twice a cluster would be twice its throughput, if each GPU kept its speed.",
    slips={
        "That is the speed-up: compare it with a perfect 2.": 100 * 2 * 400 / 430,
    },
    within=0.01,
    lesson="Each replica has half as many microbatches, so the bubble is larger.",
)
def twice_the_gpus():
    """Llama 3 405B ran on 8,192 GPUs at 430 TFLOP/s each, and on 16,384 GPUs at 400 TFLOP/s
    each, with as many tokens per step. What is the throughput of the larger cluster, in per
    cent of twice that of the smaller one?"""
    return 100 * (16_384 * 400) / (2 * 8192 * 430)


@problem(
    "A trillion parameters in three months",
    unit="days",
    source=(
        "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 5.1 and equation 4"
    ),
    hint="The same division as in P1.5.",
    slips={
        "Recomputation adds a forward: 8 FLOPs, not 6.": 6
        * 450e9
        * 1e12
        / (3072 * 163e12)
        / 86_400,
        "That is at A100's peak of 312 TFLOP/s.": 8 * 450e9 * 1e12 / (3072 * 312e12) / 86_400,
    },
    lesson="The paper says 84.",
)
def days_of_a_trillion():
    """Megatron-LM ran a trillion parameters on 3,072 A100s at 163 TFLOP/s each, recomputing all
    activations: a token costs 8 FLOPs per parameter. How many days would 450 billion tokens
    take?"""
    return 8 * 450e9 * 1e12 / (3072 * 163e12) / 86_400
