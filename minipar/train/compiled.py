"""`--compile`: compile each block of a model into a graph; the strategies around it stay eager.

The compiler turns the operations of a block (norms, rotations, products) into fewer kernels. It
compiles a function inside of the block and not the module, so hooks stay out of the graph.

A block is one graph under the strategies that work outside of blocks: ddp, local SGD, ZeRO, fsdp
and pipelines. Where ranks talk inside of a block (tensor, context, expert parallelism), each
collective splits the graph. A mixture of experts stays eager, as its shapes depend on values.

Equal blocks share their graphs, however many there are. Under ZeRO 1 and 2 a block waits for all of
its weights before its graph begins.

Two things are refused, see book/library.md. Some schedules compute gradients of weights apart, but
the backward of a graph is one piece. Selective recomputation has to see single operations.
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
