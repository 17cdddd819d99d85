"""The timeline: what overlaps, and what the recorder sees.

Every number here is either worked out by hand beside the spans that it follows from, or compared
with a second way of computing it.
"""

import platform
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils.checkpoint import checkpoint

from minipar.comm import collectives
from minipar.comm.mesh import Mesh
from minipar.model.llama import Llama, LlamaConfig
from minipar.observe import timeline
from minipar.observe.recorder import blocks
from minipar.observe.spans import Span, intersect, measure, subtract, union
from minipar.observe.timeline import Timeline, record, span
from tests.comm.same import assert_disjoint
from tests.on_ranks import on_ranks


def compute(start, end, rank=0, kind="forward"):
    return Span(kind, "block", rank, start, end)


def comm(start, end, rank=0, axis="dp", num_bytes=0):
    return Span("comm", "all_reduce", rank, start, end, axis, num_bytes)


# ---------------------------------------------------------------------- overlap
def test_hidden_is_where_the_same_rank_computes():
    """By hand. Catches: counting shared time twice, the compute of other ranks, copies."""
    t = Timeline(
        [
            compute(0, 4),
            compute(5, 6, kind="optimizer"),
            comm(1, 3, num_bytes=10),  # hidden, and in flight together with ...
            comm(2, 7, num_bytes=20),  # ... this: the union is 1..7, exposed 4..5 and 6..7
            comm(0, 2, axis="tp", num_bytes=5),
            compute(0, 9, rank=1),
            comm(4, 5, rank=2),  # computes nothing
            Span("copy", "memcpy", 2, 4, 5),
        ]
    )
    assert [(o.rank, o.axis, o.total, o.hidden, o.exposed) for o in t.overlap()] == [
        (0, "dp", 6, 4, 2),
        (0, "tp", 2, 2, 0),
        (2, "dp", 1, 0, 1),
    ]
    assert (t.overlap()[0].num_bytes, t.overlap()[0].count) == (30, 2)
    # rank 0 talks 0..7 on either axis, hidden 5 of 7; rank 2 hides 0 of 1
    assert t.hidden_fraction == 5 / 8
    assert t.bytes_by_axis() == {"dp": 30, "tp": 5}


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


@given(intervals, intervals)
def test_interval_arithmetic_equals_sets_of_cells(a, b):
    """The same sets, as sets of unit cells. Catches an interval lost or counted twice."""
    a, b = ([(s, s + n) for s, n in x] for x in (a, b))
    cells_a, cells_b = ({c for s, e in x for c in range(s, e)} for x in (a, b))
    joined_a, joined_b = union(a), union(b)
    assert measure(joined_a) == len(cells_a)
    assert measure(intersect(joined_a, joined_b)) == len(cells_a & cells_b)
    assert measure(subtract(joined_a, joined_b)) == len(cells_a - cells_b)
    assert all(x[1] < y[0] for x, y in zip(joined_a, joined_a[1:], strict=False))


def test_select_shift_and_table():
    t = Timeline([comm(12, 14, rank=1, num_bytes=3_000_000), compute(10, 13, rank=1)], "measured")
    assert (t.start, t.end, t.duration, t.ranks) == (10, 14, 4, [1])
    assert [s.start for s in t.shifted()] == [0, 2] and t.shifted().label == "measured"
    assert len(t.select(kind="comm", rank=1)) == 1 and len(t.select(rank=0)) == 0
    head, row = t.table().splitlines()
    assert row.split() == ["1", "dp", "1", "3.00", "2000.0", "1000.0", "1000.0", "50%"]
    assert len(head) == len(row)  # numbers stand below each other
    assert "50% of communication hidden" in str(t) and "measured" in str(t)


