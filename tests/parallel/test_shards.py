"""Pieces of parameters, rows of them, and the states of their optimizers."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from minipar.comm.mesh import Mesh
from minipar.parallel import ddp, fsdp, zero
from minipar.parallel.base.shards import Region, Row, axes_of, mark, region_of
from minipar.parallel.base.strategy import Strategy
from minipar.train.step import computing_on
from tests.on_ranks import on_ranks
from tests.parallel.layers import on_paper


def test_the_row_of_the_drawing():
    row = Row([nn.Parameter(torch.zeros(k)) for k in (4, 5, 2)], on_paper("dp", 2, 1))
    assert (row.size, row.splits) == (6, [4, 5, 2, 1])
    spans, cuts = zip(*row.places, strict=True)
    assert spans == (slice(0, 0), slice(0, 3), slice(3, 5))
    assert cuts == (slice(0, 0), slice(2, 5), slice(0, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_of_all_ranks_are_the_parameters(size):
    """Mutants: a cut that begins with the shard; a number more than padding needs."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2, 2), ())]
    found: list[list[Tensor]] = [[] for _ in parameters]
    for rank in range(size):
        row = Row(parameters, on_paper("dp", size, rank))
        assert row.splits[-1] < size  # padding
        flat = torch.cat([p.detach().flatten() for p in parameters] + [torch.zeros(size)])
        row.hold(parameters, flat[: size * row.size].view(size, -1)[rank])
        for p, piece, own in zip(parameters, row.pieces, found, strict=True):
            assert piece.ndim == max(p.ndim, 1) and region_of(piece).shape == p.shape
            numbers = region_of(piece).cut(p.detach())
            assert torch.equal(piece, numbers.view_as(piece))
            own.append(piece.detach().flatten())
    for p, own in zip(parameters, found, strict=True):
        assert torch.equal(torch.cat(own), p.flatten())


def test_a_piece_of_a_piece_knows_both_axes_and_the_first_shape():
    p, tp, dp = nn.Parameter(torch.zeros(4, 6)), on_paper("dp", 2), on_paper("dp", 3)
    mark(p, tp, Region((4, 6), (((0, 2),), ((0, 6),))), copy=True)
    p.data = p.data[:2]
    row = Row([p], dp)
    row.hold([p], torch.zeros(4))
    (piece,) = row.pieces
    assert axes_of(piece) == (tp, dp) and region_of(piece).shape == (4, 6) and piece.is_copy
    assert region_of(piece).axes == (tp, dp) and region_of(piece).flat == slice(0, 4)


def trained(kind: str) -> tuple[Strategy, torch.optim.Optimizer]:
    """After two steps of NAdam, whose state has tensors that are no moments."""
    torch.manual_seed(0)
    model, dp = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), Mesh().dp
    if kind == "zero":
        optimizer = zero.ShardedOptimizer(model.parameters(), torch.optim.NAdam, dp)
        strategy = zero.apply(model, dp, optimizer=optimizer)
    else:
        strategy = {"ddp": ddp, "fsdp": fsdp}[kind].apply(model, dp)
        optimizer = torch.optim.NAdam(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        strategy.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    return strategy, optimizer


@pytest.mark.parametrize("kind", ["zero", "fsdp"])
def test_a_number_in_the_state_stays_a_number(kind):
    """Mutant: all but "step" is a moment, so that `mu_product` becomes a matrix."""
    whole = {}
    for how in ("ddp", kind):
        strategy, optimizer = trained(how)
        whole[how] = strategy.full_optimizer_state(optimizer)
        strategy.load_full_optimizer_state(optimizer, whole["ddp"])
        again = strategy.full_optimizer_state(optimizer)
        torch.testing.assert_close(again["state"], whole["ddp"]["state"], rtol=0, atol=0)
    torch.testing.assert_close(whole[kind]["state"], whole["ddp"]["state"], rtol=0, atol=0)
    names = [whole[how]["param_groups"][0]["param_names"] for how in whole]
    assert names[0] == names[1] == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Scale(nn.Module):
    """A parameter without dims, which only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self) -> Tensor:
        return self.scale.square()


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
@on_ranks(2)
def test_a_number_in_the_state_of_a_number_stays_whole(name):
    """Mutant: it is cut, and the rank without the parameter can no longer step."""
    model = Scale()
    strategy = fsdp.apply(model, Mesh(dp=2).dp)
    optimizer = getattr(torch.optim, name)(model.parameters())
    for step in range(2):
        if step:
            state = strategy.full_optimizer_state(optimizer)
            strategy.load_full_optimizer_state(optimizer, state)
        model().backward()
        strategy.finish_backward()
        optimizer.step()
    assert strategy.full_state_dict()["scale"] != 2.0


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp"])
def test_a_whole_state_is_on_the_cpu_to_the_last_number(kind):
    """What a fused optimizer counts on a GPU would be unpickled onto another rank's."""
    strategy, optimizer = trained(kind)
    with mock.patch.object(Tensor, "cpu", lambda tensor: tensor.clone().fill_(7.0)):
        state = strategy.full_optimizer_state(optimizer)["state"]
    values = [value for entries in state.values() for value in entries.values()]
    assert len(values) == 4 * 4 and all((value == 7).all() for value in values)


def test_the_device_that_computes_is_that_of_the_model_when_a_strategy_came():
    """Mutant: that of the parameters now, which may have left for the host."""
    model = nn.Linear(2, 2, device="meta")
    strategy = Strategy(model, Mesh().dp)
    model.weight, model.bias = nn.Parameter(torch.zeros(2, 2)), None
    assert computing_on(model, [strategy]).type == strategy.device.type == "meta"
    assert computing_on(model, []).type == "cpu"
