"""The bench of a mixture beside a dense model: equal FLOPs."""

from dataclasses import replace

import pytest

from minipar.lab.bench import mixture
from minipar.lab.bench.mixture import MixtureConfig, dense_like
from minipar.model.llama import PRESETS

SMALL = MixtureConfig(batch_size=1, seq_len=16, steps=4, points=2)


def test_the_dense_model_has_the_active_size():
    """But for the routers, which choose: 8 numbers of width per layer."""
    sparse = PRESETS["tiny-moe"]
    dense = dense_like(sparse)
    routers = sparse.num_layers * sparse.moe.num_experts * sparse.hidden_size
    assert sparse.num_active_parameters - routers == dense.num_parameters
    assert dense == PRESETS["tiny"]
    shared = replace(sparse, moe=replace(sparse.moe, num_shared=1))
    assert shared.num_active_parameters - routers == dense_like(shared).num_parameters


def test_check_refuses_what_cannot_work():
    SMALL.check()
    for change in (dict(preset="tiny"), dict(ranks=3), dict(points=5), dict(lr=0.0)):
        with pytest.raises(ValueError, match=f"--{next(iter(change))}"):
            replace(SMALL, **change).check()


@pytest.mark.slow
def test_both_use_as_many_flops(ranks):
    """On two ranks; losses fall, and no point is beyond what was asked."""
    rows = ranks(2).run(mixture.measure, replace(SMALL, ranks=2, steps=8), "gloo")[0]
    flops = PRESETS["tiny-moe"].flops_per_token(16) * 2 * 16 * 8
    assert [row["gflop"] for row in rows] == pytest.approx([flops / 2e9, flops / 1e9])
    for name in ("mixture", "dense"):
        assert rows[1][name] < rows[0][name] < 6
        assert 0 < rows[0][f"{name}_seconds"] < rows[1][f"{name}_seconds"]
