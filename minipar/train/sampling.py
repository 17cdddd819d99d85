"""Text that a model writes: at the end of a run, and for `minipar generate`."""

import os

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
) -> tuple[str, str]:
    """Return what the tokens [T] say, and the text of `count` more.

    A character that is begun in the one and ended in the other is in the second.
    """
    prompt, device = tokenizer.decode(tokens.tolist()), next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    row = tokens.to(device, torch.int64)[None]
    row = generate(model, row, count, temperature, top_k, generator=generator)
    whole = tokenizer.decode(row[0].tolist())  # at once: a character may be several tokens
    same = len(os.path.commonprefix([prompt, whole]))
    return prompt[:same], whole[same:]
