"""A mixture of experts in the place of a block's MLP: each token is computed by k of E experts.

Idea.   More parameters, but not more FLOPs per token. For each token, a *router* picks k of E small
        MLPs, the experts. The token's output is the weighted sum of the k results. A model of 47B
        parameters then costs as much per token as a model of 13B.
Math.   Scores s = softmax(W x) over the experts. K is the set of the k largest s_e + b_e. Then
        y = sum over e in K of g_e expert_e(x), with the weight g_e = s_e, or g_e = s_e / (sum of s
        over K) if normalised. The bias b changes the choice, not the weights.
Balance. Experts that are rarely chosen learn little, and then are chosen less. Two remedies:
        - a loss, balance_weight E/k sum_e f_e p_e, where f_e is the share of tokens that chose e,
          and p_e is the mean score of e;
        - the bias: after each step, raise b_e by `bias_speed` if e had less than the mean load,
          lower b_e if e had more. This adds nothing to the gradients.
Capacity. Without a capacity every token is computed ("dropless"), and sizes depend on the data.
        With a capacity factor c, each expert computes the first C = ceil(c k T / E) tokens of a
        sequence of T that choose it, and drops the others. Sizes are known beforehand, and empty
        seats are computed as zeros. Each sequence counts alone (GShard's "groups"): drops depend
        neither on other sequences of the batch nor on the ranks that have these sequences.
        In evaluation nothing is dropped: while a model generates, T is not known.
Shapes. N tokens of width D, E experts, k chosen, F hidden width of an expert. A *slot* is a pair
        (token, one of its k choices); slot i belongs to token i // k. A *seat* is a row of an
        expert with a capacity: a slot takes a seat or is dropped.
Source. Shazeer et al. 1701.06538; Fedus et al. 2101.03961 (Switch: capacity, loss); Jiang et al.
        2401.04088 (Mixtral); DeepSeek-V3 2412.19437 (shared experts); Wang et al.
        2408.15664 (bias).
Proved by tests/model/test_moe.py, against transformers.

This file knows nothing of ranks. Strategies replace `MoE.core`, a function of (tokens, routing),
and the two sums of a router, `Router.sum_counts` and `Router.sum_pieces`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, importing the compiler if used

from minipar.model import casts
from minipar.model.experts import Experts, add_up

SCOPES = ("none", "sequence", "microbatch", "batch")


@dataclass(frozen=True)
class MoEConfig:
    """The sizes of a mixture, and how tokens choose. Raises `ValueError` if numbers do not fit.

    Args:
        num_experts: E.
        top_k: k, the number of experts of a token.
        expert_size: F, the hidden width of one expert.
        num_shared: number of experts that every token passes, fused to one MLP of num_shared * F.
        first_dense: number of layers at the bottom that keep a dense MLP.
        every: of all layers, each n-th has experts, if it is not one of these: 2 means 1, 3, 5.
        normalise: True if the k weights of a token sum to 1.
        balance: the tokens over which the balancing loss takes its means: tokens of each
            "sequence", of the "microbatch" of a rank, or of that microbatch on all ranks ("batch",
            2501.11873); "none" for no loss.
        balance_weight: weight of the balancing loss.
        bias_speed: step of the bias in `Router.update_bias`; None for no bias.
        capacity_factor: c; None drops nothing.
        forced: choose experts in turn instead of by score: perfect balance, for timing only.
    """

    num_experts: int
    top_k: int
    expert_size: int
    num_shared: int = 0
    first_dense: int = 0
    every: int = 1
    normalise: bool = True
    balance: str = "none"
    balance_weight: float = 0.01
    bias_speed: float | None = None
    capacity_factor: float | None = None
    forced: bool = False

    def __post_init__(self) -> None:
        if self.balance not in SCOPES:
            raise ValueError(f"balance={self.balance!r} is unknown; use one of {SCOPES}")
        k, n = self.top_k, self.num_experts
        if not 1 <= k <= n:
            raise ValueError(f"top_k={k} experts of num_experts={n}: use 1 to {n}")
        if k == 1 < n and self.normalise:
            why = "weighs every expert by 1, and the router would get no gradient"
            raise ValueError(f"top_k=1 with normalise=True {why}; use normalise=False, or top_k=2")

    def is_sparse(self, layer: int) -> bool:
        """True if layer number `layer` has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    def capacity(self, seq_len: int) -> int:
        """Return C, the number of tokens of a sequence that an expert computes at most."""
        exact = self.capacity_factor * self.top_k * seq_len / self.num_experts
        return min(seq_len, math.ceil(exact))

    def num_parameters(self, width: int, active: bool = False) -> int:
        """Return the parameters of router and experts; if `active`, those that a token passes."""
        experts = (self.top_k if active else self.num_experts) + self.num_shared
        return self.num_experts * width + 3 * experts * self.expert_size * width


class Routing(NamedTuple):
    """Which experts compute each of N tokens."""

    experts: Tensor  # [N, k] int64; E if the slot is dropped
    weights: Tensor  # [N, k] in the dtype of the router, with gradients
    seats: int | None = None  # rows of each expert for these N tokens; None: without a capacity


