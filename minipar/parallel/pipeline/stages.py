"""The cut of a Llama into stages, and which rank has which weight afterwards.

A cut is a tuple of layer counts, one per part of the model: (3, 4, 4, 3). Part 0 also has the
embedding and the last part the final norm and the head, so equal counts are seldom equal work.
With a vocabulary of 128 k, Llama 3's head costs as much as several layers.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel.pipeline.actions import Schedule


# ---------------------------------------------------------------------- costs
def estimate_costs(config: LlamaConfig, seq_len: int = 1024) -> list[float]:
    """Estimate FLOPs of a forward per token: embedding (none), each layer, norm and head.

    A matmul costs 2 FLOPs per weight that a token passes, causal attention 2·H·K·T in QKᵀ and AV
    together. Backward costs twice as much in every part, so the balance stays the same.
    """
    attention = 2 * config.num_heads * config.head_dim * seq_len
    weights = [config.layer_parameters(layer, active=True) for layer in range(config.num_layers)]
    layers = [2.0 * num + attention for num in weights]
    return [0.0, *layers, 2.0 * config.vocab_size * config.hidden_size]


# ---------------------------------------------------------------------- the cut
def balance(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Find the cut whose most expensive part costs least; `costs` of embedding, L layers and head.

    In a pipeline every rank waits for the slowest. At a tie, the second most expensive part counts,
    and so on. Every part has a layer. Raises `ValueError` for more parts than layers.
    """
    embedding, *layers, head = costs
    if not 1 <= num_parts <= len(layers):
        raise ValueError(f"{num_parts} stages do not fit {len(layers)} layers: each needs one")
    layers[0] += embedding
    layers[-1] += head
    # best[i] is (costs of the parts, highest first; layers per part) for the first i layers.
    best: dict[int, tuple[list[float], tuple[int, ...]]] = {0: ([], ())}
    for part in range(num_parts):
        before, best = best, {}
        for end in range(part + 1, len(layers) + 1):
            for start in filter(end.__gt__, reversed(before)):  # the shortest last part first
                own = sum(layers[start:end])
                if end in best and own > best[end][0][0]:
                    break  # a longer last part only costs more
                parts, cut = before[start]
                found = sorted([*parts, own], reverse=True), (*cut, end - start)
                best[end] = min(found, best.get(end, found))
    return best[len(layers)][1]


def check_cut(cut: Sequence[int], num_parts: int, num_layers: int) -> None:
    """Raise `ValueError` unless a user's cut fits. Part 0 and the last may be empty."""
    if len(cut) != num_parts or sum(cut) != num_layers or min(cut) < 0 or 0 in cut[1:-1]:
        what = f"cut={cut} does not cut {num_layers} layers into {num_parts} stages"
        rule = f"counts add up to {num_layers}, all above 0 between the first and the last"
        raise ValueError(f"{what}: {rule}")


def layers_of(cut: Sequence[int], part: int) -> range:
    """Return the layers of a part of the model."""
    start = sum(cut[:part])
    return range(start, start + cut[part])


def part_of(model: Llama, cut: Sequence[int], number: int) -> Llama:
    """Make a Llama that shares the modules of one part of `model`; the others are None."""
    part, inner = copy.copy(model), copy.copy(model.model)
    part._modules, inner._modules = dict(model._modules), dict(model.model._modules)
    part.model, inner.layers = inner, nn.ModuleList(model.model.layers)
    keep_only(part, cut, [number])
    return part


def keep_only(model: Llama, cut: Sequence[int], parts: Collection[int]) -> None:
    """Set to None, in place, the modules of other parts: layers, and those at the ends."""
    for part in set(range(len(cut))) - set(parts):
        for layer in layers_of(cut, part):
            model.model.layers[layer] = None
    if 0 not in parts:
        model.model.embed_tokens = None
    if len(cut) - 1 not in parts:
        model.model.norm = model.lm_head = None


# ---------------------------------------------------------------------- who has what
class Weight(NamedTuple):
    """A parameter or buffer: its names (two if it is tied) and the ranks that have it."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def homes_of(parts: Sequence[Llama], schedule: Schedule) -> list[Weight]:
    """List every weight of a model that is cut into `parts`, and the ranks that have it."""
    names: dict[Tensor, set[str]] = defaultdict(set)
    ranks: dict[Tensor, set[int]] = defaultdict(set)
    for stage, rank in enumerate(schedule.rank_of):
        for name, tensor in parts[schedule.part(stage)].state_dict(keep_vars=True).items():
            names[tensor].add(name)
            ranks[tensor].add(rank)
    return [Weight(tuple(sorted(names[t])), tuple(sorted(ranks[t]))) for t in names]
