"""Tensor parallelism: every matrix of a layer is cut, and all ranks work on the same tokens.

Idea.   Of two matrices in a row, cut the first by columns and the second by rows. What lies between
        them (heads, hidden units) never has to leave its rank; one sum at the end joins all.
Math.   act(x [A1 A2]) [B1; B2] = act(x A1) B1 + act(x A2) B2. In a Llama the first are q, k, v and
        gate, up; the second are o and down. The embedding is cut by rows of the vocabulary (a rank
        that does not have a token adds zero), and so is the head: every rank has the logits of its
        own words, and the loss needs three numbers per token of the others, see `vocab_loss`.
Shapes. Types along tp as in comm/autograd.py. Between the matrices V; at the borders

          plain           x [B, T, D] I    -convert->     R  ...  P  -all_reduce->      I
          ``sequence``    x [B, T/n, D] V  -all_gather->  R  ...  P  -reduce_scatter->  V

        Megatron's sequence parallelism is this swap and nothing else, so it is an option here, not
        a file: what lies outside of the borders (norms, residual stream) is cut along the tokens.
        Norm weights then see a part of the tokens on each rank: their gradients are P, and are
        summed in `finish_backward` (T12).
Comms.  A = (n-1)/n of the bytes of one activation [B, T, D]. Per microbatch, forward and backward:
        (8 L + 4) A, plain or ``sequence``: an all-reduce is a reduce-scatter and an all-gather.
        That is 4 all-reduces per layer, one for the embedding and one for the head. The loss adds
        6 (n-1)/n of the bytes of [B, T] numbers in fp32. ``overlap`` adds 2 L A: inputs of q, k, v
        and gate, up are gathered again in backward instead of kept.
        Of a mixture, which each rank computes whole, it is 2 all-reduces less, unless ``experts``
        cuts it: then they are there, and one of the weights [B, T, k] in backward.
        Per step, 2 (n-1)/n of: with ``sequence`` the norm weights' gradients, else those of the
        norms of heads, where there are any; with n > G the gradients of k and v. Nothing of this is
        hidden, unless ``overlap``.
Memory. Bytes of matrices, gradients and optimizer state / n. Activations that a layer keeps for its
        backward, in numbers per token: inside of the borders (2 H K + 2 G K + 4 F) / n (q, k, v and
        attention's result; gate, silu, up, their product); outside, for two norms, each one's input
        and result: 4 D plain, 2 D + 2 D/n with ``sequence`` (it keeps the results as gathered),
        4 D/n with ``overlap`` (it gathers again). Where RMSNorm is not one kernel, as on CPUs, it
        keeps another copy of its input.
Costs you. 4 all-reduces per layer that nothing hides, so a fast link: tp stays inside a node.
        n divides heads and hidden units, and divides G key/value heads or is a multiple of G.
Source. Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al. 2022
        (arXiv 2205.05198), section 4.2.2, for ``sequence``; Wang et al. 2022, "Overlap
        communication with dependent computation via decomposition" (ASPLOS 2023), for ``overlap``.
In torch: `parallelize_module` with `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`,
        `loss_parallel`; ``overlap`` is its async tensor parallelism.
Proved by tests/parallel/test_tensor.py and tests/parity/test_tensor.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import collectives
from minipar.comm.mesh import Axis
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.model.moe import MoE, MoEConfig, Routing
from minipar.parallel.base.replicate import replicate
from minipar.parallel.base.shards import (
    axes_of,
    check_divides,
    is_spread_over,
    mark,
    piece_of,
)
from minipar.parallel.base.strategy import (
    Strategy,
    check_not_summed,
    mark_summed,
    refuse_state,
)
from minipar.parallel.matrices import (
    Border,
    Pieces,
    RowLinear,
    VocabEmbedding,
    VocabHead,
    by_heads,
    evenly,
    vocab_loss,
)
from minipar.parallel.overlap import OverlappedRowLinear, fuse

LARGE = 2**20
"""Bytes of a gradient from which a call of its own costs less than to copy it beside others."""


def apply(
    model: Llama,
    axis: Axis,
    *,
    sequence: bool = False,
    overlap: bool = False,
    experts: bool = False,
    z_loss: float = 0.0,
) -> "TensorParallel":
    """Cut the matrices of `model` along `axis`, in place; the values are those of rank 0.

    Names and ties of parameters stay, and so do the parameters themselves: each now holds its piece
    (`full_shape`, `shard_axes`). With gradients enabled the model returns the logits of this rank's
    words [B, T, V/n], which `model.token_loss` knows how to compare with targets; under `no_grad`
    it returns all of them, so that sampling works as ever.

    With other strategies: apply this one first, finish it last (``[ddp, tensor]`` in a list of
    strategies), because its sums are over gradients that no other strategy is working on.

    Args:
        sequence: cut norms and residual stream along the tokens. Any number of tokens will do; one
            that n does not divide is padded.
        overlap: ring steps interleaved with partial products, see `ring_gather`; needs `sequence`.
        experts: cut each expert, too, instead of leaving all whole on every rank ("expert tensor
            parallelism").
        z_loss: adds z_loss · (log sum exp)² per token, which keeps logits from drifting
            (PaLM, arXiv 2204.02311, section 5, uses 1e-4).

    Raises `ValueError` for a model that is no Llama and for sizes that the axis does not divide.
    """
    check(model, axis, sequence, overlap)
    if experts:
        check_experts(model.config.moe, axis.size, axis.name)
    replicate(model, axis)
    return TensorParallel(model, Border(axis, sequence), overlap, z_loss, experts)


def check(model: nn.Module, axis: Axis, sequence: bool = False, overlap: bool = False) -> None:
    """Raise `ValueError` unless `model` can be cut along `axis`."""
    if not isinstance(getattr(model, "config", None), LlamaConfig):
        raise ValueError(f"tensor parallelism cuts a Llama by its names, not a {type(model)}")
    if overlap and not sequence:
        raise ValueError("overlap=True decomposes the collectives of sequence=True; set both")
    if axis.size > 1 and getattr(model, "loss_chunk", 0):
        raise ValueError(
            f"loss_chunk={model.loss_chunk} multiplies by the whole head, which "
            f"{axis.name}={axis.size} cuts; set it to 0"
        )
    spread = [p for p in model.parameters() if is_spread_over(p, axis)]
    cut = [p for p in model.parameters() if not is_spread_over(p, axis)]
    if any(axis.name == a.name for p in cut for a in axes_of(p)):
        raise ValueError(f"the model is cut along {axis.name} already")
    if spread and not sequence:
        raise ValueError(
            f"experts are spread over {axis.name}, whose ranks would send the same tokens; "
            f"sequence=True cuts sequences, so that they hold different ones"
        )
    check_sizes(model.config, axis.size, axis.name)


def check_sizes(config: LlamaConfig, n: int, name: str = "tp") -> None:
    """Raise `ValueError` unless n ranks can share the matrices of such a Llama."""
    if n > 1 and config.qk_norm == "all":
        what = "a norm over all heads (qk_norm='all')"
        raise ValueError(f"{name}={n}: tensor parallelism does not cut {what}; use {name}=1")
    limits = {"num_heads": config.num_heads}
    if config.moe is None or not all(map(config.moe.is_sparse, range(config.num_layers))):
        limits["intermediate_size"] = config.intermediate_size
    kv_heads = config.num_kv_heads

    def fits(n: int) -> bool:
        return not any(size % n for size in limits.values()) and not (kv_heads % n and n % kv_heads)

    good = ", ".join(str(k) for k in range(1, config.num_heads + 1) if fits(k))
    for limit, size in limits.items():
        if size % n:
            raise ValueError(f"{name}={n} does not divide {limit}={size}; use one of {good}")
    if not fits(n):
        raise ValueError(
            f"{name}={n} neither divides num_kv_heads={kv_heads} nor is a multiple of it; "
            f"use one of {good}"
        )
    if n > config.vocab_size:
        raise ValueError(f"{name}={n} ranks for vocab_size={config.vocab_size} words")


def check_experts(moe: MoEConfig | None, n: int, name: str = "tp") -> None:
    """Raise `ValueError` unless n ranks can share each expert."""
    if moe is None:
        raise ValueError(f"{name}={n} cuts experts, and this Llama has none (moe=None)")
    check_divides(name, n, "expert_size", moe.expert_size)


class TensorParallel(Strategy):
    """A Llama whose matrices are cut; made by `apply`."""

    def __init__(
        self, model: Llama, border: Border, overlap: bool, z_loss: float, experts: bool = False
    ) -> None:
        super().__init__(model, border.axis)
        self.border, self.overlap, self.shard_axes = border, overlap, (border.axis,)
        self.pieces: dict[str, Pieces] = {}  # of which parameters each rank has a piece
        self.whole: list[str] = []  # and yet with a gradient from the own tokens only
        self.shared: list[str] = []  # k and v of a head that several ranks have
        self.num_kv_heads = model.config.num_kv_heads
        self.words = evenly(0, model.config.vocab_size, self.axis.size)
        for i, layer in enumerate(model.model.layers):
            if layer is not None:
                self._cut_attention(layer.self_attn, f"model.layers.{i}.self_attn")
                if not isinstance(layer.mlp, MoE):
                    self._cut_mlp(layer.mlp, f"model.layers.{i}.mlp")
                    continue
                if border.sequence:
                    layer.mlp.register_forward_pre_hook(self._own_tokens)
                if experts:
                    self._cut_experts(layer.mlp, f"model.layers.{i}.mlp")
        self._cut_vocabulary(z_loss)
        # Experts that ranks of this axis share have seen the tokens of all of them.
        apart = {n: p for n, p in model.named_parameters() if is_spread_over(p, self.axis)}
        for p in apart.values():
            p.spread_outside = self.axis.size
        self.apart = apart.keys()
        if border.sequence:
            # What is still whole and lies outside of the borders: norms, biases of second matrices.
            own = self.pieces.keys() | self.apart
            self.whole = [n for n, _ in model.named_parameters() if n not in own]
            _pad_and_cut(model, self.axis.size)
        else:  # the norm of a head is whole, too, and each rank has heads of its own
            norms = "q_norm.weight", "k_norm.weight"
            self.whole = [n for n, _ in model.named_parameters() if n.endswith(norms)]
        if self.axis.size > 1:
            summed = [model.get_parameter(name) for name in (*self.whole, *self.shared)]
            self.watch(summed)
            self.hook_gradients(summed)
            refuse_state(model)

    def _cut_attention(self, attention: nn.Module, name: str) -> None:
        config, n = self.model.config, self.axis.size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._columns(f"{name}.q_proj", by_heads(0, heads, head_dim, n))
        for linear in ("k_proj", "v_proj"):
            self._columns(f"{name}.{linear}", by_heads(0, kv_heads, head_dim, n))
        self._rows(attention, f"{name}.o_proj", by_heads(1, heads, head_dim, n))
        self._enter(attention, "q_proj", "k_proj", "v_proj")

    def _cut_mlp(self, mlp: nn.Module, name: str) -> None:
        hidden, n = self.model.config.intermediate_size, self.axis.size
        for linear in ("gate_proj", "up_proj"):
            self._columns(f"{name}.{linear}", evenly(0, hidden, n))
        self._rows(mlp, f"{name}.down_proj", evenly(1, hidden, n))
        self._enter(mlp, "gate_proj", "up_proj")

    def _cut_experts(self, moe: MoE, name: str) -> None:
        """Cut F of every expert, shared ones too: one region, which their weighted sum leaves.

        The router stays outside: each rank routes all tokens, or those of its part of a sequence.
        """
        hidden, n, whole = moe.config.expert_size, self.axis.size, moe.core
        self._cut(f"{name}.experts.gate_up_proj", replace(evenly(1, hidden, n), blocks=2))
        self._cut(f"{name}.experts.down_proj", evenly(2, hidden, n))
        if moe.shared_experts is not None:
            for linear, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
                pieces = evenly(dim, moe.config.num_shared * hidden, n)
                self._cut(f"{name}.shared_experts.{linear}.weight", pieces)

        def region(x: Tensor, routing: Routing) -> Tensor:
            x, weights = (self.border.enter(t[None])[0] for t in (x, routing.weights))
            experts = routing.experts
            if self.border.sequence:
                experts = collectives.all_gather(experts, self.axis)
            summand = whole(x, routing._replace(experts=experts, weights=weights))  # [N, D] P
            return self.border.leave(summand[None])[0]

        moe.core = region

    def _own_tokens(self, _: nn.Module, args: tuple) -> tuple:
        """A router stays whole: each rank routes its tokens, without sequence cuts all of them.

        Which tokens count, [B, T], is cut as the tokens are.
        """
        x, *valid = args
        return x, *(v.chunk(self.axis.size, 1)[self.axis.rank] for v in valid)

    def _cut_vocabulary(self, z_loss: float) -> None:
        model, (start, _) = self.model, self.words.spans[self.axis.rank]
        if model.model.embed_tokens is not None:
            self._cut("model.embed_tokens.weight", self.words)
            embedding = VocabEmbedding(model.model.embed_tokens, start, self.border)
            model.model.embed_tokens = embedding
        if model.lm_head is not None:
            self._columns("lm_head", self.words)
            words = Pieces(-1, self.words.spans)
            model.lm_head = VocabHead(model.lm_head, words, self.border)

            def loss(logits: Tensor, targets: Tensor) -> Tensor:
                if logits.shape[-1] == model.config.vocab_size and self.axis.size > 1:
                    return token_loss(logits, targets)  # of all words: computed under no_grad
                weight = z_loss if torch.is_grad_enabled() else 0.0  # validation knows no z_loss
                return vocab_loss(logits, targets, self.axis, start, z_loss=weight)

            model.token_loss = loss

    def _columns(self, name: str, pieces: Pieces) -> None:
        """Cut the first of two matrices, [F, D] -> [F/n, D], and its bias."""
        linear = self.model.get_submodule(name)
        self._cut(f"{name}.weight", pieces)
        if linear.bias is not None:
            self._cut(f"{name}.bias", pieces)
        linear.out_features = len(linear.weight)

    def _rows(self, parent: nn.Module, name: str, pieces: Pieces) -> None:
        """Cut the second of two matrices, [D, F] -> [D, F/n]."""
        self._cut(f"{name}.weight", pieces)
        linear = self.model.get_submodule(name)
        module = OverlappedRowLinear if self.overlap else RowLinear
        setattr(parent, name.rpartition(".")[2], module(linear, self.border))

    def _enter(self, region: nn.Module, *firsts: str) -> None:
        """Let the input of `region` cross the border once, for all of its first matrices."""
        if self.overlap:
            fuse(region, firsts, self.axis)
        else:
            region.register_forward_pre_hook(
                lambda _, args: (self.border.enter(args[0]), *args[1:])
            )

    def _cut(self, name: str, pieces: Pieces) -> None:
        """Replace the values of a parameter by the piece of this rank."""
        self.pieces[name] = pieces
        param = self.model.get_parameter(name)
        if self.axis in axes_of(param):
            return  # tied to one that is cut already
        rank, spans = self.axis.rank, pieces.spans
        mark(param, self.axis, copy=spans.index(spans[rank]) != rank)  # each head counts once
        param.data, param.grad = pieces.own(param.data, rank), None
        if len(set(spans)) < len(spans):
            self.shared.append(name)

    def finish_backward(self) -> None:
        """Sum what every rank computed a part of: whole parameters, and shared heads."""
        super().finish_backward()
        self._sum(self.whole, num_groups=1)
        self._sum(self.shared, num_groups=self.num_kv_heads)
        self.note_reduced()

    def _sum(self, names: Iterable[str], num_groups: int) -> None:
        """Add up gradients over the ranks of each of `num_groups` neighbourhoods, in one call.

        A neighbourhood writes into a row of its own, so that the axis needs no groups inside it.
        What is large by itself, as copies of experts are, is added up where it lies.
        """
        if self.axis.size == 1:
            return
        params = dict(self.model.named_parameters())
        holders = [piece_of(params[name]) for name in names if name in params]
        holders = [p for p in holders if p.grad is not None]
        for p in holders:
            check_not_summed(p, self.axis)  # one to which no gradient has been added
        grads = [p.grad for p in holders]
        if num_groups == 1:
            for grad in (grad for grad in grads if grad.nbytes >= LARGE):
                collectives.all_reduce(grad, self.axis, out=grad)
            grads = [grad for grad in grads if grad.nbytes < LARGE]
        if not grads:
            return
        own = self.axis.rank * num_groups // self.axis.size
        flat = torch.cat([grad.flatten() for grad in grads])
        table = flat.new_zeros(num_groups, len(flat))
        table[own] = flat
        sums = collectives.all_reduce(table, self.axis, out=table)[own]
        for grad, total in zip(grads, sums.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))
        mark_summed(holders, self.axis)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks that have the same of a parameter as this one."""
        if name in self.apart:
            return (self.axis.rank,)
        if name not in self.pieces:
            return tuple(range(self.axis.size))
        spans = self.pieces[name].spans
        return tuple(r for r, span in enumerate(spans) if span == spans[self.axis.rank])

    # ------------------------------------------------------------------ whole again
    @torch.no_grad()
    def join(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Put together what each rank has a piece of, by the names of parameters. A collective."""
        joined: dict[int, Tensor | None] = {id(None): None}
        for name, tensor in tensors.items():
            if id(tensor) in joined:
                continue  # tied, or a gradient that is not there
            if name in self.pieces:
                piece = tensor.detach().to(self.device)  # which sends; states may be on the host
                joined[id(tensor)] = self.pieces[name].join(piece, self.axis)
            else:
                joined[id(tensor)] = tensor.detach().clone()
        return {name: joined[id(tensor)] for name, tensor in tensors.items()}

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.join(self.model.state_dict(keep_vars=True))

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return copies of all gradients, named and shaped as in the serial model. A collective."""
        return self.join({name: p.grad for name, p in self.model.named_parameters()})

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take this rank's pieces out of what `join` returned, on any number of ranks."""
        return {
            name: self.pieces[name].own(whole, self.axis.rank) if name in self.pieces else whole
            for name, whole in tensors.items()
        }

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of what `full_state_dict` returned, on any number of ranks."""
        own = self.own(state)
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            tensor.copy_(own[name])


def _pad_and_cut(model: Llama, n: int) -> None:
    """Let `model` run on a number of tokens that n divides: causal attention never looks at more.

    Hooks, so that they go with a part of the model, which may be a stage of a pipeline. They raise
    `ValueError` where tokens cannot be added unnoticed: beside positions or a mask, or where logits
    are made by another stage.
    """
    added = [0]

    def pad(module: Llama, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        names = "tokens", "positions", "mask", "valid"
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        x, positions, mask, valid = (call.get(name) for name in names)
        added[0] = 0
        if x.ndim == 3:  # hidden states [B, T/n, D] V, for a pipeline stage: cut along the tokens
            if positions is None:
                positions = torch.arange(n * x.shape[1], device=x.device)
            return (x, positions, mask, valid), {}
        seq_len = x.shape[1]
        missing = -seq_len % n
        if not missing:
            return None
        if positions is not None or mask is not None or module.lm_head is None:
            raise ValueError(
                f"sequence parallelism on {n} ranks, with positions, a mask or a pipeline, needs a "
                f"multiple of {n} tokens, not {seq_len}; pad to {seq_len + missing}"
            )
        added[0] = missing
        valid = None if valid is None else F.pad(valid, (0, missing))
        return (F.pad(x, (0, missing)), None, None, valid), {}

    def cut(module: Llama, args: tuple, output: Tensor) -> Tensor:
        return output[:, : output.shape[1] - added[0]] if added[0] else output

    model.register_forward_pre_hook(pad, with_kwargs=True)
    model.register_forward_hook(cut)
