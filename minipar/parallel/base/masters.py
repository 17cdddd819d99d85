"""Master weights: a parameter computes in 16 bits, and learns in 32.

Idea.   What a step adds to a weight is thousands of times smaller than the weight, and in bf16 it
        would round to nothing. So there are two tensors: the *working weight*, which is what the
        model has as its parameter, and its *master*, which the optimizer steps. After each step
        the one is the other, rounded.
Math.   m <- m - update(g, state);  w = bf16(m).  g = sum over microbatches and ranks of dL/dw, each
        in bf16 as backward computes it, the sum in float32.
Memory. Bytes per parameter: 2 working weight + 4 gradient + 4 master + 8 AdamW, 18 in all. Autocast
        over float32 weights has 16, 2 more while its casts live, and wider activations.
Costs you. Activations in bf16, the residual stream too, which autocast keeps in float32.
Source. Micikevicius et al. 1710.03740, section 3.1; float32 sums of gradients as Megatron-LM's
        `main_grad`.
In torch: a mixed precision policy of `fully_shard`, which holds masters as shards.
Proved by tests/parallel/test_masters.py and tests/parity/test_masters.py.

`keep` is for whole masters: one device, ddp, and what tensor and pipeline parallelism cut. Under
ZeRO 1 and 2 a rank has the masters of its slices alone: ``zero.apply(working_dtype=)``. Under ZeRO
3 shards are the masters: ``fsdp.apply(compute_dtype=)``.
"""

from typing import Any

import torch
from torch import nn

from minipar.observe import memory
from minipar.parallel.base.shards import master_of
from minipar.parallel.base.strategy import stepped_by


@torch.no_grad()
def keep(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """From now on, parameters of `model` are in `dtype`, and what they were are their masters.

    `p.master` has the values of `p` before; `optimizer` steps it, and its state has the dtype of
    that. To the optimizer nothing changes: while it steps, or loads its state, ``p.data`` *is* the
    master. Gradients add up in the dtype of the master. Frozen parameters are cast and have none;
    those of whole or complex numbers stay as they are. What is written into `p` between two steps
    (weights that are loaded, a clamp) is taken over; but not through ``p.data``, of which torch
    keeps no count.

    Raises `ValueError` unless `optimizer` steps all parameters that learn, and none has a master
    yet; `RuntimeError` for a step with a closure, which would compute with the masters, of a
    parameter that was unfrozen since, or by another optimizer.
    """
    _check_all_learn_here(model, optimizer)
    frozen = {p: name for name, p in model.named_parameters() if not p.requires_grad}
    lower(model, dtype)
    working = {p: p.data for p in model.parameters() if hasattr(p, "master")}

    def put_masters(_: Any, args: tuple = (), kwargs: dict | None = None) -> None:
        if any(map(callable, (*args, *(kwargs or {}).values()))):
            raise RuntimeError("step(closure) would run on master weights; backward, then step()")
        for p, name in frozen.items():
            if p.requires_grad and p.is_floating_point():
                raise RuntimeError(
                    f"{name} was frozen when keep() was called and has no master, so its steps "
                    f"would round to nothing; unfreeze it first, then keep()"
                )
        for p in working:
            p.data = master_of(p)

    @torch.no_grad()
    def put_working(*_: Any) -> None:
        if working:  # torch refuses to copy nothing
            torch._foreach_copy_([*working.values()], [p.master for p in working])
        for p, own in working.items():
            p.data, p.rounded = own, p._version

    optimizer.register_step_pre_hook(put_masters)
    optimizer.register_step_post_hook(put_working)
    optimizer.register_load_state_dict_pre_hook(lambda *_: put_masters(None))
    optimizer.register_load_state_dict_post_hook(put_working)


def _check_all_learn_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    stepped = set(stepped_by(optimizer))
    for name, p in model.named_parameters():
        if hasattr(p, "master"):
            raise ValueError(f"{name} has a master already; call keep() once, with one optimizer")
        if p.requires_grad and p not in stepped:
            raise ValueError(
                f"{name} learns, but not by this optimizer, so its steps would round to nothing; "
                f"make one optimizer, with groups, of all parameters that learn, or freeze the rest"
            )


def lower(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all parameters of floats; each of them that learns keeps what it was in `p.master`."""
    for p in filter(torch.is_floating_point, model.parameters()):
        before, p.data = p.data, p.data.to(dtype, copy=True)
        if p.requires_grad:
            p.master, p.grad_dtype, p.rounded = before, before.dtype, p._version
            memory.tag("optimizer", before)
