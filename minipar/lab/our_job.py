"""The job that goes through all notebooks: Llama 3 8B on 64 H100s.

Eight nodes of eight GPUs. Inside of a node they talk over NVLink 4. Between nodes each GPU has its
own card for 400 Gb/s of InfiniBand. A step takes 512 sequences of 8,192 tokens. Each notebook ends
with its answer for this job, by arithmetic alone; notebook 13 asks the planner.
"""

from minipar.model.llama import PRESETS

CONFIG = PRESETS["llama-3-8b"]
N = CONFIG.num_parameters
L, D = CONFIG.num_layers, CONFIG.hidden_size
GPUS, NODES = 64, 8
SEQUENCES, T = 512, 8192  # of a step; tokens of a sequence
MEMORY = 80e9  # bytes of a GPU
FLOPS = 0.4 * 989e12  # FLOP/s of a GPU: 40 % of its peak in bf16, as published trainings reach
NVLINK, INFINIBAND = 450e9, 50e9  # bytes/s of a GPU, in each direction
FLOPS_PER_TOKEN = 6 * N + 12 * L * D * T  # forward and backward; attention as the whole square


def ring_speed(size: int = GPUS, nodes: int = NODES) -> float:
    """Return the bytes/s of a rank in rings of `size` ranks that lie in `nodes` nodes.

    The rings use the cards of all their ranks in a node: several rings run at once, each through
    another card (notebook 02).
    """
    return NVLINK if nodes == 1 else min(NVLINK, size // nodes * INFINIBAND)


def all_reduce_seconds(num_bytes: float, size: int = GPUS, nodes: int = NODES) -> float:
    """Return the seconds of an all-reduce in rings, without latency; a gather takes half."""
    return 2 * (size - 1) / size * num_bytes / ring_speed(size, nodes)
