"""The bench of tensor parallelism: all contenders do the same work, and what is refused."""

import json
import math
from dataclasses import replace

import pytest

from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab.bench import tensor as bench
from minipar.lab.bench.tensor import OURS, RIVALS, THEIRS, TensorConfig, contender
from minipar.model.llama import PRESETS, LlamaConfig
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.trains

SMALL = TensorConfig(preset="tiny", batch_size=1, seq_len=16, rounds=1, links=("1gbe",))
TOY = LlamaConfig(256, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=True)


def test_everybody_has_rivals():
    """A method of ours that is compared with nobody, or one that nobody is compared with."""
    assert list(RIVALS) == list(OURS)
    assert {rival for rivals in RIVALS.values() for rival in rivals} == set(THEIRS)


def test_check_refuses_what_cannot_work():
    SMALL.check()
    for name, value in {"ranks": 3, "seq_len": 17, "rounds": 0, "preset": "x"}.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value}"):
            replace(SMALL, **{name: value}).check()
    with pytest.raises(ValueError, match="--ranks 1: .*use one of 2$"):
        replace(SMALL, ranks=1).check()


@pytest.mark.slow
@on_ranks(2, "link")
def test_all_contenders_take_the_same_steps():
    """Mutants: a plan that leaves a sum out; norm weights whose gradients are those of one rank."""
    axis = Mesh(tp=2).tp
    link.use("1gbe")  # slow enough that whoever does not wait is late
    losses = {}
    for name in (*OURS, *THEIRS):
        one = contender(SMALL, axis, name, TOY)
        losses[name] = [one.step().item() for _ in range(4)]
    link.use("none")
    assert len(losses) == len(OURS) + len(THEIRS)
    first, *_, last = losses["plain"]
    assert first - last > 1e-3
    for name, values in losses.items():
        assert values == pytest.approx(losses["plain"], rel=1e-5), name


@pytest.mark.slow
def test_bench_writes_rows_with_a_ratio(tmp_path, capfd):
    """End to end. The bytes of ours are those that the docstring of tensor.py promises."""
    path = tmp_path / "rows.json"
    bench.run(replace(SMALL, json=str(path)))
    out, _ = capfd.readouterr()
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert [row["ours"] for row in rows] == list(OURS)
    shape, tokens = PRESETS["tiny"], SMALL.batch_size * SMALL.seq_len
    activation = tokens * shape.hidden_size * 4 / 2  # n = 2: a collective sends half of it
    norms = (2 * shape.num_layers + 1) * shape.hidden_size * 4
    promised = {"plain": 0, "sequence": norms, "overlap": norms + 2 * shape.num_layers * activation}
    for row in rows:
        for key in ("ratio", "ratio_low", "ratio_high", "ours_ms", "torch_ms", "torch_megabytes"):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert f"{row['ratio']:.3f}" in out and row["torch"] in RIVALS[row["ours"]]
        sent = (8 * shape.num_layers + 4) * activation + 6 * tokens * 4 / 2
        assert row["ours_megabytes"] == pytest.approx((sent + promised[row["ours"]]) / 1e6)
