"""Checkpoints of any plan, read by any other: nothing is gathered, and only what is needed is read.

Every tensor that comes back is equal to what was saved, bit for bit.
"""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.model.moe import MoEConfig
from minipar.observe import timeline
from minipar.parallel import compose
from minipar.parallel.base.shards import Region
from minipar.parallel.plan import Plan
from minipar.train import setup, shards
from minipar.train.checkpoint import CheckpointError, Stored, load
from minipar.train.optim import make_optimizer
from minipar.train.saver import Part, Saver
from minipar.train.step import train_step

# 61 words do not divide by 2 or 4, and with tp=4 two ranks have the same heads of k and v.
DENSE = LlamaConfig(61, 16, 24, num_layers=4, num_heads=4, num_kv_heads=2, tie_embeddings=True)
MIXTURE = LlamaConfig(
    *(61, 16, 24), num_layers=2, num_heads=4, num_kv_heads=2, moe=MoEConfig(4, 2, 12, num_shared=1)
)
OF_DENSE = [
    "dp=1",
    "dp=2",
    "dp=2,tp=2,zero=3",
    "tp=4,sequence_parallel",
    "pp=2,dp=2,zero=2,microbatches=2,schedule=zb_v",
    "pp=2,cp=2,zero=1,microbatches=2,schedule=dualpipe",
    "dp=2,zero=1,precision=bf16",
]
OF_MIXTURE = [
    "dp=1",
    "dp=2,ep=2,zero=1",
    "tp=2,ep=2,zero=3,expert_tensor_parallel",
    "tp=2,ep=2,sequence_parallel,experts_over_tp",
    "pp=2,ep=2,microbatches=2",
]


def composed(plan: str, config: LlamaConfig, seed: int) -> compose.Composed:
    plan = Plan.parse(plan)
    make = partial(make_optimizer, lr=0.1, weight_decay=0.1)
    return compose.apply(Llama(config, seed=seed), Mesh(**plan.mesh_sizes()), plan, make)


def trained(plan: str, config: LlamaConfig) -> compose.Composed:
    strategy = composed(plan, config, seed=1)
    torch.manual_seed(strategy.axis.rank)
    tokens = torch.randint(config.vocab_size, (strategy.plan.microbatches, 2, 9))
    batch = [strategy.shard((t[:, :-1], t[:, 1:])) for t in tokens]
    train_step(strategy.model, [strategy], strategy.optimizer, batch, strategy.axis)
    return strategy


def whole(strategy: compose.Composed) -> dict[str, Tensor]:
    """All weights and moments, gathered: what one device would have."""
    found = strategy.full_state_dict()
    state = strategy.full_optimizer_state()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    for number, entries in state["state"].items():
        found |= {f"{names[number]}/{key}": value for key, value in entries.items()}
    return found


def refuse_to_pickle(tensor, protocol, usual=Tensor.__reduce_ex__):
    assert tensor.is_meta or tensor.ndim == 0, f"a tensor of {tuple(tensor.shape)} is sent"
    return usual(tensor, protocol)


def save_under(folder: Path, plan: str, config: LlamaConfig) -> dict[str, Tensor]:
    """Train a step, save without gathering, and return what should have been saved."""
    strategy = trained(plan, config)
    with timeline.record() as seen, mock.patch.object(Tensor, "__reduce_ex__", refuse_to_pickle):
        saver = Saver(folder, strategy.mesh.world)
        shards.save(strategy, saver, 1, {"step": 1})
    assert not seen.select(kind="comm").spans
    with timeline.record() as seen:
        found = whole(strategy)
    plan = strategy.plan
    is_cut = plan.zero > 0 or max(plan.tp, plan.ep, plan.pp) > 1
    assert bool(seen.select(kind="comm").spans) == is_cut  # so a gather would have been seen
    return found


def load_under(folder: Path, plan: str, config: LlamaConfig) -> tuple[dict[str, Tensor], int, int]:
    """Return all that was loaded, how many numbers this rank has read, and how many it has."""
    strategy = composed(plan, config, seed=2)
    weights, state = load(folder / "step_000001", strategy.mesh.world, lazily=True)
    numbers_read = []
    read = Stored.__call__

    def counted(stored, region=None):
        numbers = read(stored, region)
        numbers_read.append(numbers.numel())
        return numbers

    with mock.patch.object(Stored, "__call__", counted):
        setup.load(strategy, weights, state["optimizer"], "here")
    own = set(strategy.model.state_dict(keep_vars=True).values())
    moments = (t for entries in strategy.optimizer.state.values() for t in entries.values())
    num_own = sum(t.numel() for t in (*own, *moments) if t.ndim)
    return whole(strategy), sum(numbers_read), num_own


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and ours[name].equal(value), name


