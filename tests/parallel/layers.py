"""Small modules, and data for them, that the tests of several strategies share."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar.comm.mesh import Axis

WIDTH = 6


class Layers(nn.Module):
    """Linear layers of which a forward uses those in `uses`, in that order."""

    def __init__(self, seed: int, num_layers: int = 6) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.double()

    def forward(self, x: Tensor, uses: tuple[int, ...] | None = None) -> Tensor:
        for i in range(len(self.layers)) if uses is None else uses:
            x = torch.tanh(self.layers[i](x))
        return x


class Branches(Layers):
    """Independent layers added up: gradients arrive in the reverse of the order in `uses`."""

    def forward(self, x: Tensor, uses: tuple[int, ...] | None = None) -> Tensor:
        return sum(
            self.layers[i](x).sin() for i in (range(len(self.layers)) if uses is None else uses)
        )


class Reentrant(Layers):
    """Layer 5, whose gradients a strategy sends first, is used in two re-entrant checkpoints and
    outside of them."""

    def forward(self, x: Tensor, uses: None = None) -> Tensor:
        def pair(i: int, x: Tensor) -> Tensor:
            return torch.tanh(self.layers[5](torch.tanh(self.layers[i](x))))

        x = self.layers[0](x)  # a checkpoint needs an input that requires a gradient
        x = checkpoint(pair, 1, x, use_reentrant=True)
        x = checkpoint(pair, 2, x, use_reentrant=True)
        return self.layers[5](self.layers[3](x))


def on_paper(name: str, size: int, rank: int = 0) -> Axis:
    """An axis without a process group: whoever tries to communicate along it fails."""
    return Axis(name, rank, size, tuple(range(size)))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def data(rank: int, step: int = 0, width: int = WIDTH) -> Tensor:
    """[4, D], different for every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, width, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int = 0, uses=None) -> Tensor:
    return model(data(rank, step), uses).square().sum()


ALL = (0, 1, 2, 3, 4, 5)


USED = {  # name -> (step, rank) -> layers
    "never": lambda step, rank: (0, 2, 3, 5),
    "by one rank": lambda step, rank: (0, 2, 3, 5) if rank else ALL,
    "by the other rank": lambda step, rank: ALL if rank else (0, 1, 5),
    "by ranks in turn": lambda step, rank: ((0, 1), (2, 3))[(step + rank) % 2],
    "only later": lambda step, rank: ALL if step else (0, 1, 5),
    "only at first": lambda step, rank: (0, 1, 5) if step else ALL,
}


NUM_LAYERS, FORWARD, BACKWARD = 6, 0.01, 0.04  # seconds per layer


SLACK = 0.1  # seconds that a busy machine may add to a step
