"""Activation checkpointing: keep less of the forward pass, compute it again in backward.

Sources: Chen et al. 1604.06174; Korthikanti et al. 2205.05198, section 5.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from minipar.model import casts
from minipar.model.llama import MLP, Block

_KEPT = {  # matrix products and fused attention, as autograd sees them on CPU and CUDA
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def checkpoint_activations(model: nn.Module, mode: str = "full") -> None:
    """Choose what every `Block` of `model` keeps for backward; the rest is computed once more.

    - "none": keep all.
    - "full": keep the block's input alone; backward runs the block's forward again, about 1/3 more
      FLOPs (Chen et al. 1604.06174).
    - "selective": keep what is dear to compute, drop what is cheap. Korthikanti et al. (2205.05198,
      section 5) drop the T x T matrices inside attention: much memory, few FLOPs. Fused attention
      never stores these, so the same rule now picks what is left: keep the results of matrix
      products and of attention, but for a layer's last, which backward does not need; compute
      norms, rotations and SwiGLU's product again. Hardly any extra FLOPs. (The last is kept, too,
      where it would be computed again: in a mixture, in tensor parallelism with overlap, in a
      zero-bubble pipeline, and where it is as wide as others.)

    Gradients are those of "none". May be called again to change the mode.
    """
    contexts = {"none": None, "full": _keep_nothing, "selective": _keep_products}
    if mode not in contexts:
        raise ValueError(f"mode={mode!r} is unknown; use {', '.join(map(repr, contexts))}")
    for module in model.modules():
        if isinstance(module, Block):
            make = contexts[mode] and partial(contexts[mode], module)
            module.checkpoint = make and partial(checkpoint, use_reentrant=False, context_fn=make)


def _keep_nothing(_: Block) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a forward and of its recomputation."""
    return nullcontext(), casts.same_again()


def _keep_products(block: Block) -> tuple[AbstractContextManager, AbstractContextManager]:
    last = _width_of_last(block)

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> Policy:
        is_last = op is torch.ops.aten.mm.default and args[0].shape[-1] == last
        # The repetition ends where backward has all it needs. Plain products save their inputs
        # first, and are not reached; an autograd function, without gradients in it, does so last.
        is_reached = not torch.is_grad_enabled()
        is_kept = op in _KEPT and (is_reached or not is_last)
        return Policy.MUST_SAVE if is_kept else Policy.PREFER_RECOMPUTE

    forward, recompute = create_selective_checkpoint_contexts(policy)
    return forward, _both(casts.same_again(), recompute)


def _width_of_last(block: Block) -> int | None:
    """Return what the last product of a layer sums over; None if others do so, too."""
    if not isinstance(block.mlp, MLP):  # the results of experts are weighed
        return None
    attention = block.self_attn
    down, *others = (
        m.weight.shape[-1] for m in (block.mlp.down_proj, attention.q_proj, attention.o_proj)
    )
    return None if down in others else down


@contextmanager
def _both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    with outer, inner:
        yield