def size_of(plan: str) -> int:
    return Plan.parse(plan).num_ranks


CASES = [(plan, DENSE) for plan in OF_DENSE] + [(plan, MIXTURE) for plan in OF_MIXTURE]


@pytest.mark.slow
@pytest.mark.parametrize("plan, config", CASES)
def test_what_one_plan_saves_any_other_reads(ranks, tmp_path, plan, config):
    """Each rank reads what it has, and no number more.

    Mutants: an offset forgotten; a slice that nobody writes, or two; all of the moments read.
    """
    saved, *_ = ranks(size_of(plan)).run(save_under, tmp_path, plan, config)
    alone, _ = load(tmp_path / "step_000001")
    assert len(saved) > len(alone) > 20
    for name, value in alone.items():
        assert value.equal(saved[name]), name
    others = OF_DENSE if config is DENSE else OF_MIXTURE
    place = others.index(plan)
    for other in {others[(place + step) % len(others)] for step in (0, 3)}:
        results = ranks(size_of(other)).run(load_under, tmp_path, other, config)
        for loaded, num_read, num_own in results:
            equal(loaded, saved)
            assert num_read == num_own, other


@pytest.mark.parametrize("plan, config", [CASES[1], CASES[3], CASES[8]])
def test_each_number_is_written_once_and_all_ranks_write(ranks, tmp_path, plan, config):
    """Mutants: rank 0 of each axis writes; a norm is written by all of tp."""
    saved, *_ = ranks(size_of(plan)).run(save_under, tmp_path, plan, config)
    folder = tmp_path / "step_000001"
    written = [numel_of(folder, rank) for rank in range(size_of(plan))]
    distinct = {t.data_ptr(): t.numel() for t in saved.values() if t.ndim}
    assert sum(written) == sum(distinct.values())
    assert min(written) > 0.5 * sum(written) / len(written)


def numel_of(folder: Path, rank: int) -> int:
    """How many numbers the files of a rank have."""
    total = 0
    for path in folder.glob(f"*_{rank:05d}.safetensors"):
        with safe_open(path, framework="pt") as contents:
            total += sum(contents.get_tensor(key).numel() for key in contents.keys())  # noqa: SIM118
    return total


# ---------------------------------------------------------------------- boxes
def test_the_boxes_of_the_drawing():
    region = Region((3, 4), (((0, 3),), ((2, 4),)), slice(1, 5))
    found = [(offset, box.tolist()) for offset, box in region.boxes(torch.tensor([1, 2, 3, 4]))]
    assert found == [((0, 3), [[1]]), ((1, 2), [[2, 3]]), ((2, 2), [[4]])]


# ---------------------------------------------------------------------- damage
@pytest.fixture
def in_boxes(ranks, tmp_path):
    ranks(2).run(save_under, tmp_path, "tp=2", DENSE)
    return tmp_path / "step_000001"


GATE = "model.layers.0.mlp.gate_proj.weight"  # [24, 16], of which rank 1 has the rows from 12 on


def test_of_a_region_no_file_is_opened_that_has_nothing_of_it(in_boxes):
    """Mutant: all files of a tensor are opened."""
    weights, _ = load(in_boxes, lazily=True)
    (in_boxes / "weights_00001.safetensors").unlink()
    rows = Region((24, 16), (((3, 7),), ((0, 16),)))
    assert weights[GATE](rows).shape == (4 * 16,)
    with pytest.raises(CheckpointError, match="weights_00001.safetensors cannot be used"):
        weights[GATE]()


def test_a_tensor_of_which_a_part_is_nowhere_is_refused(tmp_path):
    """Mutant: what no file has is left as memory happens to be."""
    own = {"w": Part(torch.arange(6.0), Region.whole((2, 5))._replace(flat=slice(0, 6)))}
    Saver(tmp_path).save(1, {}, {"step": 1}, {"weights": own}, {})
    with pytest.raises(CheckpointError, match=r"w of shape \(2, 5\) has 6 numbers in all files"):
        load(tmp_path / "step_000001")
