"""Master weights: the model computes in 16 bits, the optimizer steps in 32.

Idea.   A step changes a weight by a few thousandths, which bf16 would round away. So there are two
        tensors. The *working weight* is the parameter of the model. The optimizer steps its
        *master*. After each step the working weight is the master, rounded.
Math.   m <- m - update(g, state);  w = bf16(m).  g = sum over microbatches and ranks of dL/dw, each
        in bf16 as backward computes it, the sum in float32.
Memory. Bytes per parameter: 2 working weight + 4 gradient + 4 master + 8 AdamW, 18 in all. Autocast
        over float32 weights needs 16, 2 more while its cast weights live, and wider activations.
Costs you. Activations in bf16, also the residual stream. Autocast keeps this stream in float32.
Source. Micikevicius et al. 1710.03740, section 3.1; float32 sums of gradients as Megatron-LM's
        `main_grad`.
In torch: a mixed precision policy of `fully_shard`, which holds masters as shards.
Proved by tests/parallel/test_masters.py and tests/law/test_masters.py.

`keep` is for whole masters: on one device, with ddp, and for shards of tensor or pipeline
parallelism. Under ZeRO 1 and 2 a rank has only the masters of its slices:
``zero.apply(working_dtype=)``. Under ZeRO 3 shards are the masters: ``fsdp.apply(compute_dtype=)``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minipar.observe import memory
from minipar.parallel.base.shards import piece_of, region_of


@torch.no_grad()
def keep(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Cast the parameters of `model` to `dtype`; `optimizer` steps their former values.

    These masters are ``p.master``. Gradients add up in the dtype of the master. While `optimizer`
    steps, or loads its state, ``p.data`` *is* the master. Frozen parameters are cast and have no
    master. Integers stay as they are. So do parameters that another optimizer steps: call `keep`
    once for each optimizer.
    """
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    working: dict[nn.Parameter, Tensor] = {}
    for p in filter(torch.is_floating_point, model.parameters()):
        if p in stepped:
            master, p.data = p.data, p.data.to(dtype, copy=True)
            p.master, p.grad_dtype, p.rounded = master, master.dtype, p._version
            working[p] = p.data
            memory.tag("optimizer", master)
        elif not p.requires_grad:
            p.data = p.data.to(dtype)

    def put_masters(*_: Any) -> None:
        for p in working:
            p.data = master_of(p)

    @torch.no_grad()
    def put_working(*_: Any) -> None:
        if working:  # torch raises for empty lists
            torch._foreach_copy_([*working.values()], [p.master for p in working])
        for p, own in working.items():
            p.data, p.rounded = own, p._version

    optimizer.register_step_pre_hook(put_masters)
    optimizer.register_step_post_hook(put_working)
    optimizer.register_load_state_dict_pre_hook(put_masters)
    optimizer.register_load_state_dict_post_hook(put_working)


@torch.no_grad()
def keep_slices(model: nn.Module, buckets: Iterable[Any], dtype: torch.dtype) -> None:
    """Cast the parameters of `model` to `dtype`; the slices of ZeRO's `buckets` are the masters."""
    for bucket in buckets:
        if bucket.shard.is_floating_point():
            bucket.move(bucket.shard.clone())
            memory.tag("optimizer", bucket.shard)
            bucket.bind(torch.zeros_like(bucket.weights, dtype=dtype))
            for p, piece in zip(bucket.parameters, bucket.pieces, strict=True):
                p.grad_dtype, p.master, p.rounded = piece.dtype, piece, p._version
    for p in model.parameters():
        if p.is_floating_point() and not hasattr(p, "master"):  # frozen, or without numbers
            p.data = p.data.to(dtype)


@torch.no_grad()
def master_of(p: nn.Parameter) -> Tensor:
    """Return the master of `p`, or of this rank's slice; first copy writes into `p` to the master.

    A write changes ``p._version``, unless it goes through ``p.data``. A number of the master
    changes only where the working weight differs from the rounded master. The others stay exact.
    """
    if p._version != p.rounded:
        p.rounded = p._version
        flat = region_of(piece_of(p)).flat  # of ZeRO's slice
        working = p.data if flat is None else p.data.flatten()[flat].view_as(p.master)
        is_own = working == p.master.to(working.dtype)
        p.master.data.copy_(torch.where(is_own, p.master, working.to(p.master.dtype)))
    return p.master
