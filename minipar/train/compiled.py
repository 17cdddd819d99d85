"""`--compile`: each block of a model as a graph, while strategies stay around it, and eager.

A compiler sees a block's own operations: norms, rotations and products that become fewer kernels.
What hooks do before and after a block, such as gathering its weights, and what runs it twice, is
none of its business: so a function inside of the block is compiled, and not the module.

Supported are strategies that stay outside of blocks: ddp, local SGD, ZeRO, fsdp and pipelines, as
README's table has it. What talks inside of a block (tensor, context, expert parallelism) would
break the graph; a schedule that computes gradients of weights apart finds only one piece of
backward; selective recomputation looks at single operations. All of these are refused.

In torch: `torch.compile`; torchtitan compiles block by block, too.
Proved by: tests/train/test_compiled.py.
"""

from typing import Any

import torch

from minipar.model.llama import Llama
from minipar.parallel.plan import Plan


def check(plan: Plan, has_experts: bool = False) -> None:
    """Raise `ValueError` for a plan that reaches into blocks, or takes their backward apart."""
    why = ""
    for axis in ("tp", "cp", "ep"):
        if getattr(plan, axis) > 1:
            why = f"ranks of {axis} talk inside of blocks; use {axis}=1"
    if has_experts:
        why = "experts look at how many tokens each has; use a preset without"
    if plan.checkpointing == "selective":
        why = "--recompute selective looks at single operations; use none or full"
    if plan.pp > 1 and _splits_backward(plan):
        why = f"{plan.schedule} computes gradients of weights apart; use 1f1b or interleaved_1f1b"
    if why:
        raise ValueError(f"--compile makes one piece of each block, and {why}")


def _splits_backward(plan: Plan) -> bool:
    rows = plan.make_schedule().actions
    return any(action is not None and action.kind == "W" for row in rows for action in row)


def compile_blocks(model: Llama, backend: Any = "inductor") -> None:
    """Compile the layers of `model`, in place; last, when all strategies have been applied."""
    for layer in model.model.layers:
        if layer is not None:
            layer._layer = torch.compile(layer._layer, backend=backend)
