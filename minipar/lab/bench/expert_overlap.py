"""Four ways to hide the all-to-alls of experts, and uneven loads of them (notebook 11)."""

import torch
from torch import Tensor

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
LAYERS = 4


def shape_of(num_layers: int) -> LlamaConfig:
    """Return a Llama of so many layers, all with experts."""
    moe = MoEConfig(8, 2, 172, num_shared=1, forced=True)  # 8 experts in turn: all are balanced
    return LlamaConfig(61, 64, 256, num_layers=num_layers, num_heads=4, num_kv_heads=4, moe=moe)


def play(axis: Axis, dispatch: str) -> Timeline:
    """Record one forward and one backward; called on every rank of `axis`, with a device."""
    with device.paused():
        model = Llama(shape_of(LAYERS), seed=0)
        expert.apply(model, axis, dispatch=dispatch)
        layers = stages.part_of(model, range(LAYERS))
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


def skewed(num_experts: int, top_k: int, imbalance: int, scores: Tensor) -> Tensor:
    """Choose for scores [N, E] so that expert 0 has `imbalance` times the mean load -> [N, k]."""
    num_tokens = len(scores)
    token = torch.arange(num_tokens, device=scores.device)[:, None]
    turn = (token * top_k + torch.arange(top_k, device=scores.device)) % (num_experts - 1)
    experts = 1 + turn  # everybody but expert 0, in turn
    chosen = token[:, 0] % num_experts < imbalance * top_k  # of as many tokens, the first choice
    experts[:, 0] = torch.where(chosen, 0, experts[:, 0])
    return experts
