"""The bench of context parallelism: all contenders do the same work; what zigzag is worth."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minipar.comm.mesh import Axis, Mesh
from minipar.emulate import link
from minipar.lab.bench import context as bench
from minipar.lab.bench import race
from minipar.lab.bench.context import OURS, THEIRS, WHAT, ContextConfig
from minipar.model.llama import LlamaConfig, dense_core
from minipar.parallel import context

pytestmark = pytest.mark.trains

SMALL = ContextConfig(
    preset="tiny",
    seq_len=32,
    rounds=1,
    links=("1gbe",),
    balance_ranks=0,
    balance_seq_len=32,
    balance_rounds=2,
)
TOY = LlamaConfig(256, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=True)


def test_check_refuses_what_cannot_work():
    SMALL.check()
    wrong = {"ranks": 3, "seq_len": 34, "rounds": 0, "preset": "x", "balance_ranks": 1}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value}"):
            replace(SMALL, **{name: value}).check()
    with pytest.raises(ValueError, match="--balance-seq-len 32 .*12 chunks.*-ranks 6; use 36"):
        replace(SMALL, balance_ranks=6).check()


# ---------------------------------------------------------------------- zigzag beside plain
def test_the_critical_path_is_the_slowest_of_every_step(monkeypatch):
    """By blocks instead of seconds. Mutants: the slowest rank's sum (plain looks right, a lag at
    the start is forgotten), the mean, backward left out."""

    def blocks(q, kv, d_out, axis, order):
        width = q.shape[2] // context.ORDERS[order]
        steps = context.blocks_of(None, q, axis, order)
        return 2 * [len(step) * width**2 for step in steps]

    monkeypatch.setattr(bench, "_step_seconds", blocks)
    config = replace(SMALL, balance_ranks=4)
    plain, zigzag = (bench.critical_path(config, order) for order in ("plain", "zigzag"))
    assert plain == 2 * 4 * 8**2 and plain / zigzag == 16 / 9

    # Each rank is slow in a step of its own, and the others wait for it each time.
    monkeypatch.setattr(
        bench, "_step_seconds", lambda *given: [1.0 + (i == given[3].rank) for i in range(4)]
    )
    assert bench.critical_path(config, "plain") == 4 * 2.0


def test_every_step_of_the_ring_is_timed():
    q, d_out = torch.randn(2, 1, 4, 16, 8)
    kv = torch.randn(2, 1, 2, 16, 8)
    for order in context.ORDERS:
        seconds = bench._step_seconds(q, kv, d_out, Axis("cp", 1, 4, (0, 1, 2, 3)), order)
        assert len(seconds) == 2 * 4 and min(seconds) >= 0


@pytest.mark.slow
def test_zigzag_computes_in_less_time():
    """16/9 by blocks; with a wide margin, and more than one look, as machines are noisy."""
    config = replace(SMALL, balance_ranks=4, balance_seq_len=4096, balance_rounds=3)
    looks = (bench.balance_rows(config)[0] for _ in range(5))
    row = next(row for row in looks if row["ratio"] > 1.3)
    assert row["ratio_of_blocks"] == pytest.approx(16 / 9)
    assert race.table([row], bench.BALANCE).splitlines()[1].endswith("1.778")


# ---------------------------------------------------------------------- contenders
def _results(what):
    axis = Mesh(cp=2).cp
    link.use("10gbe")
    found = {}
    for name in (*OURS, *THEIRS):
        step = WHAT[what](SMALL, axis, name, TOY)
        order = "plain" if name in ("ring, plain", "ulysses") else "zigzag"
        if what == "attention":
            found[name] = [context.unshard(x, axis, order, dim=2) for x in step()]
        else:
            found[name] = [step().item() for _ in range(4)]
    link.use("none")
    return found


@pytest.mark.slow
def test_all_contenders_compute_the_same_attention(ranks):
    """Against one device. Mutants: an order that does not fit the ring; keys without gradients."""
    stream = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        torch.randn(1, heads, TOY.head_dim, 32, generator=stream).mT for heads in (4, 2, 2, 4)
    )
    inputs = [x.contiguous().requires_grad_() for x in (q, k, v)]
    out = dense_core(*inputs)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]
    for found in ranks(2, "link").run(_results, "attention"):
        assert len(found) == len(OURS) + len(THEIRS)
        for name, tensors in found.items():
            for ours, theirs in zip(tensors, expected, strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text
                )


@pytest.mark.slow
def test_all_contenders_take_the_same_steps(ranks):
    by_rank = ranks(2, "link").run(_results, "step")
    whole = {name: [sum(x) for x in zip(*(r[name] for r in by_rank), strict=True)] for name in OURS}
    for rank in by_rank:
        assert rank.keys() == {*OURS, *THEIRS}
    for name in THEIRS:
        whole[name] = [sum(x) for x in zip(*(r[name] for r in by_rank), strict=True)]
    first, *_, last = whole["gather"]
    assert first - last > 1e-3
    for name, losses in whole.items():
        assert losses == pytest.approx(whole["gather"], rel=1e-5), name


def _on_a_cpu():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    axis = Mesh(cp=2).cp
    grid = DeviceMesh.from_group(axis.group, "cpu", mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    buffers = [x.detach() for x in (q, k, v)]
    try:
        with context_parallel(grid, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(*buffers, is_causal=True)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_torchs_own_entry_is_not_for_cpus(ranks):
    """Once it is, the bench should go through it: this test is there to say so."""
    for error in ranks(2).run(_on_a_cpu):
        assert "scaled_dot_product" in error, error


@pytest.mark.slow
def test_bench_writes_rows_with_a_ratio(tmp_path, capfd):
    """End to end. The bytes of ours are those in the docstrings of context and ulysses."""
    path = tmp_path / "rows.json"
    bench.run(replace(SMALL, json=str(path), balance_ranks=2))
    out, _ = capfd.readouterr()
    *rows, order = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["bench"], row["ours"]) for row in rows] == [
        (f"context, {what}", name) for what in WHAT for name in OURS
    ]
    for row in rows:
        for key in ("ratio", "ratio_low", "ratio_high", "ours_ms", "torch_ms", "torch_megabytes"):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert f"{row['ratio']:.3f}" in out and row["torch"] in THEIRS
    assert order["bench"] == "context, order" and f"{order['ratio']:.3f}" in out
    keys = 2 * 2 * 32 * 32 * 4  # bytes of all keys and values of a layer: G 2, T 32, K 32, fp32
    head = 32 * 32 * 4
    promised = dict.fromkeys(OURS, (keys + keys + keys) / 2)  # n = 2: half of it is another's
    promised["ulysses"] = 2 * (2 * 4 + 2 * 2) * head / 4
    for row in rows[: len(OURS)]:
        assert row["ours_megabytes"] == pytest.approx(promised[row["ours"]] / 1e6), row["ours"]
