"""The first value of every parameter: a pure function of its name and the seed."""

import math
from hashlib import blake2b

import torch
from torch import Tensor, nn

from minipar.model.config import LlamaConfig


def initial_weight(config: LlamaConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the first value of one parameter, fp32 on the CPU: a pure function of the arguments.

    Norms are ones. All others are normal with std 0.02. The projections that add to the residual
    stream get 0.02 / sqrt(2L), so that its variance does not grow with depth (Radford et al. 2019,
    GPT-2, section 2.3). A tied head is the embedding. Each expert has a random stream of its own.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if config.tie_embeddings and name == "lm_head.weight":
        name = "model.embed_tokens.weight"
    std = 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        std /= math.sqrt(2 * config.num_layers)
    weight = torch.empty(shape, dtype=torch.float32, device="cpu")
    streams = {name: weight}
    if ".experts." in name:
        streams = {f"{name}.{expert}": part for expert, part in enumerate(weight)}
    for stream, part in streams.items():
        digest = blake2b(f"{seed}:{stream}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        part.normal_(std=std, generator=generator)
    return weight


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Tie, then fill every parameter of `model` by `initial_weight`; skip meta tensors.

    Buffers, which only routers have, begin as zeros.
    """
    model.tie_weights()
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.copy_(initial_weight(model.config, name, tuple(parameter.shape), seed))
