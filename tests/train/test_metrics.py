"""The log of a run: numbers that are read a step late, on a GPU that is there by the clock only."""

import json

import pytest
import torch

from minipar.train import metrics
from minipar.train.metrics import Log, read, write_whole


class Gpu:
    """Does in turn what is launched, 10 seconds each, while the host goes on by its own clock."""

    def __init__(self) -> None:
        self.now = self.free = 0.0  # the time of the host, and when all is done
        self.waits = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.now, gpu.free)

            def synchronize(self) -> None:
                gpu.waits += 1
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, end: "Event") -> float:
                assert max(self.at, end.at) <= gpu.now, "it is asked before it is known"
                return 1e3 * (end.at - self.at)

        self.Event = Event

    def launch(self) -> None:
        self.now += 1.0
        self.free = max(self.free, self.now) + 10.0


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    return gpu


def step(number: int) -> dict:
    return {"step": number, "loss": torch.tensor(1 / number), "tokens": torch.tensor(number)}


def log_of(path, step: int = 0, device: str = "cpu", complete=lambda line: None) -> Log:
    return Log(path, step, torch.device(device), complete, lambda line: None)


def test_a_step_is_written_when_the_next_one_has_been_launched(tmp_path, gpu):
    """Mutants: each step waited for; the last one lost; the seconds of a launch, or of a save."""
    path = tmp_path / "metrics.jsonl"
    log, written = log_of(path, device="cuda"), []
    for number in range(1, 6):
        gpu.launch()
        log.write(step(number))
        written.append(len(read(path)))
        if number == 3:
            log.add(validation_loss=0.5)  # into the line that is held
            log.flush()
            gpu.now += 1000.0  # of a save
            log.restart_clock()
    assert written == [0, 1, 2, 3, 4] and gpu.waits == 4
    log.flush()
    lines = read(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line.get("validation_loss") for line in lines] == [None, None, 0.5, None, None]
    assert [line["seconds"] for line in lines] == [11.0, 10.0, 10.0, 11.0, 10.0]
    assert [line["step"] for line in log.lines] == [1, 2, 3, 4, 5]


def test_a_line_that_is_refused_is_not_written(tmp_path):
    """Nor is anything after it. Mutant: it is checked when it has been written."""

    def refuses(line: dict) -> None:
        if line["loss"] < 0.4:
            raise FloatingPointError(line["step"])

    log = log_of(tmp_path / "metrics.jsonl", complete=refuses)
    for number in (1, 2, 3):
        log.write(step(number))
    with pytest.raises(FloatingPointError, match="3"):
        log.write(step(4))
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_metrics_survive_what_a_kill_or_a_full_disk_leaves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = log_of(path)
    for number in (1, 2, 3):
        log.write(step(number))
    log.flush()
    path.write_bytes(path.read_bytes() + b'{"step": 4, "loss"\n\xff\0\n{"step": 5}\n{"step": 6,')
    assert [line["step"] for line in read(path)] == [1, 2, 3, 5]
    log = log_of(path, step=2)  # goes on from a checkpoint of step 2
    assert [line["step"] for line in read(path)] == [1, 2]
    log.write(step(3) | {"grad_norm": float("inf")})
    log.flush()
    assert [line["step"] for line in read(path)] == [1, 2, 3]
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["grad_norm"] is None


def test_a_small_file_is_never_half_written(tmp_path, monkeypatch):
    """Mutant: it is opened to be written in place, and a kill leaves nothing of it."""
    path = tmp_path / "config.json"
    path.write_text("before", encoding="utf-8")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(metrics.os, "replace", killed)
        write_whole(path, "after")
    assert path.read_text(encoding="utf-8") == "before"
    write_whole(path, "after")
    assert path.read_text(encoding="utf-8") == "after"
