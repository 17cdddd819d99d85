"""Closed forms of memory, held against numbers that others printed."""

from dataclasses import replace

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.model.llama import PRESETS, Llama, LlamaConfig
from minipar.parallel import tensor
from minipar.sim.memory import MIXED_ADAM, llama_activations, model_state


# ZeRO (arXiv 1910.02054), figure 1: 7.5B parameters on 64 ranks, mixed-precision Adam, in GB.
@pytest.mark.parametrize(
    ("strategy", "printed"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_equals_figure_1_of_zero(strategy, printed):
    """Mutant: a stage that shards one part too few or too many."""
    held = model_state(7.5e9, 64, strategy, MIXED_ADAM)
    assert sum(held.values()) / 1e9 == pytest.approx(printed, abs=0.05)


def test_gathered_blocks_come_on_top_of_shards():
    held = model_state(1e6, 4, "zero3", largest_block=1e5)
    assert held["gathered"] == 2 * 4 * 1e5
    assert sum(held.values()) == 4e6 + 8e5
    assert "gathered" not in model_state(1e6, 4, "zero2", largest_block=1e5)


MODES = [{}, {"sequence": True}, {"sequence": True, "overlap": True}]


def _one_layer(size: int, config: LlamaConfig, num_tokens: int, mode: dict) -> float:
    """Bytes that autograd holds for a layer: half of what two more of them add."""
    axis, left = Mesh(tp=size).tp, []
    for num_layers in (1, 3):
        model = Llama(replace(config, num_layers=num_layers))
        if axis.size > 1:
            tensor.apply(model, axis, **mode)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}  # alive until they are counted: addresses are unique

        def keep(t: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(torch.zeros(2, num_tokens // 2, dtype=torch.int64))
        left.append(
            sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
        )
    return (left[1] - left[0]) / 2


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES, ids=["tensor", "sequence", "overlap"])
def test_activations_of_a_llama_are_those_that_autograd_keeps(ranks, size, mode):
    """Within 1 %; on 4 ranks heads of k and v are copies. Mutants: results of norms cut under
    `sequence`, or whole under `overlap`; less than one head of k and v; three tensors of F."""
    asked = size, PRESETS["tiny"], 64, mode
    on_cpu = {"bytes_per_number": 4, "fused_norm": False}
    parts = llama_activations(PRESETS["tiny"], 64, tp=size, **mode, **on_cpu)
    for found in ranks(size).run(_one_layer, *asked) if size > 1 else [_one_layer(*asked)]:
        assert sum(parts.values()) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("size", "mode"),
    [(1, {}), (2, {}), (2, {"sequence": True}), (2, {"experts": True})]
    + [(2, {"sequence": True, "experts": True})],
)
def test_activations_of_a_mixture_are_those_that_autograd_keeps(ranks, size, mode):
    """Mutants: rows once or twice; experts cut where tokens are; a shared expert left out."""
    config = replace(PRESETS["tiny-moe"], moe=replace(PRESETS["tiny-moe"].moe, num_shared=1))
    on_cpu = {"bytes_per_number": 4, "fused_norm": False}
    parts = llama_activations(config, 64, tp=size, **mode, **on_cpu)
    asked = size, config, 64, mode
    for found in ranks(size).run(_one_layer, *asked) if size > 1 else [_one_layer(*asked)]:
        assert sum(parts.values()) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_of_a_llama_are_the_papers_where_layers_agree(tp, sequence):
    """F = 2 D makes four hidden tensors weigh as much as GPT's two; it has masks of dropout, too:
    two bytes, outside of the matrices. Mutants: K left out, a part divided that is whole."""
    config = LlamaConfig(256, 64, 128, num_layers=1, num_heads=4, num_kv_heads=4)
    ours = llama_activations(config, 96, tp=tp, sequence=sequence, overlap=sequence)
    whole = 10 / (tp if sequence else 1)  # table 2 of the paper, without attention's T x T matrices
    assert sum(ours.values()) == 96 * 64 * (0.8 * whole + 24 / tp)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="set both"):
        llama_activations(PRESETS["tiny"], 64, tp=2, overlap=True)
