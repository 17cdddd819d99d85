"""`minipar bench`: the arithmetic of rows, and that all contenders do the same work."""

import json
from dataclasses import replace

import pytest
import torch

from minipar.cli import main
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab.bench import race
from minipar.lab.bench.race import RaceConfig, table
from minipar.lab.bench.strategies import AXES, CONTESTS, Field, run
from minipar.model.llama import LlamaConfig

pytestmark = pytest.mark.trains

TOY = LlamaConfig(256, 32, 64, num_layers=4, num_heads=4, num_kv_heads=2)


# ---------------------------------------------------------------------- arithmetic
def test_a_row_compares_two_contenders():
    """Mutant: a ratio of medians (12 of 20 would be 0.6)."""
    seconds = {"ours": [0.010, 0.030, 0.012], "torch": [0.020, 0.030, 0.010]}
    row = race.row("1gbe", "tuned", "DDP", seconds)
    assert row["torch"] == "DDP" and row["torch_ms"] == pytest.approx(20)
    assert row["ratio"] == pytest.approx(1.0)  # of 0.5, 1.0 and 1.2
    assert row["ratio_low"] == pytest.approx(0.75)
    head, line = table([row]).splitlines()
    assert line[head.index("ours /") :] == "1.000 [0.750, 1.100]"


@pytest.mark.parametrize(
    "config, word",
    [
        (RaceConfig(rounds=0), "--rounds 0 must be 1 or more"),
        (RaceConfig(links=("gloo", "5gbe")), "5gbe"),
    ],
)
def test_bad_values_are_refused(config, word):
    with pytest.raises(ValueError, match=word):
        run(config)


# ---------------------------------------------------------------------- the same work
def _losses(strategy: str) -> dict[str, list[float]]:
    shape = replace(TOY, tie_embeddings=strategy not in ("tensor", "pipeline"))
    mesh = Mesh(**{AXES[strategy][0]: 2})
    link.use("1gbe")  # slow enough for a step that does not wait to be wrong
    torch.manual_seed(mesh.rank)
    found = {}
    everybody = {name: own for name, (own, *_) in CONTESTS[strategy].items()}
    everybody |= {torchs: rival for _, torchs, rival in CONTESTS[strategy].values()}
    for name, make_step in everybody.items():
        step = make_step(Field(mesh, shape, seq_len=16, batch_size=1))
        found[name] = [step().item() for _ in range(3)]
    link.use("none")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CONTESTS)
def test_all_contenders_take_the_same_steps(ranks, strategy):
    """Of a pipeline, PyTorch tells the loss to the last stage alone.

    Mutants: a sum that is left out; gradients that are read before they have arrived.
    """
    by_rank = ranks(2, "link").run(_losses, strategy)
    join = max if strategy == "pipeline" else sum
    names = list(by_rank[0])
    whole = {n: [join(two) for two in zip(*(r[n] for r in by_rank), strict=True)] for n in names}
    first, *_, last = whole[names[0]]
    assert first - last > 1e-4
    for name, losses in whole.items():
        assert losses == pytest.approx(whole[names[0]], rel=1e-5), name


@pytest.mark.slow
def test_bench_writes_rows(tmp_path, capfd):
    path = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as stop:
        main.main(["bench", "ddp", "--rounds", "2", "--links", "gloo", "--json", str(path)])
    out, err = capfd.readouterr()
    assert stop.value.code == 0, err
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert [row["ours"] for row in rows] == ["overlapped", "tuned"]
    for row in rows:
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["ours_ms"] > 0 and f"{row['ratio']:.3f}" in out
