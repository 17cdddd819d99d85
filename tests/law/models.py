"""Small models for parity tests: Llamas in all variants, and modules that are no Llamas."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar.model.llama import Llama, LlamaConfig
from minipar.model.recompute import checkpoint_activations
from minipar.parallel.fsdp import FullySharded


def llama(seed: int, **changes) -> Llama:
    """A Llama of three layers with grouped-query attention and tied embeddings."""
    shape = dict(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        tie_embeddings=True,
    )
    return Llama(LlamaConfig(**{**shape, **changes}), seed=seed)


def untied_llama(seed: int) -> Llama:
    """Embedding and head apart."""
    return llama(seed, tie_embeddings=False)


def recomputing_llama(seed: int) -> Llama:
    """Every block runs its forward a second time in backward."""
    model = llama(seed)
    checkpoint_activations(model, "full")
    return model


class Foreign(nn.Module):
    """Any module: layers with biases, a buffer, a parameter used twice, one never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(61, 10)
            self.mix = nn.Linear(10, 10)
            self.norm = nn.LayerNorm(10)
            self.conv = nn.Conv1d(10, 10, 3, padding=1)
            self.never_used = nn.Parameter(torch.randn(4, 5))
            self.scale = nn.Parameter(torch.randn(()))
            self.register_buffer("offset", torch.randn(10))
            self.head = nn.Linear(10, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.offset
        x = self.mix(torch.tanh(self.mix(x)))  # the same weights twice
        x = x + self.conv(self.norm(x).mT).mT * self.scale
        return self.head(x)


class SometimesUsed(nn.Module):
    """A mixture in miniature: which half of the weights is used depends on the data.

    On one device all of them are; on several, a rank may use one half only.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(61, 8)
            self.even, self.odd = nn.Linear(8, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rows = []
        for row, first in zip(x, tokens[:, 0].tolist(), strict=True):
            rows.append(self.odd(row) if first % 2 else self.even(row))
        return self.head(torch.stack(rows))


class Encoder(nn.Module):
    """torch's own layers: dropout off, norms with biases, fused projections."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(61, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            for p in self.encoder.parameters():  # copies of one layer would start equal
                p.data = torch.randn_like(p) / 3
            self.head = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class Checkpointed(nn.Module):
    """Checkpoints around whole blocks, as foreign models have them; one block runs twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(61, 8)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)) for _ in range(3)
            )
            self.head = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in [*self.layers, self.layers[1]]:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def frozen_embedding(model: nn.Module) -> None:
    """Freeze what turns tokens into vectors."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)


def gathered_bytes(strategy: FullySharded) -> int:
    """Memory of gathered weights on this rank now."""
    return sum(row.full.untyped_storage().nbytes() for row in strategy.rows)
