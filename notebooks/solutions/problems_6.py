"""Problems from real clusters, for notebook 06: sharded data parallel."""

from minipar.lab.problems import problem
from minipar.model.llama import PRESETS
from minipar.sim.hardware import load
from minipar.sim.memory import FP32_ADAM, MIXED_ADAM, model_state


@problem(
    "The figure that made ZeRO known",
    unit="GB per GPU",
    source="[Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), figure 1",
    hint="Which of the three parts does ZeRO-2 leave whole on each GPU?",
    slips={
        "That is ZeRO-1: here the gradients are cut as well.": 31.40625,
        "That is ZeRO-3: here the weights stay whole.": 1.875,
        "That is data parallelism: nothing is cut.": 120.0,
    },
    lesson="The paper's figure says 16.6 GB.",
)
def zero_2_on_64():
    """The ZeRO paper takes a model of 7.5 billion parameters on 64 GPUs, trained in mixed
    precision with Adam: 2 bytes per parameter for weights, 2 for gradients, 12 for the
    optimizer. How much memory does the model state take on each GPU with ZeRO-2? (1 GB is a
    billion bytes.)"""
    return sum(model_state(7.5e9, 64, "zero2", MIXED_ADAM).values()) / 1e9


@problem(
    "A model of one billion parameters on consumer cards",
    unit="GB per card",
    source=(
        "[Llama 3.2 1B](https://huggingface.co/meta-llama/Llama-3.2-1B), its card; [RTX "
        "4090](https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090/): "
        "24 GB"
    ),
    hint="Which of the three parts does ZeRO-1 cut, and how many bytes is it per parameter?",
    slips={
        "That is data parallelism: Adam's 8 bytes are still whole.": 16 * 1.2358144,
        "That is ZeRO-2: in ZeRO-1 gradients stay whole.": (4 + 12 / 8) * 1.2358144,
    },
    lesson="Without ZeRO it is 19.8 GB of a card's 24, and activations want their share.",
)
def one_billion_on_eight_cards():
    """Llama 3.2 1B has 1.236 billion parameters (its embedding is tied to its head). You train
    it on eight consumer cards of 24 GB each, in float32 with Adam: 4 bytes for a weight, 4 for
    its gradient, 8 for the optimizer. How much does the model state take on each card with
    ZeRO-1?"""
    parameters = PRESETS["llama-3.2-1b"].num_parameters
    return sum(model_state(parameters, 8, "zero1", FP32_ADAM).values()) / 1e9


@problem(
    "OPT-175B on 992 GPUs",
    unit="GB per GPU",
    source=(
        "[Zhang et al. 2022](https://arxiv.org/abs/2205.01068), section 2.4; 16 bytes "
        "per parameter are our assumption"
    ),
    hint="Both kinds cut the model state. Over how many GPUs together?",
    slips={
        "Tensor parallelism cuts as well: divide by its 8.": 175 * 16 / 124,
        "Weights and gradients alone: where is the optimizer?": 175 * 4 / 992,
    },
    lesson="That is 3.5 % of a GPU's memory.",
)
def opt():
    """OPT-175B was trained on 992 GPUs of 80 GB: tensor parallelism over 8 of them, fully
    sharded data parallelism over the other 124. Count 16 bytes per parameter (2 + 2 + 12), all
    of them sharded. How much model state is left on each GPU?"""
    return sum(model_state(175e9 / 8, 124, "zero3", MIXED_ADAM).values()) / 1e9


@problem(
    "How many tokens pay for a gather",
    unit="tokens per GPU",
    source=(
        "[H100](https://www.nvidia.com/en-us/data-center/h100/): 989 TFLOP/s in bf16; "
        "400 Gbit/s per GPU and the batch as in [Llama "
        "3](https://arxiv.org/abs/2407.21783), section 3.3"
    ),
    hint=(
        "Write the time to compute and the time on the wire for *one* parameter; only "
        "one of them grows with the tokens."
    ),
    slips={
        "400 Gbit/s are 50 GB/s: 8 bits to a byte.": 989e12 / 400e9,
        "Three journeys: two gathers and one reduction.": 989e12 / 50e9 / 3,
        "6 FLOPs per parameter and token: 2 are forward alone.": 3 * 989e12 / 50e9,
    },
    lesson=("Llama 3 405B had 1,024 tokens per GPU in a step: sharding alone would have waited."),
)
def tokens_that_hide_a_gather():
    """Fully sharded data parallelism over many nodes: in each step a GPU receives every weight
    twice (forward, backward) and sends every gradient once, in bf16. Its link carries 400
    Gbit/s, its peak is 989 TFLOP/s, and a token costs 6 FLOPs per parameter. How many tokens
    must each GPU compute in a step, so that at this peak computing takes as long as
    communication? Take (n-1)/n as 1."""
    machine = load("h100-ndr")
    seconds_per_token = 6 / machine.device.peak["bf16"]  # of one parameter
    return 3 * 2 / machine.between.bandwidth / seconds_per_token


@problem(
    "13 billion parameters on one V100",
    unit="GB of host memory",
    source="[Ren et al. 2021](https://arxiv.org/abs/2101.06840), section 3",
    hint="Of sixteen bytes, which part stays on the GPU?",
    slips={
        "That is what the GPU holds: its fp16 weights.": 26.0,
        "Gradients go to the host, too: 2 bytes more.": 12 * 13.0,
        "All 16 bytes: but the fp16 weights stay on the GPU.": 16 * 13.0,
    },
    lesson="The GPU keeps 26 GB of weights, of its 32.",
)
def offload():
    """ZeRO-Offload trains 13 billion parameters on one V100 of 32 GB. In mixed precision with
    Adam (2 + 2 + 12 bytes), the fp16 weights stay on the GPU; gradients go to the host as they
    are computed, and the optimizer lives there. How much memory of the host do gradients and
    optimizer take?"""
    held = model_state(13e9, recipe=MIXED_ADAM)
    return (held["gradients"] + held["optimizer"]) / 1e9
