"""The first value of every parameter: a pure function of its name and the seed."""

import math
from hashlib import blake2b

import torch
from torch import Tensor, nn

from minipar.model.config import LlamaConfig


def initial_weight(config: LlamaConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The first value of one parameter, fp32 on the CPU: a pure function of its arguments.

    Norms are ones. All else is normal with std 0.02; the two projections that add to the residual
    stream get 0.02 / sqrt(2L), so that its variance does not grow with depth (Radford et al. 2019,
    GPT-2, section 2.3). A tied head is the embedding, by whichever name it is asked for. Of experts
    in one tensor each has a stream of its own.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if config.tie_embeddings and name == "lm_head.weight":
        name = "model.embed_tokens.weight"
    std = 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        std /= math.sqrt(2 * config.num_layers)
    weight = torch.empty(shape, dtype=torch.float32, device="cpu")
    if ".experts." in name:
        parts = {f"{name}.{number}": part for number, part in enumerate(weight)}
    else:
        parts = {name: weight}
    for stream, part in parts.items():
        digest = blake2b(f"{seed}:{stream}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        part.normal_(std=std, generator=generator)
    return weight


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Tie, then give every parameter that `model` holds its `initial_weight`; skip meta tensors.

    Buffers, which routers have, begin as zeros.
    """
    model.tie_weights()
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.copy_(initial_weight(model.config, name, tuple(parameter.shape), seed))
