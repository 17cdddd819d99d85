"""Text that a model writes: at the end of a run, and for `minipar generate`."""

import torch
from torch import Tensor

from minipar.model.llama import Llama, generate
from minipar.train.tokenizer import Tokenizer


def write(
    model: Llama,
    tokenizer: Tokenizer,
    tokens: Tensor,
    count: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 40,
) -> str:
    """Return the text of the tokens [T], and of `count` more that `model` draws."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    model.eval()  # in which experts drop nothing
    row = tokens.to(device, torch.int64)[None]
    row = generate(model, row, count, temperature, top_k, generator=generator)
    return tokenizer.decode(row[0].tolist())