# ---------------------------------------------------------------------- files
def test_save_and_load_are_exact(tmp_path):
    spans = [
        Span("backward", "layers.3", 1, 0.1 + 0.2, 1 / 3, meta={"microbatch": 2}),
        Span("comm", "send", 0, 1e-9, 7.7, axis="pp", num_bytes=12345),
    ]
    t = Timeline(spans, label="measured, 2 ranks")
    found = Timeline.load(t.save(tmp_path / "t.json"))
    assert found.spans == t.spans and found.label == t.label
    for text in "{}", '{"traceEvents": []}', "[1]", "nothing":
        (tmp_path / "other.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="was not written by Timeline.save"):
            Timeline.load(tmp_path / "other.json")


# ---------------------------------------------------------------------- the recorder
def test_inner_spans_interrupt_outer_ones():
    """Catches nested spans that count time twice, and waiting that counts as computing."""
    with record(label="mine") as t, span("compute", "outer"):
        time.sleep(0.01)
        with span("compute", "inner"):
            time.sleep(0.01)
            with timeline.active().span(None, ""):
                time.sleep(0.02)
        time.sleep(0.01)
    assert t.label == "mine"
    assert in_order(t, "compute") == ["outer", "inner", "outer"]
    assert_disjoint(t)
    assert sum(s.duration for s in t.select(name="outer")) >= 0.02
    assert t.duration - sum(s.duration for s in t) >= 0.02  # the wait


def test_recording_twice_is_refused_and_failures_leave_nothing_behind():
    with pytest.raises(KeyError), record() as t:
        with pytest.raises(RuntimeError, match="recording already"), record():
            pass
        with span("compute", "fails"):
            raise KeyError
    assert [s.name for s in t] == ["fails"] and timeline.active() is None


# ---------------------------------------------------------------------- a model
def llama():
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
    return Llama(LlamaConfig(**sizes, num_layers=3, num_heads=4, num_kv_heads=2)).double()


def step(model, tokens):
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    with span("backward", "backward"):
        loss.backward()


def in_order(t, kind):
    """Names of the blocks in order of time, what happens between blocks left out."""
    names = [s.name for s in t if s.kind == kind and s.name != kind]
    return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]


def test_every_block_is_seen_forward_backward_and_in_order():
    """Catches: a first block (tokens have no gradient) or a last one without backward."""
    model, tokens = llama(), torch.randint(64, (2, 8))
    adamw, names = torch.optim.AdamW(model.parameters()), list(blocks(model))
    with record(model) as t:
        step(model, tokens)
        step(model, tokens)
        adamw.step()
    assert in_order(t, "forward") == 2 * names
    assert in_order(t, "backward") == 2 * names[::-1]
    assert [s.name for s in t if s.kind == "optimizer"] == ["AdamW"] and t.spans[-1].name == "AdamW"
    assert next(s for s in t if s.kind == "backward").name == "backward"  # of the loss
    assert_disjoint(t)
    with record(model) as t, torch.no_grad():
        model(tokens)
    assert in_order(t, "forward") == names and not in_order(t, "backward")


