"""Checkpoints: whole or not at all, whatever happens while and after they are written."""

import json
import os
import re
import shutil
import signal
import sys
import threading

import pytest

from minipar.train import checkpoint
from minipar.train.checkpoint import CheckpointError, available, load, newest, step_of
from tests.train.runs import assert_is, names, save, some

FILES = ["weights_00000.safetensors", "state.pt", "manifest.json"]


# ---------------------------------------------------------------------- what comes back
def test_keeps_the_newest_and_leaves_later_ones_alone(tmp_path):
    for step in (3, 6, 9, 1_000_000):
        save(tmp_path, step, *some(step), keep=2)
    assert names(tmp_path) == ["step_000009", "step_1000000"]
    assert newest(tmp_path / "nowhere") is None and available(tmp_path / "nowhere") == []
    save(tmp_path, 7, *some(7), keep=2)  # a run that went back
    assert [step_of(path) for path in available(tmp_path)] == [7, 9, 1_000_000]
    save(tmp_path, 8, *some(8), keep=1)
    assert [step_of(path) for path in available(tmp_path)] == [8, 9, 1_000_000]
    save(tmp_path, 9, *some(9), keep=2)  # the same step again
    assert [step_of(path) for path in available(tmp_path)] == [8, 9, 1_000_000]
    assert_is(tmp_path / "step_000009", 9)


# ---------------------------------------------------------------------- killed while saving
def killed_at_line(number: int, work) -> bool:
    """Run `work` in a child that kill -9 hits before the `number`-th line of Python; did it?

    Lines of saver.py, of all threads, and every sixth of shutil, which deletes file by file. Not
    those per tensor or per chunk, between which nothing happens to the files.
    """
    pid = os.fork()
    if pid == 0:
        left, dull = number, {"_copy_on_host", "deal"}

        def trace(frame, event, arg):
            nonlocal left
            code = frame.f_code
            if not code.co_filename.endswith(("saver.py", "shutil.py")) or code.co_name in dull:
                return None
            if event == "line":
                left -= 1 if code.co_filename.endswith("saver.py") else 1 / 6
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            threading.settrace(trace)
            sys.settrace(trace)
            work()
        finally:
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
@pytest.mark.slow
def test_kill_at_many_lines_leaves_a_loadable_checkpoint(tmp_path, again):
    """At each fourth line. Mutants: write in place; delete the old one under its own name; rename
    before the end."""
    first = tmp_path / "first"
    save(first, 1, *some(1))
    save(first, 2, *some(2))
    step = 2 if again else 3
    moments, newest = 0, set()
    while True:
        folder = tmp_path / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        killed = killed_at_line(moments, lambda: save(tmp_path / "now", step, *some(step)))
        found = available(folder)
        newest.add(step_of(found[-1]))
        for path in found:
            assert_is(path, step_of(path))
        assert step_of(found[-1]) >= (1 if again else 2)
        if not killed:
            break
        # The next save clears away what is left.
        save(folder, step + 1, *some(step + 1))
        assert step_of(available(folder)[-1]) == step + 1
        assert all(name.startswith("step_") for name in names(folder))
        moments += 4
    assert step_of(found[-1]) == step
    assert moments > 50  # otherwise nothing was killed, and nothing is proved
    assert newest == ({1, 2} if again else {2, 3})


# ---------------------------------------------------------------------- damaged later
@pytest.fixture
def saved(tmp_path):
    save(tmp_path, 4, *some(4))
    return tmp_path / "step_000004"


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_named(saved, name):
    whole = (saved / name).read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 2):
        (saved / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            load(saved)
        message = str(caught.value)
        assert name in message and str(saved) in message and "\n" not in message
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*(is missing|No such file)"):
        load(saved)
    (saved / name).write_bytes(whole)
    assert_is(saved, 4)


@pytest.mark.parametrize("position", [0, 40, -1])
def test_the_check_sees_every_chunk_of_a_file(saved, monkeypatch, position):
    """Mutant: the CRC-32 of the last chunk alone, which in a small file is the first as well."""
    monkeypatch.setattr(checkpoint, "CHUNK", 16)
    assert_is(saved, 4)
    path = saved / FILES[0]
    damaged = bytearray(path.read_bytes())
    assert len(damaged) > 64
    damaged[position] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="weights_00000.safetensors .* does not match"):
        load(saved)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"format": 3}, "it has format 3, not 4"),
        ({"files": 1}, "TypeError"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(saved, change, says):
    manifest = json.loads((saved / "manifest.json").read_text(encoding="utf-8"))
    (saved / "manifest.json").write_text(json.dumps(manifest | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=says) as caught:
        load(saved)
    assert f"checkpoint {saved}: manifest.json cannot be used" in str(caught.value)
