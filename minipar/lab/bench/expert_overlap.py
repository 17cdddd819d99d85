"""Four ways to hide the all-to-alls of experts (notebook 11)."""

import torch

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Axis
from minipar.emulate import device, link
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe.timeline import Timeline, record, span
from minipar.parallel import expert
from minipar.parallel.pipeline import stages
from minipar.parallel.pipeline.pairs import side_by_side

WAYS = {
    "all_to_all": "(a) nothing beside",
    "overlapped": "(b) shared experts",
    "halves": "(c) halves of a batch",
    "paired": "(d) a forward beside a backward",
}
"""The word for `expert.apply`, and the name in pictures."""
MOE = MoEConfig(8, 2, 172, num_shared=1, forced=True)  # 8 experts in turn: all are balanced
SHAPE = LlamaConfig(61, 64, 256, num_layers=4, num_heads=4, num_kv_heads=4, moe=MOE)


def play(axis: Axis, dispatch: str) -> Timeline:
    """Record one forward and one backward; called on every rank of `axis`, with a device."""
    with device.paused():
        model = Llama(SHAPE, seed=0)
        expert.apply(model, axis, dispatch=dispatch)
        layers = stages.part_of(model, (0, SHAPE.num_layers, 0), 1)
        x, before = torch.randn(2, 1, 64, 64).requires_grad_().unbind()
        made = layers(before)
        gradient = torch.randn_like(made)

    def forward() -> None:
        with span("forward", "forward"):
            layers(x)

    def backward() -> None:
        with span("backward", "backward"):
            torch.autograd.backward(made, gradient)

    barrier(axis)
    with record(label=device.label(link.current().label)) as timeline:
        if dispatch == "paired":
            side_by_side(forward, backward)
        else:
            forward()
            backward()
    return timeline.gather(axis).shifted()
