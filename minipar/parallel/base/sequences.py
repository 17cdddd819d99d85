"""Sequences cut along their tokens: what ring attention and Ulysses have in common.

A Llama computes each token alone, except in attention. Two parts of it depend on the whole
sequence: attention needs the tokens of other ranks, RoPE needs positions in the sequence (T19).
"""

import torch
from torch import Tensor, nn

from minipar.comm.mesh import Axis
from minipar.model.llama import Attention, LlamaModel
from minipar.parallel.base.strategy import Strategy


class CutSequences(Strategy):
    """A Llama that takes the tokens of this rank, [B, T/n], and finds their positions itself.

    A subclass has two methods. ``own_tokens(whole)`` cuts this rank's tokens out of the last dim.
    ``attend(core, q, k, v, mask)`` computes attention of this rank's queries q [B, H, T/n, K] over
    the keys of all ranks. k and v are [B, G, T/n, K]; `core` is the attention of one device. Raises
    `ValueError` for a model without `Attention`: its tokens would see only tokens of their rank.
    """

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        if not any(isinstance(module, Attention) for module in model.modules()):
            name = type(model).__name__
            raise ValueError(f"{name} has no Attention of minipar.model.llama to split")
        super().__init__(model, axis)
        # Lambdas, not methods: a deep copy of the model must not copy the process groups.
        number = lambda *call: self._number(*call)  # noqa: E731
        for module in model.modules() if axis.size > 1 else ():
            if isinstance(module, LlamaModel):
                module.register_forward_pre_hook(number, with_kwargs=True)
            if isinstance(module, Attention):
                module.core = lambda *args, core=module.core: self.attend(core, *args)

    def _number(self, module: LlamaModel, args: tuple, kwargs: dict) -> tuple | None:
        """Add the positions of this rank's tokens in the sequence, unless the caller gives them."""
        names = "x", "positions", "mask", "valid"
        call = dict(zip(names, args, strict=False)) | kwargs
        if call.get("positions") is not None:
            return None
        seq_len = call["x"].shape[1] * self.axis.size
        module.config.check_length(seq_len)
        call["positions"] = self.own_tokens(torch.arange(seq_len, device=call["x"].device))
        return tuple(map(call.get, names)), {}

    def finish_backward(self) -> None:
        """Send nothing: the data strategy sums the gradients over the joint axis of cp and dp."""


def chunks_of_equal_length(tensor: Tensor, count: int, dim: int, axis: Axis) -> tuple[Tensor, ...]:
    """Cut `dim`, the tokens, into `count` chunks: [..., T, ...] -> [..., T/count, ...] each.

    Raises `ValueError` unless `count` divides T.
    """
    length = tensor.shape[dim]
    if missing := -length % count:
        raise ValueError(
            f"{axis.name}={axis.size} cuts sequences into {count} chunks, which do not divide "
            f"{length} tokens; pad them to {length + missing}"
        )
    return tensor.chunk(count, dim)
