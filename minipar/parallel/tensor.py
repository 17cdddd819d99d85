"""Tensor parallelism: every matrix of a layer is cut, and all ranks work on the same tokens.

Idea.   Of two matrices in a row, cut the first by columns and the second by rows. The heads or
        hidden units between the two stay on their rank; one sum at the end joins all ranks.
Math.   act(x [A1 A2]) [B1; B2] = act(x A1) B1 + act(x A2) B2. In a Llama, q, k, v and gate, up
        come first; o and down come second. The embedding is cut by rows of the vocabulary: a rank
        without a token's row adds zero. So is the head: every rank has the logits of its own
        words, and the loss needs three numbers per token of the other ranks, see `vocab_loss`.
Shapes. Types along tp as in comm/autograd.py. Tensors between two matrices are V; at the borders

          plain           x [B, T, D] I    -convert->     R  ...  P  -all_reduce->      I
          ``sequence``    x [B, T/n, D] V  -all_gather->  R  ...  P  -reduce_scatter->  V

        Sequence parallelism is this swap and nothing else. Then norms and the residual stream are
        cut along the tokens, so the gradient of a norm is P until `finish_backward` (T12).
Comms.  A = (n-1)/n of the bytes of one activation [B, T, D]. Per microbatch, forward and backward:
        (8 L + 4) A, plain or ``sequence``: an all-reduce is a reduce-scatter and an all-gather.
        A layer has 4 all-reduces, the embedding one and the head one. The loss adds 6 (n-1)/n of
        the bytes of [B, T] numbers in fp32. ``overlap`` adds 2 L A: backward gathers the inputs of
        q, k, v and of gate, up again. A mixture of experts that is whole saves 2 all-reduces.
        Per step, 2 (n-1)/n of: the norm weights' gradients with ``sequence``, else gradients of the
        norms of heads, if any; and with n > G the gradients of k and v. Only ``overlap`` hides any.
Memory. Bytes of matrices, gradients and optimizer state / n. Activations that a layer keeps for its
        backward, in numbers per token: inside of the borders (2 H K + 2 G K + 4 F) / n (q, k, v and
        attention's result; gate, silu, up, their product). Outside, two norms keep input and
        result: 4 D plain; 2 D + 2 D/n with ``sequence``, which keeps results as gathered; 4 D/n
        with ``overlap``.
Costs you. 4 all-reduces per layer that nothing hides, so a fast link: tp stays inside a node.
        n divides heads and hidden units, and divides G key/value heads or is a multiple of G.
Source. Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al. 2022
        (arXiv 2205.05198), section 4.2.2, for ``sequence``; overlap.py.
In torch: `parallelize_module`, `SequenceParallel`, `loss_parallel`, async tensor parallelism.
Proved by tests/parallel/test_tensor.py and tests/law/test_law.py.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.mesh import Axis
from minipar.model.llama import Llama, token_loss
from minipar.model.moe import MoE, Routing
from minipar.parallel import overlap as rings
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import axes_of, is_spread_over, mark, piece_of, region_of
from minipar.parallel.base.strategy import Strategy, check_not_summed, mark_summed, refuse_state
from minipar.parallel.matrices import (
    Border,
    Spans,
    VocabEmbedding,
    by_heads,
    check_sizes,
    evenly,
    vocab_loss,
)

LARGE = 1 << 20  # bytes of a gradient that is summed by a call of its own


def apply(
    model: Llama,
    axis: Axis,
    *,
    sequence: bool = False,
    overlap: bool = False,
    experts: bool = False,
) -> "TensorParallel":
    """Cut the matrices of `model` along `axis`, in place; the values come from rank 0.

    With gradients enabled the model returns the logits of this rank's words [B, T, V/n];
    `model.token_loss` compares these with targets. Under `no_grad` the model returns all logits, so
    sampling works unchanged. Apply it before other strategies, and finish it after them: its sums
    need gradients that no other strategy is still sending.

    Args:
        sequence: cut norms and residual stream along the tokens.
        overlap: rings that interleave messages with matmuls, see overlap.py; needs `sequence`.
        experts: cut each expert as well; otherwise every rank has all of them whole.

    Raises `ValueError` for sizes that the axis does not divide, and for a model that is cut.
    """
    if overlap and not sequence:
        raise ValueError("overlap=True decomposes the collectives of sequence=True; set both")
    for name, p in model.named_parameters():
        if name.endswith(".bias"):  # which no Llama has
            raise ValueError(f"{name}: tensor parallelism would add this bias once per rank")
        if not is_spread_over(p, axis) and any(a.name == axis.name for a in axes_of(p)):
            raise ValueError(f"{name} is cut along {axis.name} already")
        if is_spread_over(p, axis) and not sequence:
            same = f"experts are spread over {axis.name}, whose ranks would send the same tokens"
            raise ValueError(f"{same}; sequence=True cuts sequences: then they hold different ones")
    check_sizes(model.config, axis.size, axis.name, experts)
    replicate(model, axis)
    return TensorParallel(model, Border(axis, sequence), overlap, experts)


class TensorParallel(Strategy):
    """A Llama with its matrices cut; made by `apply`."""

    def __init__(
        self, model: Llama, border: Border, overlap: bool = False, experts: bool = False
    ) -> None:
        super().__init__(model, border.axis)
        self.border, self.overlap, self.shard_axes = border, overlap, (border.axis,)
        self.spans: dict[str, Spans] = {}  # of each parameter that is cut: one for each rank
        config, n = model.config, self.axis.size
        queries = by_heads(config.num_heads, config.head_dim, n)
        keys = by_heads(config.num_kv_heads, config.head_dim, n)
        hidden = evenly(config.intermediate_size, n)
        for i, layer in enumerate(model.model.layers):
            name = f"model.layers.{i}"
            self.by_columns(f"{name}.self_attn.q_proj", queries)  # [H K, D] -> [H K/n, D]
            self.by_columns(f"{name}.self_attn.k_proj", keys)
            self.by_columns(f"{name}.self_attn.v_proj", keys)
            self.by_rows(f"{name}.self_attn.o_proj", queries)  # [D, H K] -> [D, H K/n]
            self.between_borders(layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj")
            if isinstance(layer.mlp, MoE):
                self._cut_mixture(layer.mlp, f"{name}.mlp", experts)
                continue
            self.by_columns(f"{name}.mlp.gate_proj", hidden)
            self.by_columns(f"{name}.mlp.up_proj", hidden)
            self.by_rows(f"{name}.mlp.down_proj", hidden)
            self.between_borders(layer.mlp, ("gate_proj", "up_proj"), "down_proj")
        self._cut_vocabulary(evenly(config.vocab_size, n))
        self._find_partial_gradients()
        if border.sequence:
            model.register_forward_pre_hook(self._pad)
            model.register_forward_hook(self._unpad)
        if n > 1:
            refuse_state(model)

    def by_columns(self, name: str, spans: Spans) -> None:
        """Cut the first of two matrices, [F, D] -> [F/n, D]: x R -> x Wᵀ V, nothing to send."""
        self._cut(f"{name}.weight", 0, spans)

    def by_rows(self, name: str, spans: Spans) -> None:
        """Cut the second of two matrices, [D, F] -> [D, F/n]: x V -> x Wᵀ P, a partial sum."""
        self._cut(f"{name}.weight", 1, spans)

    def between_borders(self, region: nn.Module, firsts: tuple[str, ...], last: str) -> None:
        """Communicate where activations enter `region` and where they leave it, and only there."""
        if self.overlap:
            rings.fuse(region, firsts, last, self.axis)
            return
        # I -> R on the way in, once for all of `firsts`; P -> I on the way out.
        region.register_forward_pre_hook(lambda _, args: (self.border.enter(args[0]), *args[1:]))
        region.register_forward_hook(lambda _, args, out: self.border.leave(out))

    def _cut(self, name: str, dim: int, spans: Spans, blocks: int = 1) -> None:
        """Keep this rank's span of a parameter along `dim`.

        `blocks` matrices of one size may lie one above the other along `dim`, such as gate and up
        of an expert; the rank then keeps its span of each of them.
        """
        self.spans[name] = spans
        param, rank = self.model.get_parameter(name), self.axis.rank
        if self.axis in axes_of(param):
            return  # tied to one that is cut already
        (start, stop), length, region = spans[rank], param.shape[dim], region_of(param)
        kept = tuple((at + start, at + stop) for at in range(0, length, length // blocks))
        region = region._replace(spans=(*region.spans[:dim], kept, *region.spans[dim + 1 :]))
        mark(param, self.axis, region, copy=spans.index(spans[rank]) != rank)  # a head counts once
        param.data = torch.cat([param.data.narrow(dim, a, b - a) for a, b in kept], dim)
        param.grad = None

    # ------------------------------------------------------------------ the vocabulary
    def _cut_vocabulary(self, words: Spans) -> None:
        inner, head = self.model.model, self.model.lm_head
        self.first_word = words[self.axis.rank][0]
        self._cut("model.embed_tokens.weight", 0, words)
        inner.embed_tokens = VocabEmbedding(inner.embed_tokens, self.first_word, self.border)
        self.by_columns("lm_head", words)
        head.register_forward_pre_hook(lambda _, args: self.border.enter(args[0]))
        head.register_forward_hook(
            # [B, T, V/n] V, or without gradients [B, T, V] I
            lambda _, args, own: own if torch.is_grad_enabled() else self._all_logits(own)
        )
        self.model.token_loss = self.token_loss

    def _all_logits(self, own: Tensor) -> Tensor:
        """Put the logits of all ranks together: [B, T, V/n] V -> [B, T, V] I."""
        logits = own.new_zeros(*own.shape[:-1], self.model.config.vocab_size)
        logits[..., self.first_word : self.first_word + own.shape[-1]] = own
        return collectives.all_reduce(logits, self.axis, out=logits)

    def token_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of the model's result: [B, T, V/n] V or [B, T, V] I."""
        if logits.shape[-1] == self.model.config.vocab_size:
            return token_loss(logits, targets)
        return vocab_loss(logits, targets, self.axis, self.first_word)

    # ------------------------------------------------------------------ mixtures of experts
    def _cut_mixture(self, moe: MoE, name: str, experts: bool) -> None:
        """Leave a mixture whole, or cut F of every expert, shared ones too.

        The router is outside of the borders: each rank routes the tokens that it has there.
        """
        if self.border.sequence:
            moe.register_forward_pre_hook(self._cut_valid)
        if not experts:
            return
        hidden, n = moe.config.expert_size, self.axis.size
        self._cut(f"{name}.experts.gate_up_proj", 1, evenly(hidden, n), blocks=2)
        self._cut(f"{name}.experts.down_proj", 2, evenly(hidden, n))
        if moe.shared_experts is not None:
            shared = evenly(moe.config.num_shared * hidden, n)
            self.by_columns(f"{name}.shared_experts.gate_proj", shared)
            self.by_columns(f"{name}.shared_experts.up_proj", shared)
            self.by_rows(f"{name}.shared_experts.down_proj", shared)
        moe.core = partial(self._compute_experts, moe.core)

    def _compute_experts(self, core: Any, x: Tensor, routing: Routing) -> Tensor:
        """Enter the border with tokens [N, D] and routing; leave it with the weighted sum."""
        x, weights = (self.border.enter(t[None])[0] for t in (x, routing.weights))
        experts = routing.experts
        if self.border.sequence:
            experts = collectives.all_gather(experts, self.axis)
        summand = core(x, routing._replace(experts=experts, weights=weights))  # [N, D] P
        return self.border.leave(summand[None])[0]

    def _cut_valid(self, _: nn.Module, args: tuple) -> tuple:
        """Cut `valid`, the mask of tokens that count, like the tokens: [B, T] -> [B, T/n]."""
        x, *valid = args
        return x, *(v.chunk(self.axis.size, 1)[self.axis.rank] for v in valid)

    # ------------------------------------------------------------------ gradients
    def _find_partial_gradients(self) -> None:
        """List parameters with partial gradients: each rank computes a part of the sum."""
        names, n = dict(self.model.named_parameters()), self.axis.size
        # Experts that are spread over the axis have seen the tokens of all its ranks.
        self.spread = {name for name, p in names.items() if is_spread_over(p, self.axis)}
        for name in self.spread:
            names[name].spread_outside = n
        if self.border.sequence:  # each rank has seen its own tokens
            summed = [name for name in names if name not in self.spans.keys() | self.spread]
        else:  # each rank has seen its own heads
            summed = [name for name in names if name.endswith(("q_norm.weight", "k_norm.weight"))]
        # For example, a head of keys that two ranks share.
        copied = [name for name in names if len(set(self.spans.get(name, range(n)))) < n]
        self.summed, self.copied = (summed, copied) if n > 1 else ([], [])
        partial_sums = [names[name] for name in self.summed + self.copied]
        self.watch(partial_sums)
        self.hook_gradients(p for p in partial_sums if p.requires_grad)

    def finish_backward(self) -> None:
        """Sum partial gradients: of whole parameters, and of heads that several ranks have."""
        self._sum(self.summed, 1)
        self._sum(self.copied, self.model.config.num_kv_heads)
        super().finish_backward()

    def _sum(self, names: list[str], num_groups: int) -> None:
        """Sum gradients over the ranks of each of `num_groups` groups of neighbours, in one call.

        On 4 ranks with 2 heads of keys, ranks 0 and 1 fill the first row, 2 and 3 the second.
        """
        params = dict(self.model.named_parameters())  # without the layers of other stages
        holders = [piece_of(params[name]) for name in names if name in params]
        for p in holders:
            check_not_summed(p, self.axis)  # under fsdp a backward adds to it without a hook
        mark_summed(holders, self.axis)
        grads = [p.grad for p in holders if p.grad is not None]
        if num_groups == 1:  # whole experts, say: no second copy of large gradients
            for grad in (grad for grad in grads if grad.nbytes >= LARGE):
                collectives.all_reduce(grad, self.axis, out=grad)
            grads = [grad for grad in grads if grad.nbytes < LARGE]
        if not grads:
            return
        group = self.axis.rank * num_groups // self.axis.size
        flat = torch.cat([grad.flatten() for grad in grads])
        rows = flat.new_zeros(num_groups, len(flat))
        rows[group] = flat
        total = collectives.all_reduce(rows, self.axis, out=rows)[group]
        for grad, values in zip(grads, total.split([g.numel() for g in grads]), strict=True):
            grad.copy_(values.view_as(grad))

    # ------------------------------------------------------------------ any number of tokens
    def _pad(self, _: nn.Module, args: tuple) -> tuple:
        """Append tokens until n divides them: causal attention never looks at what follows.

        `generate` asks for 3, 4, 5 ... tokens. A caller with positions has cut them already.
        """
        x, *rest = args
        self.num_added = 0
        if rest:
            return args
        if x.ndim == 3:  # hidden states [B, T/n, D] of another stage: positions of all T tokens
            return x, torch.arange(self.axis.size * x.shape[1], device=x.device)
        self.num_added = -x.shape[1] % self.axis.size
        return (F.pad(x, (0, self.num_added)),)

    def _unpad(self, _: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return out[:, : out.shape[1] - self.num_added] if self.num_added else out