def test_recording_changes_no_gradient_and_leaves_no_hook():
    """Also with in-place work on a block's output and views, which full backward hooks forbid."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x.mul_(2)
                x = x.view(2, 2, 4)[0].relu_().repeat(2, 1)
            return x

    def hooks():
        of = optimizer_module
        found = [of._global_optimizer_pre_hooks, of._global_optimizer_post_hooks]
        for module in model.modules():
            found += [module._forward_pre_hooks, module._forward_hooks]
        return [len(each) for each in found]

    torch.manual_seed(0)  # of some weights the last relu lets nothing through
    model, x = InPlace(), torch.randn(4, 4)
    parameters, before = tuple(model.parameters()), hooks()
    plain = torch.autograd.grad(model(x).sum(), parameters)
    with record(model) as t:
        found = torch.autograd.grad(model(x).sum(), parameters)
    assert all(map(torch.equal, found, plain)) and any(g.any() for g in plain)
    assert in_order(t, "backward") and hooks() == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_backward_work(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)
            )

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, x = Checkpointed(), torch.randn(2, 4)
    with record(model) as t:
        model(x).sum().backward()
        assert timeline.active().running() is None  # nothing stays open
    layers = [f"layers.{i}" for i in range(3)]
    assert in_order(t, "forward") == ["embed", *layers]
    assert {*layers, *(f"{layer} (recompute)" for layer in layers)} <= {*in_order(t, "backward")}
    assert_disjoint(t)


# ---------------------------------------------------------------------- several ranks
def _on_machines_with_clocks_of_their_own():
    mesh = Mesh(dp=2)
    ahead = 1000.0 * mesh.rank
    clock = time.monotonic
    start = clock() + ahead
    mine = Timeline([Span("compute", "x", mesh.rank, start, start + 1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: f"host {mesh.rank}")
        patch.setattr(time, "monotonic", lambda: clock() + ahead)
        return mine.gather(mesh.dp)


def test_gather_moves_the_spans_of_other_machines_to_the_clock_of_the_first(ranks):
    for everyone in ranks(2).run(_on_machines_with_clocks_of_their_own):
        assert abs(everyone.spans[0].start - everyone.spans[1].start) < 100  # they were 1,000 apart


@pytest.mark.timed
@on_ranks(2)
def test_waiting_is_exposed_and_computing_hides():
    """Rank 0 waits 60 ms for rank 1, first inside of a compute span, then behind one. A recorder
    that ignores waiting hides it all; one that ends a span at the wait exposes all."""
    axis = Mesh(dp=2).dp
    found = []
    for is_async in False, True:
        collectives.barrier(axis)
        with record() as t, span("compute", "all the while"):
            if axis.rank == 1:
                time.sleep(0.06)
            pending = collectives.all_reduce(torch.ones(10), axis, async_op=is_async)
            if is_async:
                time.sleep(0.06)
                pending.wait()
        found.append(t.overlap()[0])
    if axis.rank == 0:
        waiting, hidden = found
        assert waiting.total > 0.05 and waiting.hidden < 0.5 * waiting.total
        assert hidden.total > 0.05 and hidden.hidden > 0.5 * hidden.total


@on_ranks(2)
def test_what_still_travels_ends_with_the_recording():
    """Mutants: only what has arrived is in the ledger; what arrives later is there twice."""
    axis = Mesh(dp=2).dp
    with record() as recorded:
        recorder = timeline.active()
        collectives.all_reduce(torch.ones(3), axis, async_op=True).wait()
        late = collectives.recv(torch.zeros(5), axis, 1 - axis.rank, async_op=True)
        if axis.rank == 0:  # until it sends, the other's recording has ended
            assert late.wait().sum() == 5
            time.sleep(0.3)
        sent = collectives.send(torch.ones(5), axis, 1 - axis.rank, async_op=True)
        if axis.rank == 0:
            sent.wait()
    sizes = {span.name: span.num_bytes for span in recorded.spans}
    assert sizes == {"all_reduce": 12, "recv": 0, "send": 20}
    if axis.rank == 1:
        late.wait(), sent.wait()
    assert len(recorder.spans) == 3 and all(span.start <= span.end for span in recorded.spans)


@on_ranks(2)
def test_torchs_profiler_ends_when_all_has_arrived():
    """Under a gloo that is at work for it, it would end the process by a SIGSEGV.

    Mutants: what nobody waits for goes on; all that was waited for is kept.
    """
    axis, told, travelling = Mesh(dp=2).dp, [], []

    class Profiler:
        def stop(self):
            told.extend(pending.work.is_completed() for pending in travelling)

        def export_chrome_trace(self, path):
            Path(path).write_text('{"traceEvents": []}', encoding="utf-8")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline.gpu, "start_profiler", Profiler)
        with record():
            collectives.all_reduce(torch.ones(3), axis, async_op=True).wait()
            assert not timeline.active().unwaited
            large = torch.ones(2**20)
            for _ in range(6):
                travelling.append(collectives.all_reduce(large, axis, async_op=True))
    assert told == [True] * 6
    assert all((pending.wait() == 2).all() for pending in travelling)
