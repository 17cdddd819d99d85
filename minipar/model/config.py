"""The shape of a Llama: checked sizes, and the counts of parameters and FLOPs; no tensors."""

from dataclasses import dataclass, fields
from typing import Any

from minipar.model.moe import MoEConfig

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def check_kinds(record: Any) -> None:
    """Raise `ValueError` for a field of another type: the text "false" would count as true."""
    for field in fields(record):
        value, kind = getattr(record, field.name), field.type
        fits = (int, float) if kind is float else (kind,)
        if kind in _KINDS and type(value) not in fits:
            raise ValueError(f"{field.name}={value!r} must be {_KINDS[kind]}")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rule to stretch RoPE beyond the first training length: `rope_frequencies`."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. `head_dim=0` stands for `hidden_size // num_heads`.

    With `moe`, some layers have experts instead of an MLP. `qk_norm` normalises each head of
    queries and keys before RoPE (Qwen 3).

    Raises `ValueError` if the sizes do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 2048
    tie_embeddings: bool = False
    moe: MoEConfig | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        for name, value in vars(self).items():
            if type(value) in (int, float) and value <= 0 and name != "head_dim":
                raise ValueError(f"{name}={value} must be positive")
        if self.num_heads % self.num_kv_heads:
            good = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            heads = f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            raise ValueError(f"{heads}; use one of {good}")
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                width = f"hidden_size={self.hidden_size}"
                raise ValueError(f"num_heads={self.num_heads} does not divide {width}")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE turns pairs")

    def check_length(self, seq_len: int) -> None:
        """Raise `ValueError` if a sequence has more tokens than `max_seq_len`."""
        if seq_len > self.max_seq_len:
            too_long = f"a sequence of {seq_len} tokens is longer than"
            raise ValueError(f"{too_long} max_seq_len={self.max_seq_len}")

    @property
    def has_experts(self) -> bool:
        """True if any layer has experts; with a large `moe.first_dense`, none has."""
        return self.moe is not None and any(map(self.moe.is_sparse, range(self.num_layers)))

    # ------------------------------------------------------------------ parameters and FLOPs
    def layer_parts(self, layer: int = 0, active: bool = False) -> dict[str, int]:
        """Return the parameters of a block: attention D·K·(2H + 2G), mlp 3·D·F (SwiGLU), norm.

        The mlp of a mixture is the router and all experts; if `active`, k and the shared.
        """
        heads = self.num_heads + self.num_kv_heads
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.moe is not None and self.moe.is_sparse(layer):
            mlp = self.moe.num_parameters(self.hidden_size, active)
        return {
            "attention": 2 * self.hidden_size * self.head_dim * heads,
            "mlp": mlp,
            "norm": 2 * (self.hidden_size + self.qk_norm * self.head_dim),
        }

    def layer_parameters(self, layer: int = 0, active: bool = False) -> int:
        """Return the parameters of a block: the sum of `layer_parts`."""
        return sum(self.layer_parts(layer, active).values())

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of the first block. All blocks have as many, if all or none have experts."""
        return self.layer_parameters(0)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied embeddings count once."""
        return self._sum_parameters(active=False)

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one token passes: fewer than all in a mixture."""
        return self._sum_parameters(active=True)

    def _sum_parameters(self, active: bool) -> int:
        tables = 1 if self.tie_embeddings else 2
        layers = sum(self.layer_parameters(layer, active) for layer in range(self.num_layers))
        return tables * self.vocab_size * self.hidden_size + layers + self.hidden_size

    def flops_per_token(self, seq_len: int, causal: bool = False) -> int:
        """Return the training FLOPs of a token in a sequence of T tokens: 6·N + 12·L·H·K·T.

        N is the number of parameters that multiply this token. N leaves out the embedding, which is
        a look-up, and experts not chosen for the token. Each parameter costs 2 FLOPs in forward and
        4 in backward. The second term is attention, QKᵀ and AV, over the whole T x T square, as in
        PaLM (2204.02311, appendix B), so that utilisation compares with published figures.
        `causal=True` halves the second term: a kernel that skips the upper triangle does half of
        the work. Recomputed activations do not count.
        """
        multiplying = self.num_active_parameters
        if not self.tie_embeddings:
            multiplying -= self.vocab_size * self.hidden_size
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * seq_len
        return 6 * multiplying + (attention // 2 if causal else attention)