# ----------------------------------------------------------------------------------- the router
class Router(nn.Module):
    """Chooses k experts for each token. Computes in fp32 at least: small differences decide.

    Attributes:
        counts: [E] int64, slots per expert since `reset_counts`. Backward counts a microbatch, so a
            forward that is recomputed counts once.
        loss_weight: returns the factor of the balancing loss, which is a sum over tokens: 1 /
            number of tokens of the whole batch. Backward calls `loss_weight`, because during
            forward that number may still be in flight. None: 1 / tokens of this call.
        sum_counts: adds up counts [..., E] over the ranks that share a batch.
        sum_pieces: adds up counts [..., E] over the ranks that share each sequence.
    """

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        zeros = torch.zeros(config.num_experts)
        bias = None if config.bias_speed is None else zeros
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("counts", zeros.long(), persistent=False)
        self.loss_weight: Callable[[], Tensor] | None = None
        self.sum_counts: Callable[[Tensor], Tensor] = alone
        self.sum_pieces: Callable[[Tensor], Tensor] = alone

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Convert all but the bias to 16 bits: 16 bits would round a bias step of 0.001 away."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after is not None and after.itemsize < 4:
            self.e_score_correction_bias = before.to(after.device, torch.float32)
        return self

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Route tokens x [B, T, D] -> [B T, k].

        `valid` [B, T] is False for padding, which is routed, but is in no count and no loss.
        """
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        with casts.off(x.device.type):  # autocast would round x and W to 16 bits
            logits = F.linear(x.to(wide), self.weight.to(wide))  # [B, T, E]
        scores = logits.softmax(-1)
        experts = self._choose(scores.detach().flatten(0, -2))  # [N, k]
        weights = scores.flatten(0, -2).gather(1, experts)  # without the bias
        if config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if torch.is_grad_enabled():
            weights = self._attach_loss(weights, scores, experts, valid)
        return Routing(experts, weights)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the k experts of each token, best first: scores [N, E] -> [N, k]."""
        if self.config.forced:
            slots = torch.arange(len(scores) * self.config.top_k, device=scores.device)
            return (slots % self.config.num_experts).view(-1, self.config.top_k)
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias.to(scores.dtype)
        return scores.topk(self.config.top_k, dim=-1).indices

    def _attach_loss(
        self, weights: Tensor, scores: Tensor, experts: Tensor, valid: Tensor | None
    ) -> Tensor:
        """Return `weights`. Their backward also starts the backward of the loss, and counts."""
        if valid is None:
            valid = torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device)
        chosen = torch.zeros_like(scores).flatten(0, -2).scatter(1, experts, 1.0)
        chosen = chosen.view_as(scores) * valid[..., None]  # [B, T, E]
        counts = chosen.detach().sum(1)  # [B, E]
        loss = scores.new_zeros(())
        if self.config.balance != "none":
            loss = loss + self.config.balance_weight * self._imbalance(counts, scores, valid)
        weigh = self.loss_weight
        if weigh is None:
            weigh = partial(torch.reciprocal, valid.sum().clamp(min=1).to(loss.dtype))
        return _Attach.apply(weights, loss, weigh, self.counts, counts.sum(0))

    def _imbalance(self, counts: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
        """Return the sum over tokens of E/k sum_e f_e p_e: 1 per token in perfect balance."""
        config = self.config
        sums = (scores * valid[..., None]).sum(1)  # [B, E]: T p_e of each sequence
        if config.balance == "batch":
            counts = self.sum_counts(counts.sum(0))  # [E]
        else:
            counts = self.sum_pieces(counts if config.balance == "sequence" else counts.sum(0))
        num_tokens = counts.sum(-1, keepdim=True) / config.top_k  # each was counted k times
        shares_chosen = counts / num_tokens.clamp(min=1)  # f_e
        return config.num_experts / config.top_k * (shares_chosen * sums).sum()

    def reset_counts(self) -> None:
        """Set the counts to zero: at the start of a step."""
        self.counts.zero_()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raise the bias of experts below the mean load since `reset_counts`, lower the others.

        Once per step, after backward, with the counts of the whole batch (2408.15664, algorithm 1).
        """
        if self.e_score_correction_bias is not None:
            load = self.sum_counts(self.counts).to(torch.float64)
            step = self.config.bias_speed * (load.mean() - load).sign()
            self.e_score_correction_bias += step.to(self.e_score_correction_bias.dtype)


def alone(counts: Tensor) -> Tensor:
    """Return `counts`: their sum over one rank."""
    return counts


class _Attach(torch.autograd.Function):
    """Identity on the weights. Its backward starts the loss's backward, and adds to the counts.

    So the model need not return the loss. A pipeline stage differentiates the loss of its own
    layers, once per microbatch, even if recomputation runs forward twice.
    """

    @staticmethod
    def forward(ctx, weights, loss, weigh, counts, more):
        ctx.weigh, ctx.counts, ctx.more, ctx.dtype = weigh, counts, more, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        ctx.counts += ctx.more.to(ctx.counts.dtype)
        of_loss = torch.as_tensor(ctx.weigh(), dtype=ctx.dtype, device=grad.device)
        return grad, of_loss, None, None, None


# ---------------------------------------------------------------------------------- the mixture
class MoE(nn.Module):
    """Router and experts in the place of an MLP: [B, T, D] -> the same."""

    def __init__(self, config: MoEConfig, width: int, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config, width)
        self.experts = Experts(config.num_experts, width, config.expert_size)
        self.shared_experts = shared
        self.core: Callable[[Tensor, Routing], Tensor] = self.compute
        self.dropped: Tensor | int = 0  # slots that the last forward dropped

    @_disable_dynamo  # sizes inside depend on values: torch.compile breaks its graph here
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Compute x [B, T, D]. `valid` [B, T] is False for padding, which counts nowhere."""
        routing = self.gate(x, valid)
        if self.config.capacity_factor is not None and self.training:
            routing = self.apply_capacity(routing, x.shape[1], valid)
        return self.core(x.flatten(0, -2), routing).view_as(x)

    def apply_capacity(
        self, routing: Routing, seq_len: int, valid: Tensor | None = None
    ) -> Routing:
        """Drop the slots that come after an expert's first C slots of the same sequence."""
        num_experts, capacity = self.config.num_experts, self.config.capacity(seq_len)
        by_sequence = routing.experts.view(-1, seq_len * self.config.top_k)  # [B, T k]
        sequence = torch.arange(len(by_sequence), device=by_sequence.device)[:, None]
        nth = count_before(by_sequence + num_experts * sequence, num_experts * len(by_sequence))
        stays = (nth < capacity).view_as(routing.experts)
        lost = ~stays if valid is None else ~stays & valid.view(-1, 1)
        self.dropped = lost.sum()
        experts = torch.where(stays, routing.experts, num_experts)
        return Routing(experts, routing.weights, capacity * len(by_sequence))

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute tokens [N, D] by the experts chosen for each: the model on one device."""
        if routing.seats is not None:
            return self.add(self.seated(x, routing, self.experts), self.shared(x))
        order, counts = sort_by_expert(routing.experts, self.config.num_experts)
        tokens = order // self.config.top_k
        rows = self.experts(x[tokens], counts)
        return self.add(combine(rows, order, routing, x), self.shared(x))

    def seated(self, x: Tensor, routing: Routing, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Put tokens [N, D] on seats [E, seats, D], `compute` these, and combine -> [N, D].

        Empty seats are zeros. All sizes are known beforehand: the host reads no value.
        """
        num_experts, seats = self.config.num_experts, routing.seats
        experts, nowhere = routing.experts.flatten(), num_experts * seats
        row = experts * seats + count_before(experts, num_experts + 1)
        row = torch.where(experts < num_experts, row, nowhere)  # [N k]
        slots = torch.arange(len(row), device=x.device)
        padded = x.new_zeros(nowhere + 1, x.shape[1])  # the last row is of dropped slots
        padded = padded.index_put((row,), x[slots // self.config.top_k])
        out = compute(padded[:-1].view(num_experts, seats, -1)).flatten(0, 1)
        return combine(torch.cat([out, out.new_zeros(1, x.shape[1])])[row], slots, routing, x)

    def shared(self, x: Tensor) -> Tensor | None:
        """Compute tokens x [N, D] by the shared experts; None if there are none."""
        return None if self.shared_experts is None else self.shared_experts(x)

    def add(self, out: Tensor, shared: Tensor | None) -> Tensor:
        """Add the result of `shared`."""
        return out if shared is None else out + shared


def mixtures(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Yield the mixtures of `model` with their names, from the bottom up."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MoE))


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield the routers of `model` with their names, from the bottom up."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Router))


def start_step(model: nn.Module, loss_weight: Callable[[], Tensor]) -> None:
    """Set the counts of `model` to zero, and the factor of its balancing losses."""
    for _, moe in mixtures(model):
        moe.gate.loss_weight = loss_weight
        moe.gate.reset_counts()


# ------------------------------------------------------------------------------ slots and experts
def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the slots in the order of their experts, [N k], and the slots per expert, [E] int64.

    Slots of one expert stay in the order of the tokens. Dropped slots come last.
    """
    flat = experts.flatten()
    counts = flat.new_zeros(num_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts[:-1]


def count_before(keys: Tensor, num_keys: int) -> Tensor:
    """Return how many equal keys come before each: [3, 5, 3, 3] -> [0, 0, 1, 2]."""
    order, counts = sort_by_expert(keys, num_keys)
    starts = counts.cumsum(0) - counts
    nth = torch.arange(len(order), device=order.device) - starts[keys.flatten()[order]]
    return torch.empty_like(nth).index_copy(0, order, nth)


def combine(rows: Tensor, order: Tensor, routing: Routing, like: Tensor) -> Tensor:
    """Multiply rows [N k, D], row i of slot ``order[i]``, by weights; add up by token -> [N, D]."""
    tokens = order // routing.experts.shape[1]
    # In the router's dtype: sums of k in low precision lose digits.
    wide = rows * routing.weights.flatten()[order, None]
    return add_up(wide, tokens, len(like), routing.experts.shape[1]).to(like.dtype)
