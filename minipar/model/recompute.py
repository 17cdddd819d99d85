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
    """Choose what every `Block` of `model` keeps for backward; backward computes the rest again.

    - "none": keep all.
    - "full": keep the block's input only. Backward repeats the forward of the block: about 1/3 more
      FLOPs (Chen et al. 1604.06174).
    - "selective": keep results that cost many FLOPs, repeat the cheap ones. Korthikanti et al.
      (2205.05198, section 5) drop the T x T matrices of attention. Fused attention never stores
      these matrices. So this mode keeps the results of matmuls and of attention. It repeats norms,
      rotations and the product in SwiGLU, with hardly any extra FLOPs. The result of a layer's last
      matmul (down) is not kept if backward neither needs nor repeats it.

    Gradients are the same in all modes. May be called again to change the mode.
    """
    keep_nothing = lambda _: (nullcontext(), casts.same_again())  # noqa: E731
    contexts = {"none": None, "full": keep_nothing, "selective": _keep_products}
    if mode not in contexts:
        raise ValueError(f"mode={mode!r} is unknown; use {', '.join(map(repr, contexts))}")
    for module in model.modules():
        if isinstance(module, Block):
            make = contexts[mode] and partial(contexts[mode], module)
            module.checkpoint = make and partial(checkpoint, use_reentrant=False, context_fn=make)


def _keep_products(block: Block) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return contexts of a forward and of its recomputation."""
    last = _width_of_last(block)

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> Policy:
        is_last = op is torch.ops.aten.mm.default and args[0].shape[-1] == last
        # Recomputation ends when backward has all saved tensors. An ordinary matmul saves its
        # inputs before it runs, so the last matmul is not repeated. An autograd function (of a
        # zero-bubble pipeline, of overlap.py) saves its inputs after it ran: then keep its result.
        is_repeated = not torch.is_grad_enabled()
        is_kept = op in _KEPT and (is_repeated or not is_last)
        return Policy.MUST_SAVE if is_kept else Policy.PREFER_RECOMPUTE

    forward, recompute = create_selective_checkpoint_contexts(policy)
    return forward, _both(casts.same_again(), recompute)


def _width_of_last(block: Block) -> int | None:
    """Return F, which identifies the last matmul of a layer; None if other matmuls sum over F.

    A mixture needs the results of its experts for their weights, so it has no such matmul.
    """
    if not isinstance(block.mlp, MLP):
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
