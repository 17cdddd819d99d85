"""A mixture of experts in the place of a block's MLP: each token is computed by k of E experts.

Idea.   Parameters without their FLOPs: a *router* looks at a token and picks k of E small MLPs, the
        experts; the token's output is their weighted sum. A model of 47B parameters then costs what
        one of 13B costs, per token.
Math.   With scores s = softmax(W x) over the experts (or sigmoid) and K the k largest of s + b:
        y = sum over e in K of g_e expert_e(x), g_e = scale s_e / (sum over K of s, if normalised).
        A softmax over the chosen logits alone is the same as a softmax over all, normalised. The
        bias b steers the choice and never enters a weight.
Balance. Experts that are rarely chosen learn little and are chosen less. Two remedies, alone or
        together: a loss, balance_weight E/k sum_e f_e p_e, with f_e the share of tokens that chose
        e and p_e the mean score of e; or the bias, raised for experts below the mean load by
        `bias_speed` per step, lowered above: no gradient is bent.
Capacity. Without one, every token is computed ("dropless"), and sizes depend on the data. With a
        capacity factor c, each expert computes the first C = ceil(c k T / E) that choose it of the
        T tokens of a sequence, and the rest is dropped: sizes are known beforehand, and padding is
        computed. (GShard's "groups", one for each sequence: so what is dropped hangs neither on
        the other sequences of a batch nor on the ranks that have them.) It is for training: what a
        full expert drops hangs on all tokens before it, and C on how many follow, which a model
        that writes does not know. So in evaluation, after `model.eval()`, nothing is dropped.
Shapes. N tokens of width D, E experts, k chosen, F hidden width of an expert. A *slot* is a pair
        (token, one of its k choices); slot i belongs to token i // k.
Source. Shazeer et al. 1701.06538; Fedus et al. 2101.03961 (Switch: capacity, loss); Jiang et al.
        2401.04088 (Mixtral); DeepSeek-V3 2412.19437 (sigmoid, groups, shared experts); Wang et al.
        2408.15664 (bias); Zoph et al. 2202.08906 (z-loss).
Proved by tests/model/test_moe.py, against transformers.

This file knows nothing of ranks: `MoE.core` is an attribute, and any function of (tokens, routing)
may take its place, as any sum of counts may that of `Router.sum_counts` and `sum_pieces`.
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

SCORES = ("softmax", "sigmoid")
SCOPES = ("none", "sequence", "microbatch", "batch")


@dataclass(frozen=True)
class MoEConfig:
    """What is mixed, and how tokens choose. Raises `ValueError` where the numbers do not fit.

    Args:
        num_experts: E.
        top_k: k, the experts of a token.
        expert_size: F, the hidden width of one expert.
        num_shared: experts that every token passes, fused to one MLP of num_shared * F.
        first_dense: so many layers at the bottom keep a dense MLP.
        every: of the layers above, each whose number + 1 it divides has experts.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalise: whether the weights of a token sum to `scale`.
        scale: factor on all weights.
        num_groups, top_groups: experts lie in groups (nodes); a token's k come from the best
            top_groups, by the sum of the two best experts of each.
        balance: over what the balancing loss takes its means: each "sequence", the "microbatch" of
            a rank, or that of all ranks of the "batch" (2501.11873); "none". That paper also adds
            up f_e over the microbatches of a step, in a buffer; here each is balanced by itself,
            because a pipeline runs them in another order, and its losses would be others.
        balance_weight: its weight.
        z_weight: weight of the mean of logsumexp(logits)^2, which keeps logits small.
        bias_speed: step of the bias in `update_bias`; None: there is no bias.
        capacity_factor: c; None drops nothing.
        forced: choose experts in turn instead of by score: perfect balance, for timing alone.
    """

    num_experts: int
    top_k: int
    expert_size: int
    num_shared: int = 0
    first_dense: int = 0
    every: int = 1
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    balance: str = "none"
    balance_weight: float = 0.01
    z_weight: float = 0.0
    bias_speed: float | None = None
    capacity_factor: float | None = None
    forced: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "expert_size", "every", "num_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_shared", "first_dense", "balance_weight", "z_weight", "bias_speed"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative, or infinite")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} experts of num_experts={self.num_experts}: "
                f"use 1 to {self.num_experts}"
            )
        if self.top_k == 1 < self.num_experts and self.normalise:
            raise ValueError(
                "top_k=1 with normalise=True weighs every expert by 1, and the router would get no "
                "gradient; use normalise=False, or top_k=2"
            )
        for name, known in (("score", SCORES), ("balance", SCOPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}")
        if self.num_experts % self.num_groups:
            good = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}; "
                f"use one of {good}"
            )
        group_size = self.num_experts // self.num_groups
        least = math.ceil(self.top_k / group_size)
        if not least <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"top_groups={self.top_groups} of {self.num_groups} groups of {group_size} experts "
                f"cannot hold top_k={self.top_k}; use {least} to {self.num_groups}"
            )
        if self.num_groups > 1 and group_size < 2:
            raise ValueError(
                f"num_groups={self.num_groups} leaves one expert in each group, but a group is "
                f"judged by its two best; use at most {self.num_experts // 2}"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} must be positive and finite; 1 to 2 is "
                "usual, None drops nothing"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number `layer` has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    def capacity(self, seq_len: int) -> int:
        """C: how many tokens of a sequence each expert computes at most."""
        assert self.capacity_factor is not None, "dropless: there is no capacity"
        exact = self.capacity_factor * self.top_k * seq_len / self.num_experts
        return min(seq_len, math.ceil(exact))

    def num_parameters(self, width: int, active: bool = False) -> int:
        """Parameters that take the place of one MLP: all of them, or what one token passes."""
        experts = (self.top_k if active else self.num_experts) + self.num_shared
        return self.num_experts * width + 3 * experts * self.expert_size * width


class Routing(NamedTuple):
    """Where N tokens go."""

    experts: Tensor  # [N, k] int64
    weights: Tensor  # [N, k], in the dtype of the router; gradients flow through these


class Seated(NamedTuple):
    """Where N tokens go when experts have a capacity, and some slots are dropped."""

    experts: Tensor  # E for a slot that is dropped
    weights: Tensor
    seats: int  # of each expert for these N tokens: B C, for B sequences


# ----------------------------------------------------------------------------------- the router


class Router(nn.Module):
    """Chooses k experts for each token. Computes in fp32 at least: small differences decide.

    Attributes:
        counts: [E] int64, slots per expert since `reset_counts`: of microbatches that went through
            backward, each once, however often recomputation runs its forward. Data for pictures,
            the bias and the simulator.
        loss_weight: returns the factor of the balancing losses, which are sums over tokens: 1 /
            number of tokens of the whole batch, as for the summed loss of the tokens. Backward
            asks for it: in a forward it may yet be on its way. None stands for one over the tokens
            of the call, which suits a mean loss of one microbatch.
        sum_counts: adds up counts [..., E] over the ranks that share a batch; identity alone.
        sum_pieces: the same over the ranks that share each sequence.
    """

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        no_bias = config.bias_speed is None
        zeros = torch.zeros(config.num_experts)
        self.register_buffer("e_score_correction_bias", None if no_bias else zeros)
        self.register_buffer("counts", zeros.long(), persistent=False)
        self.loss_weight: Callable[[], Tensor] | None = None
        self.sum_counts: Callable[[Tensor], Tensor] = alone
        self.sum_pieces: Callable[[Tensor], Tensor] = alone

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """As of every module; but in 16 bits the bias would stand still: it keeps 32 at least."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after is not None and after.itemsize < 4:
            self.e_score_correction_bias = before.to(after.device, torch.float32)
        return self

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Route tokens x [B, T, D] -> [B T, k]. `valid` [B, T] says which of them count.

        Padding is routed like any token, but takes part in no count and no loss.
        """
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        with casts.off(x.device.type):  # autocast would round both back
            logits = F.linear(x.to(wide), self.weight.to(wide))  # [B, T, E]
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach().flatten(0, -2))  # [N, k]
        weights = scores.flatten(0, -2).gather(1, experts)  # without the bias
        if config.normalise:
            # Sigmoids of a lost token may all be next to nothing; a softmax never is.
            floor = 1e-20 if config.score == "sigmoid" else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + floor)
        weights = weights * config.scale
        if torch.is_grad_enabled():
            weights = self._attach_losses(weights, logits, scores, experts, valid)
        return Routing(experts, weights)

    def _choose(self, scores: Tensor) -> Tensor:
        """The k experts of each token, best first: scores [N, E] -> [N, k]."""
        config = self.config
        if config.forced:
            slots = torch.arange(len(scores) * config.top_k, device=scores.device)
            return (slots % config.num_experts).view(-1, config.top_k)
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias.to(scores.dtype)
        if config.top_groups < config.num_groups:
            groups = scores.unflatten(1, (config.num_groups, -1))  # [N, groups, E / groups]
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.top_groups, dim=-1).indices
            shut = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
            # -inf and not 0: with a negative bias, 0 would win.
            scores = groups.masked_fill(shut[..., None], -torch.inf).flatten(1)
        return scores.topk(config.top_k, dim=-1).indices

    def _attach_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, valid: Tensor | None
    ) -> Tensor:
        """Hang the balancing losses and the count of this microbatch on the weights' backward."""
        config = self.config
        batch, seq_len = logits.shape[:2]
        if valid is None:
            valid = torch.ones(batch, seq_len, dtype=torch.bool, device=logits.device)
        chosen = torch.zeros_like(logits).flatten(0, -2).scatter(1, experts, 1.0)
        chosen = chosen.view_as(logits) * valid[..., None]  # [B, T, E]
        counts = chosen.detach().sum(1)  # [B, E]
        losses = logits.new_zeros(())
        if config.balance != "none":
            losses = losses + config.balance_weight * self._imbalance(counts, scores, valid)
        if config.z_weight:
            losses = losses + config.z_weight * (logits.logsumexp(-1).square() * valid).sum()
        weigh = self.loss_weight
        if weigh is None:
            weigh = partial(torch.reciprocal, valid.sum().clamp(min=1).to(losses.dtype))
        return _Attach.apply(weights, losses, weigh, self.counts, counts.sum(0))

    def _imbalance(self, counts: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
        """Sum over tokens of E/k sum_e f_e p_e; 1 per token when all experts are used alike."""
        config = self.config
        shares = scores / scores.sum(-1, keepdim=True)  # sigmoids as shares; a softmax stays
        sums = (shares * valid[..., None]).sum(1)  # [B, E]: T p_e of each sequence
        if config.balance == "batch":
            counts = self.sum_counts(counts.sum(0))  # [E]
        else:
            counts = self.sum_pieces(counts if config.balance == "sequence" else counts.sum(0))
        num_tokens = counts.sum(-1, keepdim=True) / config.top_k  # each was counted k times
        shares_chosen = counts / num_tokens.clamp(min=1)  # f_e
        return config.num_experts / config.top_k * (shares_chosen * sums).sum()

    def reset_counts(self) -> None:
        """Begin to count anew: at the start of a step."""
        self.counts.zero_()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raise the bias of experts with less than the mean load since `reset_counts`, else lower.

        Once per step, after backward, with the counts of the whole batch (2408.15664, algorithm 1).
        """
        if self.e_score_correction_bias is not None:
            load = self.sum_counts(self.counts).to(torch.float64)
            step = self.config.bias_speed * (load.mean() - load).sign()
            self.e_score_correction_bias += step.to(self.e_score_correction_bias.dtype)


def alone(counts: Tensor) -> Tensor:
    """The sum over the one rank there is."""
    return counts


class _Attach(torch.autograd.Function):
    """Identity on the weights, whose backward starts that of the losses, and counts.

    So the losses need no way out of the model: they are differentiated wherever the tokens are, on
    any stage of a pipeline, and once per microbatch, also where forward is run again.
    """

    @staticmethod
    def forward(ctx, weights, losses, weigh, counts, more):
        ctx.weigh, ctx.counts, ctx.more, ctx.dtype = weigh, counts, more, losses.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        ctx.counts += ctx.more.to(ctx.counts.dtype)
        return (
            grad,
            torch.as_tensor(ctx.weigh(), dtype=ctx.dtype, device=grad.device),
            None,
            None,
            None,
        )


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
        self.how = "auto"  # of `Experts.forward`
        self.dropped: Tensor | None = None  # how many slots the last forward dropped, a scalar
        self.num_dropped = 0  # since `start_step`, forwards that recomputation repeats left out

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """`valid` [B, T] says which tokens count in balance and drops; default: all."""
        if torch.compiler.is_compiling():
            return _outside_of_graphs(self.forward, x, valid)
        routing = self.gate(x, valid)
        if self.config.capacity_factor is not None and self.training:
            routing = self.admit(routing, x.shape[1], valid)
        return self.core(x.flatten(0, -2), routing).view_as(x)

    def admit(self, routing: Routing, seq_len: int, valid: Tensor | None = None) -> Seated:
        """Drop what full experts have no seat for: in each sequence the first come are served."""
        num_experts, capacity = self.config.num_experts, self.config.capacity(seq_len)
        by_sequence = routing.experts.view(-1, seq_len * self.config.top_k)  # [B, T k]
        sequence = torch.arange(len(by_sequence), device=by_sequence.device)[:, None]
        before = places(by_sequence + num_experts * sequence, num_experts * len(by_sequence))
        stays = (before < capacity).view_as(routing.experts)
        lost = ~stays if valid is None else ~stays & valid.view(-1, 1)
        self.dropped = lost.sum()
        if torch._C._current_graph_task_id() == -1:  # else this is a forward inside of backward
            self.num_dropped = self.num_dropped + self.dropped
        experts = torch.where(stays, routing.experts, num_experts)
        return Seated(experts, routing.weights, capacity * len(by_sequence))

    def compute(self, x: Tensor, routing: Routing | Seated) -> Tensor:
        """Compute tokens [N, D] by the experts chosen for each: the model on one device."""
        if isinstance(routing, Seated):
            return self.add(self.seated(x, routing, self.experts.padded), self.shared(x))
        order, counts = sort_by_expert(routing.experts, self.config.num_experts)
        tokens = order // routing.experts.shape[1]
        rows = self.experts(x[tokens], counts, self.how)
        return self.add(combine(rows, order, routing, x), self.shared(x))

    def seated(self, x: Tensor, routing: Seated, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens [N, D] through `compute`: as many rows for each expert, [E, seats, D] -> the same.

        Seats that no token takes are zeros. No size depends on values: the host reads nothing.
        """
        num_experts, seats = self.config.num_experts, routing.seats
        experts, nowhere = routing.experts.flatten(), num_experts * seats
        row = experts * seats + places(experts, num_experts + 1)
        row = torch.where(experts < num_experts, row, nowhere)  # [N k]
        slots = torch.arange(len(row), device=x.device)
        padded = x.new_zeros(nowhere + 1, x.shape[1])  # the last row: what is dropped
        padded = padded.index_put((row,), x[slots // self.config.top_k])
        out = compute(padded[:-1].view(num_experts, seats, -1)).flatten(0, 1)
        return combine(torch.cat([out, out.new_zeros(1, x.shape[1])])[row], slots, routing, x)

    def shared(self, x: Tensor) -> Tensor | None:
        """What the shared experts make of tokens x [N, D]; None if there are none."""
        return None if self.shared_experts is None else self.shared_experts(x)

    def add(self, out: Tensor, shared: Tensor | None) -> Tensor:
        """Add what `shared` returned."""
        return out if shared is None else out + shared


@_disable_dynamo
def _outside_of_graphs(forward: Callable, *args: Tensor | None) -> Tensor:
    """Sizes hang on values, so that a graph of torch.compile breaks here instead of somewhere."""
    return forward(*args)


def mixtures(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Yield the mixtures of `model` with their names, from the bottom up."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MoE))


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield the routers of `model` with their names, from the bottom up."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Router))


def start_step(model: nn.Module, loss_weight: Callable[[], Tensor]) -> None:
    """Begin to count anew, and weigh the balancing losses of `model` by what this returns."""
    for _, moe in mixtures(model):
        moe.gate.loss_weight, moe.num_dropped = loss_weight, 0
        moe.gate.reset_counts()


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their experts, [N k], and how many each expert has, [E] int64.

    Slots of one expert stay in the order of the tokens; those that are dropped come last.
    """
    flat = experts.flatten()
    counts = flat.new_zeros(num_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts[:-1]


def places(keys: Tensor, num_keys: int) -> Tensor:
    """How many of the same key come before each of `keys` [...], all below `num_keys` -> [N]."""
    order, counts = sort_by_expert(keys, num_keys)
    starts = counts.cumsum(0) - counts
    nth = torch.arange(len(order), device=order.device) - starts[keys.flatten()[order]]
    return torch.empty_like(nth).index_copy(0, order, nth)


def combine(rows: Tensor, order: Tensor, routing: Routing, like: Tensor) -> Tensor:
    """Weigh rows [N k, D], which lie in `order`, and add up those of each token -> [N, D]."""
    tokens = order // routing.experts.shape[1]
    # In the router's dtype: sums of k in low precision lose digits.
    wide = rows * routing.weights.flatten()[order, None]
    return add_up(wide, tokens, len(like), routing.experts.shape[1]).to(like.dtype)
