"""Several ranks write one checkpoint: all of it or nothing, in the background as well."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minipar.comm.mesh import Axis, Mesh
from minipar.parallel.base.shards import Region
from minipar.ranks.launch import RankError
from minipar.train import saver
from minipar.train.checkpoint import available, load, step_of
from minipar.train.saver import Part, Saver
from tests.train.runs import assert_is, names, some


def world() -> Axis:
    return Mesh(dp=dist.get_world_size()).world


def save_together(folder: Path, step: int, **options) -> None:
    Saver(folder, world(), **options).save(step, *some(step))


def load_together(folder: Path) -> tuple[dict, dict]:
    return load(folder, world())


def test_damage_is_told_on_all_ranks_alike(ranks, tmp_path):
    """Each file is looked into by one rank only. Mutant: that one raises, and the others hang."""
    ranks(2).run(save_together, tmp_path, 1)
    for path in (tmp_path / "step_000001").iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        if path.suffix != ".json":
            with pytest.raises(RankError) as caught:
                ranks(2).run(load_together, tmp_path / "step_000001")
            failures = caught.value.failures.values()
            assert [failure.kind for failure in failures] == ["CheckpointError"] * 2
            assert len({failure.message for failure in failures}) == 1
            assert f"{path.name} is missing, or does not match" in next(iter(failures)).message
        path.write_bytes(whole)
    assert_is(tmp_path / "step_000001", 1)


# ---------------------------------------------------------------------- parts
def save_parts(folder: Path, in_background: bool) -> None:
    """Each rank a part of 10 numbers [2, 5]: rank 0 numbers 0 to 6, rank 2 the rest."""
    axis, whole = world(), torch.arange(10.0)
    start, stop = ((0, 6), (6, 6), (6, 10))[axis.rank]
    own = Part(whole[start:stop], Region.whole((2, 5))._replace(flat=slice(start, stop)))
    all_of_it = Part(torch.ones(3), Region.whole((3,)))
    state = {"step": 1, "optimizer": {"w": {"m": torch.empty(2, 5, device="meta"), "n": 7}}}
    weights = {"w": own, "v": all_of_it} if axis.rank == 1 else {"w": own}
    saver = Saver(folder, axis, in_background=in_background)
    saver.save(1, {}, state, {"weights": weights, "state": {"optimizer/w/m": own}}, {"tied": "w"})
    saver.finish()


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_parts_of_all_ranks_are_one_tensor(ranks, tmp_path, in_background):
    """Mutants: put together in the order of the files; the first of them taken for the whole."""
    ranks(3).run(save_parts, tmp_path, in_background)
    folder = tmp_path / "step_000001"
    whole = torch.arange(10.0).view(2, 5)
    weights, state = load(folder)
    assert weights["w"].equal(whole) and weights["tied"].equal(whole)
    assert weights["v"].equal(torch.ones(3))
    assert state["optimizer"]["w"]["m"].equal(whole) and state["optimizer"]["w"]["n"] == 7
    lazy, _ = load(folder, lazily=True)
    assert lazy["w"].shape == (2, 5) and lazy["w"]().equal(whole)
    columns = Region((2, 5), (((0, 2),), ((1, 3),)))
    assert lazy["w"](columns).tolist() == [1, 2, 6, 7]


# ---------------------------------------------------------------------- in the background
@pytest.fixture
def gate(monkeypatch):
    """The disk waits until the event is set."""
    gate, write = threading.Event(), saver._write_share

    def late(*args):
        assert gate.wait(20)
        return write(*args)

    monkeypatch.setattr(saver, "_write_share", late)
    yield gate
    gate.set()


def test_training_goes_on_while_the_thread_writes(tmp_path, gate):
    """Mutants: waits for the disk; the checkpoint appears before it is finished."""
    own = Saver(tmp_path, in_background=True)
    weights, state = some(1)
    own.save(1, weights, state)
    assert own.is_writing
    assert available(tmp_path) == []
    gate.set()
    wait_until(lambda: not own.is_writing)
    assert available(tmp_path) == []  # written, but nobody has put it in place
    own.finish()
    assert names(tmp_path) == ["step_000001"]
    assert_is(tmp_path / "step_000001", 1)
    own.finish()  # nothing to do


def test_what_a_rank_alone_writes_is_copied_before_training_changes_it(tmp_path, gate):
    """As of a run: its own weights and moments, and numbers of the state. Mutant: no copy, so that
    a checkpoint of later numbers passes its CRC-32."""
    weight, moment, count = torch.ones(4), torch.ones(4), torch.tensor(1.0)
    own = {
        kind: {name: Part(numbers, Region.whole((4,)))}
        for kind, name, numbers in (("weights", "w", weight), ("state", "m", moment))
    }
    saver = Saver(tmp_path, in_background=True)
    saver.save(1, {}, {"m": torch.empty(4, device="meta"), "count": count}, own, {})
    for tensor in (weight, moment, count):
        tensor.add_(41)  # the next step
    gate.set()
    saver.finish()
    weights, state = load(tmp_path / "step_000001")
    assert weights["w"].equal(torch.ones(4)) and state["m"].equal(torch.ones(4))
    assert state["count"] == 1


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    own = Saver(tmp_path, in_background=True)
    own.save(1, *some(1))
    threading.Timer(0.2, gate.set).start()
    own.save(2, *some(2))
    assert [step_of(path) for path in available(tmp_path)] == [1]
    own.close()  # the run fails: what all have written is not put in place any more
    assert [step_of(path) for path in available(tmp_path)] == [1]


def test_an_error_of_the_thread_is_noticed_and_raised(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    own = Saver(tmp_path, in_background=True)
    with monkeypatch.context() as patched:
        patched.setattr(saver, "save_file", full)
        own.save(1, *some(1))
        wait_until(lambda: not own.is_writing)
    with pytest.raises(OSError, match="cannot write checkpoint .*step_000001: .*No space left"):
        own.finish()
    assert names(tmp_path) == []
    own.save(2, *some(2))
    own.finish()
    assert_is(tmp_path / "step_000002", 2)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
