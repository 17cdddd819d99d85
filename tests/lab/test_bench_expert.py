"""The bench of expert parallelism: that all contenders do the same work, as uneven as was asked."""

from dataclasses import replace

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.lab.bench import expert as bench
from minipar.lab.bench import expert_overlap
from minipar.lab.bench.expert import OURS, ExpertConfig, contender, rivals
from minipar.model.llama import PRESETS
from tests.on_ranks import on_ranks

SMALL = ExpertConfig(batch_size=1, seq_len=16, rounds=1, links=("1gbe",))


@pytest.mark.parametrize("imbalance", [1, 2, 4])
def test_routing_is_as_uneven_as_was_asked(imbalance):
    chosen = bench.skewed(8, 2, imbalance, torch.zeros(800, 8))
    load = chosen.flatten().bincount(minlength=8)
    assert load[0] == load.sum() / 8 * imbalance and load[1:].max() < 1.3 * load[1:].min()
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_check_refuses_what_cannot_work():
    SMALL.check()
    replace(SMALL, whole_steps=4).check()
    for change in (dict(preset="tiny"), dict(ranks=3), dict(ranks=1), dict(imbalance=(5,))):
        with pytest.raises(ValueError, match=f"--{next(iter(change))}"):
            replace(SMALL, **change).check()


@pytest.mark.slow
@on_ranks(2)
def test_all_contenders_take_the_same_steps():
    """Mutants: rows that come back in another order; weights of another token; a sum left out."""
    imbalance = 2
    mesh, losses = Mesh(dp=1, ep=2), {}
    for name in (*OURS, *rivals()):
        step = contender(SMALL, mesh, name, PRESETS["tiny-moe"], imbalance)
        losses[name] = [step().item() for _ in range(3)]
    first, *_, last = losses["all_to_all"]
    assert last < first
    for name, theirs in losses.items():
        assert theirs == pytest.approx(losses["all_to_all"], rel=1e-4), name


@pytest.mark.timed
@pytest.mark.exhaustive
def test_whole_steps_of_dualpipe_v_hide_most_of_what_travels():
    """Of 8 microbatches half of the slots are pairs, and hide two thirds; each slot has halves of
    its batch, which hide three quarters. Shared experts hide a third."""
    rows = {row["way"][1]: row for row in expert_overlap.whole_steps(8)}
    hidden, ratio = ({way: row[key] for way, row in rows.items()} for key in ("hidden", "ratio"))
    assert hidden["a"] < 0.1 < 0.3 < hidden["b"] < 0.45
    assert 0.6 < hidden["d"] < 0.75 and 0.7 < hidden["c"] < 0.8
    assert max(ratio["c"], ratio["d"]) < 0.95 * ratio["b"] < 0.9 * ratio["a"]


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_forward_beside_a_backward_hides_what_nothing_else_does(ep):
    """All-to-alls that take 40 % of the time: above 80 % of them, and within 10 % of the ideal."""
    rows = {row["way"][1]: row for row in expert_overlap.rows(ep)}
    assert "emulated h100" in rows["d"]["link"]
    assert rows["a"]["hidden"] < 0.1 < 0.3 < min(rows["b"]["hidden"], rows["c"]["hidden"])
    assert max(0.8, rows["b"]["hidden"], rows["c"]["hidden"]) < rows["d"]["hidden"]
    assert rows["d"]["ratio"] < 1.1 < 1.15 < min(rows[way]["ratio"] for way in "abc")
