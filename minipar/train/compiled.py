"""`--compile`: each block of a model as a graph, while strategies stay around it, and eager.

A compiler sees a block's own operations: norms, rotations and products that become fewer kernels.
A function inside of the block is compiled, and not the module: so hooks stay outside.

A block is one graph under the strategies that stay outside of it: ddp, local SGD, ZeRO, fsdp and
pipelines. Where ranks talk inside of it (tensor, context, expert parallelism), a graph ends at each
collective and another begins; a mixture of experts stays eager, as its sizes hang on values.

Blocks that are alike share their graphs, however many there are. Before a graph begins, its block
waits for all weights that are on their way to it (ZeRO 1 and 2).

Refused are schedules that compute gradients of weights apart, as the backward of a graph is one
piece, and selective recomputation, which looks at single operations: see book/library.md.
"""

from typing import Any

import torch

from minipar.model.llama import Llama
from minipar.parallel.plan import Plan


def check(plan: Plan) -> None:
    """Raise `ValueError` for a plan that takes a block's operations or its backward apart."""
    why = ""
    if plan.checkpointing == "selective":
        why = "--recompute selective looks at single operations; use none or full"
    if plan.pp > 1 and plan.make_schedule().splits_backward:
        why = f"{plan.schedule} computes gradients of weights apart; use 1f1b or interleaved_1f1b"
    if why:
        raise ValueError(f"--compile makes graphs of each block, and {why}")


def compile_blocks(model: Llama, backend: Any = "inductor") -> None:
    """Compile the layers of `model`, in place; last, when all strategies have been applied."""
    for layer in model.model.layers:
        if layer is not None:
            layer._layer = torch.compile(layer._layer, backend=backend)
