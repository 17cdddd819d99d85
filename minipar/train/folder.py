"""The folder of a run: one job at a time writes into it, all of its ranks see it, and a job that is
started again finds it.

*One job.* Rank 0 keeps `running.json` locked for as long as the run lasts, with its host, process
and a word made up for this start. The kernel lets go of the lock when the process ends, however
that happens. On NFS it holds between hosts as well; where a file system has no locks, the file
itself must do. Who removes the folder or this file ends the run, at its next save: a lock on a file
that is not there keeps no other run away.

*Seen by all.* Each rank must read that word before it trains. One that cannot is on a host that
does not share the folder: its part of every checkpoint would be lost.

*Found again.* `job.json` names the job of torchrun and its flags: when ranks or nodes are started
again under the same name and with the same flags, they go on with that run.

Proved by: tests/train/test_folder.py, tests/hosts/test_two_agents.py.
"""

import fcntl
import json
import os
import platform
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis
from minipar.ranks import backends
from minipar.train import checkpoint
from minipar.train.config import TrainConfig
from minipar.train.metrics import write_whole
from minipar.train.saver import make_newest

RUNNING, JOB = "running.json", "job.json"
PATIENCE = 5.0  # seconds until a file system that is shared shows what another host has written


@contextmanager
def held(folder: Path, axis: Axis) -> Iterator[Callable[[], bool]]:
    """Hold the folder of a run while the body lasts; a collective of `axis`, all ranks of the run.

    Makes the folder, and removes it afterwards if nothing was put there. The body gets what says on
    rank 0 whether the folder is still the one that it holds. Raises on all ranks: `ValueError`
    where another process holds it, or a rank does not see it; `OSError` where it cannot be made.
    """
    lock = word = problem = None
    if axis.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            word = secrets.token_hex(8)
            lock = _lock(folder / RUNNING, word)
        except OSError as error:
            problem = OSError(f"{folder} cannot be written: {error}; is it another user's?")
            problem.everywhere = True
        except ValueError as error:
            problem = error
    me = f"rank {axis.rank} on {platform.node()}"
    word, problem, first = all_gather_object((word, problem, me), axis)[0]
    try:
        if problem is not None:
            raise problem
        sees = _is_in(word, folder / RUNNING)
        blind = [who for who, sees in all_gather_object((me, sees), axis) if not sees]
        if blind:
            raise ValueError(
                f"{folder} is not shared: {', '.join(blind[:8])} cannot read what {first} has "
                f"written there, and checkpoints would lack their parts; all hosts of a run need "
                f"one folder, such as --out on NFS"
            )
        yield lambda: lock is None or _is_still(folder / RUNNING, lock)
    finally:
        if lock is not None:
            try:
                with suppress(OSError):
                    if _is_still(folder / RUNNING, lock):
                        (folder / RUNNING).unlink()
            finally:  # also where this is interrupted: the process may live on, and train again
                os.close(lock)
            with suppress(OSError):
                folder.rmdir()  # only an empty one goes


def _lock(path: Path, word: str) -> int:
    """Lock the file, and write there who does; return what keeps it locked until it is closed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise _busy(path) from None
        except OSError:  # no locks here
            if _may_live(_read(path)):
                os.close(fd)
                raise ValueError(f"{_busy(path)}; if it has ended, remove {path}") from None
        if _is_still(path, fd):  # the holder before may just have removed it
            break
        os.close(fd)
    os.ftruncate(fd, 0)
    who = {"host": platform.node(), "pid": os.getpid(), "word": word}
    os.pwrite(fd, (json.dumps(who) + "\n").encode(), 0)
    os.fsync(fd)
    return fd


def _is_still(path: Path, fd: int) -> bool:
    """Whether `path` is the file that was opened, not gone, and none that was made since."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _busy(path: Path) -> ValueError:
    holder = _read(path)
    return ValueError(
        f"{path.parent} is being written by process {holder.get('pid', '(unknown)')} on host "
        f"{holder.get('host', '(unknown)')}; wait for its end, or stop it first"
    )


