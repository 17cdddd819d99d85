"""Expert parallelism by itself: what it sends, what it refuses, and what tokens meet on the way."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from minipar.comm.collectives import all_reduce
from minipar.comm.mesh import Axis, Mesh
from minipar.model.llama import MLP
from minipar.model.moe import MoE, MoEConfig, Routing, routers
from minipar.observe import timeline
from minipar.parallel import ddp, expert, fsdp, local_sgd, tensor, zero
from minipar.train import checkpoint
from minipar.train.data import Batches, Sequences
from minipar.train.step import evaluate
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel.layers import on_paper

SIX = MoEConfig(6, 2, 8)
CONFIG = models.llama(0, moe=SIX).config


def one_layer(moe: MoEConfig = SIX, dtype: torch.dtype = torch.float64) -> MoE:
    """A mixture of width 16, the same on every rank that asks."""
    layer = MoE(moe, 16, MLP(16, 8) if moe.num_shared else None)
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=stream) / 3)
    return layer.to(dtype)


def tokens_of(rank: int, num: int = 20, dtype: torch.dtype = torch.float64) -> Tensor:
    stream = torch.Generator().manual_seed(rank)
    return torch.randn(1, num, 16, generator=stream).to(dtype)


EIGHT = MoEConfig(8, 3, 8)


def _sent(moe: MoEConfig, ep: int, dispatch: str, nodes=1, unless=nullcontext) -> tuple:
    """Bytes by verb, with backward; the experts of my tokens."""
    axis, layer = Mesh(dp=1, ep=ep).ep, one_layer(moe)
    expert.apply(layer, axis, dispatch=dispatch, nodes=nodes)
    x, sent = tokens_of(axis.rank).requires_grad_(), Counter()
    with timeline.record() as recorded, unless():
        layer(x).sum().backward()
    for span in recorded.select(kind="comm"):
        assert span.axis == "ep"
        sent[span.name] += span.num_bytes
    return sent, layer.gate(x).experts


@pytest.mark.parametrize("dispatch", ["all_to_all", "overlapped"])
def test_bytes_are_those_of_the_docstring(ranks, dispatch):
    """Rows that leave a rank, twice forward and twice backward, and counts once."""
    outcomes = ranks(3).run(_sent, SIX, 3, dispatch)
    table = torch.stack([(chosen // 2).flatten().bincount(minlength=3) for _, chosen in outcomes])
    moved = table - table.diag().diag()
    for rank, (sent, _) in enumerate(outcomes):
        mine, theirs = moved[rank].sum(), moved[:, rank].sum()  # M and M'
        assert sent == {"all_to_all": 2 * (mine + theirs) * 16 * 8, "all_gather": 2 * 6 * 8}
    assert len(set(map(tuple, table.tolist()))) > 1  # uneven


@pytest.mark.parametrize("nodes", [2, 4])
def test_between_nodes_there_is_one_copy_of_a_token(ranks, nodes):
    """Bytes are those of the docstring: by the nodes touched, and not by the slots."""
    outcomes, row, m = ranks(4).run(_sent, EIGHT, 4, "hierarchical", nodes), 16 * 8, 4 // nodes
    copies = torch.zeros(4, 4)  # [from, to]
    slots = torch.zeros(4, 4)  # from the rank where a copy arrives
    for rank, (_, chosen) in enumerate(outcomes):
        for experts in chosen.tolist():
            for node in {e // 2 // m for e in experts}:
                copies[rank, node * m + rank % m] += 1
            for e in experts:
                slots[e // 2 // m * m + rank % m, e // 2] += 1
    copies.fill_diagonal_(0), slots.fill_diagonal_(0)
    for rank, (sent, chosen) in enumerate(outcomes):
        u, v = copies[rank].sum(), slots[rank].sum()
        theirs, arrived = copies[:, rank].sum(), slots[:, rank].sum()
        rows = 2 * (u + theirs + v + arrived) * row
        rows += (u + theirs) * 3 * 8 + u * 3 * 8  # weights, choices
        assert sent == {"all_to_all": rows, "all_gather": 3 * 8 * (8 + nodes)}
        ranks_elsewhere = (chosen // 2 // m != rank // m).sum()
        assert u < ranks_elsewhere or nodes == 4  # what an all-to-all would send there
        assert nodes == 4 or v > 0


# ---------------------------------------------------------------------- what is refused
def _share_data(how: str, model: torch.nn.Module, data: Axis) -> None:
    if how == "fsdp":
        fsdp.apply(model, data)
    elif how == "ddp":
        ddp.apply(model, data)
    else:
        zero.ShardedOptimizer(model.parameters(), torch.optim.SGD, data, lr=0.1)


@pytest.mark.parametrize("how", ["ddp", "zero", "fsdp"])
@on_ranks(4)
def test_copies_that_were_forgotten_are_refused(how):
    """Gradients of experts would lack the tokens of half of the ranks, and nobody would notice."""
    mesh = Mesh(dp=2, ep=2)
    wrong = {
        "copies=1, so 2 ranks share their gradients, but data": (None, mesh.joint("dp", "ep")),
        "copies=2, so 4 ranks share their gradients, but data": (mesh.dp, mesh.dp),
    }
    for says, (copies, data) in wrong.items():
        model = models.llama(0, moe=SIX)
        expert.apply(model, mesh.ep, copies=copies)
        with pytest.raises(ValueError, match=says):
            _share_data(how, model, data)
    model = models.llama(0, moe=SIX)
    expert.apply(model, mesh.ep, copies=mesh.dp)
    _share_data(how, model, mesh.joint("dp", "ep"))


@pytest.mark.parametrize("before", ["expert", "ddp", "fsdp"])
@on_ranks(2)
def test_experts_are_spread_once_and_first(before):
    axis, model = Mesh(dp=1, ep=2).ep, models.llama(0, moe=SIX)
    if before == "expert":
        expert.apply(model, axis)
    else:
        _share_data(before, model, axis)
    with pytest.raises(ValueError, match="is shared already; apply expert once"):
        expert.apply(model, axis)


def test_trap_34_a_checkpoint_of_one_ranks_experts_is_refused():
    weights = models.llama(0, moe=SIX).state_dict()
    own = {name: tuple(value.shape) for name, value in weights.items()}
    weights = {n: v[:3] if ".experts." in n else v for n, v in weights.items()}
    with pytest.raises(
        checkpoint.CheckpointError, match=r"experts.down_proj has shape \(3, 16, 8\)"
    ):
        checkpoint.check_shapes(own, weights, "checkpoint x")


@on_ranks(2)
def test_tensor_parallelism_leaves_experts_of_its_ranks_to_them():
    """Mutants: all ranks take over those of the first; the same tokens are sent twice."""
    mesh, model = Mesh(dp=1, tp=2), models.llama(0, moe=SIX)
    expert.apply(model, mesh.tp)
    name = "model.layers.0.mlp.experts.down_proj"
    before = model.get_parameter(name).detach().clone()
    with pytest.raises(ValueError, match="whose ranks would send the same tokens; sequence=True"):
        tensor.apply(model, mesh.tp)
    strategy = tensor.apply(model, mesh.tp, sequence=True)
    assert torch.equal(model.get_parameter(name), before)  # each rank keeps its own
    assert name in strategy.spread
    with pytest.raises(ValueError, match="cut along tp already"):
        tensor.apply(model, mesh.tp, sequence=True)
    other = models.llama(0, moe=SIX)
    tensor.apply(other, mesh.tp, sequence=True)
    with pytest.raises(ValueError, match="is shared already"):
        expert.apply(other, mesh.tp)


# ---------------------------------------------------------------------- traps
def _with_seats(dispatch: str) -> tuple[Tensor, int, Tensor]:
    axis, layer = Mesh(dp=1, ep=2).ep, one_layer(replace(SIX, capacity_factor=0.7))
    expert.apply(layer, axis, dispatch=dispatch)
    x = torch.cat([tokens_of(3 * axis.rank + i) for i in range(2)])
    return layer(x), int(layer.dropped), x


@pytest.mark.parametrize("dispatch", expert.CORES.keys() - {"hierarchical"})
def test_trap_35_all_ranks_agree_on_the_capacity_however_uneven_they_are(ranks, dispatch):
    """Each sequence has seats of its own, so what is dropped hangs on no rank."""
    outcomes = ranks(2).run(_with_seats, dispatch)
    alone = one_layer(replace(SIX, capacity_factor=0.7))
    out = alone(torch.cat([x for *_, x in outcomes]))
    torch.testing.assert_close(torch.cat([mine for mine, *_ in outcomes]), out)
    dropped = [num for _, num, _ in outcomes]
    assert sum(dropped) == alone.dropped and len(set(dropped)) > 1 and min(dropped) > 0


def _evaluated(dispatch: str) -> Tensor:
    axis, layer = Mesh(dp=1, ep=2).ep, one_layer(replace(SIX, capacity_factor=0.3)).eval()
    expert.apply(layer, axis, dispatch=dispatch)
    return layer(tokens_of(axis.rank))


@pytest.mark.parametrize("dispatch", ["all_to_all", "padded"])
def test_in_evaluation_no_rank_drops(ranks, dispatch):
    for rank, out in enumerate(ranks(2).run(_evaluated, dispatch)):
        torch.testing.assert_close(out, one_layer()(tokens_of(rank)))


@on_ranks(3)
def test_with_a_capacity_nothing_is_read_and_messages_are_even():
    moe, names = replace(SIX, capacity_factor=1.0), ("tolist", "item", "cpu", "__bool__", "__int__")
    read = dict.fromkeys(names, mock.Mock(side_effect=AssertionError))
    sent, _ = _sent(moe, 3, "padded", unless=partial(mock.patch.multiple, Tensor, **read))
    seats = moe.capacity(20)
    assert sent == {"all_to_all": 4 * 2 * seats * 2 * 16 * 8}  # 2 ranks, 2 experts each


def _counts() -> tuple[Tensor, Tensor, Tensor]:
    axis, layer = Mesh(dp=1, ep=2).ep, one_layer(replace(SIX, bias_speed=0.1, balance="batch"))
    expert.apply(layer, axis)
    layer(tokens_of(axis.rank)).sum().backward()
    own = layer.gate.counts.clone()
    layer.gate.update_bias()
    layer.gate.update_bias()
    return own, layer.gate.counts, layer.gate.e_score_correction_bias


def test_trap_36_sums_over_ranks_leave_the_counts_of_this_rank(ranks):
    """And the bias is that of the sum, on all ranks."""
    outcomes = ranks(2).run(_counts)
    load = sum(own for own, *_ in outcomes).double()
    for own, after, bias in outcomes:
        assert torch.equal(own, after) and own.sum() == 40
        torch.testing.assert_close(bias.double(), 0.2 * (load.mean() - load).sign())
    assert not torch.equal(outcomes[0][0], outcomes[1][0])


def _evaluate(num_sequences: int) -> float:
    axis = Mesh(dp=1, ep=2).ep
    model = models.llama(0, moe=SIX).double()
    expert.apply(model, axis)
    return evaluate(model, _batches(num_sequences, axis.rank, axis.size), axis)


def _batches(num_sequences: int, rank: int, size: int) -> list:
    text = torch.arange(num_sequences * 8 + 1) * 7 % 61
    return list(Batches(Sequences(text, 8), 2, rank, size, seed=0))


@pytest.mark.parametrize("num_sequences", [1, 3, 5])
def test_trap_37_an_uneven_evaluation_keeps_ranks_in_step(ranks, num_sequences):
    alone = _batches(num_sequences, 0, 1)
    axis = on_paper("dp", 1)
    truth = evaluate(models.llama(0, moe=SIX).double(), alone, axis)
    assert ranks(2).run(_evaluate, num_sequences) == pytest.approx([truth] * 2, rel=1e-10)


@on_ranks(2)
def test_trap_38_no_row_is_computed_that_nobody_sent():
    """With NaN in all memory that is not written yet, and uneven counts, one expert without any."""
    axis, layer = Mesh(dp=1, ep=2).ep, one_layer(dtype=torch.float32)
    expert.apply(layer, axis, dispatch="overlapped")
    chosen = torch.tensor([[0, 1], [0, 3], [5, 0], [0, 1], [0, 5]][axis.rank :])
    x = tokens_of(axis.rank, len(chosen), torch.float32)[0].requires_grad_()
    weights = torch.rand(chosen.shape, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        layer.core(x, Routing(chosen, weights)).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    grads = [x.grad, weights.grad, *(p.grad for p in layer.experts.parameters())]
    assert all(grad.isfinite().all() for grad in grads)


def _cores(moe: MoEConfig) -> list[str]:
    return [name for name in expert.CORES if name != "padded" or moe.capacity_factor is not None]


def _rows(rank: int, dispatch: str) -> Tensor:
    """Sequences of this rank: as many on each where messages are even."""
    num = 2 + rank * (dispatch not in ("gather", "padded"))
    return torch.cat([tokens_of(10 * rank + i, 5) for i in range(num)])


def _by_each_core(moe: MoEConfig, ep: int, nodes: int) -> dict[str, tuple[Tensor, dict]]:
    axis = Mesh(dp=1, ep=ep).ep
    found = {}
    for dispatch in _cores(moe):
        layer = one_layer(moe)
        spread = expert.apply(layer, axis, dispatch=dispatch, nodes=nodes)
        out = layer(_rows(axis.rank, dispatch))
        out.square().sum().backward()
        for p in (*layer.gate.parameters(), *layer.shared_experts.parameters()):
            p.grad = all_reduce(p.grad, axis)
        found[dispatch] = out.detach(), spread.full_gradients()
    return found


@pytest.mark.mostly_slow
@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize(("moe", "ep", "nodes"), [(SIX, 3, 3), (EIGHT, 4, 2)])
def test_each_core_equals_one_device_with_uneven_numbers_of_tokens_and_drops(
    ranks, moe, ep, nodes, capacity
):
    moe = replace(moe, capacity_factor=capacity, num_shared=1)
    outcomes = ranks(ep).run(_by_each_core, moe, ep, nodes)
    for dispatch in _cores(moe):
        alone = one_layer(moe)
        each = [_rows(rank, dispatch) for rank in range(ep)]
        out = alone(torch.cat(each))
        out.square().sum().backward()
        assert (alone.dropped > 3) == (capacity is not None)
        for found, want in zip(outcomes, out.split([len(rows) for rows in each]), strict=True):
            torch.testing.assert_close(found[dispatch][0], want, rtol=1e-12, atol=1e-12)
            for name, p in alone.named_parameters():
                theirs = found[dispatch][1][name]
                torch.testing.assert_close(theirs, p.grad, rtol=1e-10, atol=1e-12)


def _biases(kind: str) -> Tensor:
    """Of a data-parallel mixture whose experts nobody spreads."""
    axis, model = Mesh(dp=2).dp, models.llama(0, moe=replace(SIX, bias_speed=0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "fsdp":
        fsdp.apply(model, axis)
    elif kind == "zero":
        sharded = zero.ShardedOptimizer(model.parameters(), torch.optim.SGD, axis, lr=0.1)
        zero.apply(model, axis, optimizer=sharded, stage=2)
    elif kind == "ddp":
        ddp.apply(model, axis)
    else:
        local_sgd.apply(model, axis, optimizer, method=kind)
    model(
        torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(axis.rank))
    ).sum().backward()
    gate = next(gate for _, gate in routers(model))
    gate.update_bias()
    return gate.e_score_correction_bias, gate.counts


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp", "delayed gradients"])
def test_biases_of_copies_stay_alike(ranks, kind):
    """Every strategy over data counts the tokens of all its ranks. Mutant: biases drift apart."""
    (one, counts), (other, theirs) = ranks(2).run(_biases, kind)
    assert torch.equal(one, other) and not torch.equal(counts, theirs) and one.any()
