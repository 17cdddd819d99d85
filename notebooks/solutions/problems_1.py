"""Problems from real clusters, for notebook 01: a Llama on one device."""

from minipar.lab.problems import problem
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.sim.hardware import load

LLAMA_3_405B = LlamaConfig(128_256, 16_384, 53_248, num_layers=126, num_heads=128, num_kv_heads=8)


@problem(
    "Count 405 billion",
    unit="billion parameters",
    source=(
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 3; the published "
        "configuration for 53,248 and 128,256"
    ),
    hint=(
        "Go through one layer, matrix by matrix: which of attention's four are "
        "smaller, and by how much? Then the two tables."
    ),
    slips={
        "Keys and values have 8 heads, not 128.": 405.85 + 2 * 126 * 16_384 * 128 * 120 / 1e9,
        "A SwiGLU has three matrices.": 295.93,
        "Embedding and head are two tables.": 403.75,
    },
    within=0.004,
    lesson="The name is rounded down.",
)
def parameters_of_405b():
    """Llama 3 405B has 126 layers of width 16,384, 128 heads of queries and 8 of keys and
    values (128 numbers each), a SwiGLU with a hidden layer of 53,248, and 128,256 words in an
    embedding and in a head of its own. How many parameters does it have? Norms
    hardly count."""
    return LLAMA_3_405B.num_parameters / 1e9


@problem(
    "What 15.6 trillion tokens cost",
    unit="10^24 FLOPs",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), section 1 and table 3",
    hint="Tokens times parameters times a constant. Watch the powers of ten.",
    slips={
        "Backward costs twice as much as forward: 6, not 2.": 2 * 0.405 * 15.6,
        "With a forward computed again it would be 8: the report counts 6.": 8 * 0.405 * 15.6,
    },
    lesson="The report says 3.8 x 10^25.",
)
def flops_of_405b():
    """Llama 3 405B was trained on 15.6 trillion tokens. How many FLOPs is that, at 6 for each
    of 405 billion parameters and token, with attention left out? Answer in units of 10^24
    FLOPs."""
    return 6 * 405e9 * 15.6e12 / 1e24


@problem(
    "Where did the peak go?",
    unit="% of the peak",
    source=(
        "[Llama 3 8B](https://huggingface.co/meta-llama/Meta-Llama-3-8B), its card; "
        "[H100](https://www.nvidia.com/en-us/data-center/h100/): 989 TFLOP/s in bf16"
    ),
    hint=(
        "Two sides: FLOPs of a token times tokens, and the peak of a GPU times its "
        "seconds. Attention is about a quarter again on top of the matrices."
    ),
    slips={
        "Attention is missing.": 100 * 6 * 7.5046e9 * 15e12 / (1.3e6 * 3600 * 989e12),
        "That is forward alone: backward costs twice as much again.": 100
        * 8.69e23
        / 3
        / (1.3e6 * 3600 * 989e12),
    },
    lesson=(
        "An hour on the bill also holds failures, evaluation and waiting: notebook 13 "
        "takes such a share apart."
    ),
)
def where_half_went():
    """The card of Llama 3 8B says: 15 trillion tokens and 1.3 million hours of H100s. Take
    sequences of 8,192 tokens, 6 FLOPs for each of 7.50 billion multiplying parameters, and for
    attention 12 L D T (32 layers of width 4,096). What share of the hardware's peak is that?"""
    flops = 15e12 * PRESETS["llama-3-8b"].flops_per_token(8192)
    return 100 * flops / (1.3e6 * 3600 * load("h100-ndr").device.peak["bf16"])


@problem(
    "PaLM's utilisation",
    unit="% of the peak",
    source="[PaLM](https://arxiv.org/abs/2204.02311), section 4.1 and appendix B",
    hint=(
        "FLOPs of a token times tokens per second, over the peak of all chips. Heads "
        "times their width is not the model's width here."
    ),
    slips={
        "Recomputation does not count as useful: 6, not 8.": 100
        * 238_300
        * 8
        * 540.35e9
        / (6144 * 275e12),
    },
    within=0.01,
    lesson="The paper says 46.2 %. It introduced the word MFU.",
)
def mfu_of_palm():
    """PaLM 540B (540.35 billion parameters, 118 layers, 48 heads of 256 numbers) took in
    238,300 tokens per second, in sequences of 2,048, on 6,144 TPU v4 of 275 TFLOP/s each. What
    share of the peak is that, at 6 N + 12 L H K T FLOPs per token?"""
    flops_per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    return 100 * 238_300 * flops_per_token / (6144 * 275e12)


@problem(
    "GPT-3 on a thousand GPUs",
    unit="days",
    source="[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 5.1",
    hint="All FLOPs of the training, divided by the FLOPs that all GPUs do in a day.",
    slips={
        "The second forward counts here: 8, not 6.": 6 * 175e9 * 300e9 / (1024 * 140e12) / 86_400,
        "That is one GPU alone: there are 1,024.": 8 * 175e9 * 300e9 / 140e12 / 86_400,
    },
    lesson="The paper says 34.",
)
def gpt_3_on_a_thousand():
    """Megatron-LM trains GPT-3 (175 billion parameters, 300 billion tokens) on 1,024 A100s at
    140 TFLOP/s each. All activations are recomputed, so a token costs 8 FLOPs per parameter: 2
    forward, 2 forward again, 4 backward. How many days does it take?"""
    return 8 * 175e9 * 300e9 / (1024 * 140e12) / 86_400