def _may_live(holder: dict[str, Any]) -> bool:
    here = holder.get("host") == platform.node()
    return bool(holder) and not (here and not psutil.pid_exists(int(holder.get("pid", 0))))


def _is_in(word: str, path: Path) -> bool:
    limit = time.monotonic() + PATIENCE
    while _read(path).get("word") != word:
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def _read(path: Path) -> dict[str, Any]:
    """What one of our files says; nothing if it is not there, or none of ours."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


# ---------------------------------------------------------------------- jobs of torchrun
def note_job(folder: Path, job: str, config: TrainConfig, start: str | None) -> None:
    """Note down in the folder of a run which job has it, and where that has started from."""
    content = {"job": job, "config": asdict(config), "start": start, "before": _saved(folder)}
    write_whole(folder / JOB, json.dumps(content) + "\n")


def find_job(folder: Path | None, job: str, config: TrainConfig) -> tuple[Path, str | None] | None:
    """Return the folder of that job, and the checkpoint to go on from, if it was begun before.

    `folder` is where it must be; None looks at all below --out. The checkpoint is the newest that
    the job has written, or the one that it has started from.
    """
    for candidate in [folder] if folder else sorted(Path(config.out).glob("*/")):
        noted = _read(candidate / JOB)
        if noted.get("job") == job and noted.get("config") == json.loads(
            json.dumps(asdict(config))
        ):
            written = [saved for saved in _saved(candidate) if saved not in noted["before"]]
            return candidate, written[-1][0] if written else noted["start"]
    return None


def forget_job(folder: Path) -> None:
    """The job is done, or was refused: under its name the next one begins anew."""
    with suppress(OSError):
        (folder / JOB).unlink()
        folder.rmdir()  # only an empty one goes


def _saved(folder: Path) -> list[list]:
    """The checkpoints of a run, oldest first, each as [path, when it was written]."""
    saved = checkpoint.available(folder / "checkpoints")
    return [[str(path), path.stat().st_mtime_ns] for path in saved]


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of a run that was written last; None if it has none.

    One of a higher step may be of another story: that of a run which then went back. A copy of the
    run says the same, whatever the times of its files; these count where there are no numbers.
    """

    def written(saved: Path) -> tuple[int, int]:
        manifest = saved / "manifest.json"
        at = (manifest if manifest.exists() else saved).stat().st_mtime_ns
        return at, checkpoint.step_of(saved)

    numbers = {s: checkpoint.number_of(s) for s in checkpoint.available(folder / "checkpoints")}
    sound = {saved: (number, *written(saved)) for saved, number in numbers.items() if number >= 0}
    best = max(sound, key=sound.__getitem__, default=None)
    # A damaged one that was written later is for `checkpoint.verify` to refuse.
    later = [s for s in numbers.keys() - sound if best is None or written(s) > written(best)]
    return max(later, key=written, default=best)


def go_on_from(folder: Path, start: Path) -> None:
    """Make `start`, if it is of this run, its `newest` checkpoint.

    So the story that a run goes back from has ended, even if it is killed before its next save.
    """
    own = folder / "checkpoints" / start.name
    if start.parent.resolve() == own.parent.resolve() and newest(folder) != own:
        with suppress(PermissionError):  # it is protected: the next save will be the newest
            make_newest(own)


def how_to_go_on(folder: Path) -> str:
    """Say how a run that has stopped is taken up again."""
    saved = newest(folder)
    if saved is None:
        return "Stopped before the first checkpoint."
    resume = f"--resume {shlex.quote(str(folder))}"
    how = f"minipar train {resume}"
    if backends.under_torchrun():
        how = f"the same line of torchrun, and in it {resume}"
    return f"Stopped. Go on from step {checkpoint.step_of(saved)} with: {how}"
