"""The folder of a run: one job at a time writes into it, and all of its ranks see it.

*One job.* Rank 0 locks the file `lock` for as long as the run lasts. The kernel releases the lock
when the process ends, even after a kill.

*Seen by all.* Rank 0 writes a random word into that file, and each rank must read the word before
it trains. A rank that cannot read the word runs on a host that does not share the folder: that
rank's part of every checkpoint would be lost.
"""

import fcntl
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis

LOCK, T = "lock", TypeVar("T")
PATIENCE = 5.0  # seconds until a shared file system shows what another host has written


@contextmanager
def held(folder: Path, axis: Axis) -> Iterator[None]:
    """Hold the folder of a run while the body lasts; a collective of `axis`, all ranks of the run.

    Makes the folder, and removes it afterwards if nothing was put there. Raises on all ranks:
    `ValueError` where another process holds it, or a rank does not see it; `OSError` where it
    cannot be made.
    """
    me = f"rank {axis.rank} on {platform.node()}"
    fd, word, first = on_first_rank(lambda: (*_lock(folder), me), axis)
    try:
        sees = _shows(folder / LOCK, word)
        blind = [who for who, sees in all_gather_object((me, sees), axis) if not sees]
        if blind:
            cannot = f"{', '.join(blind[:8])} cannot read what {first} has written there"
            need = "all hosts of a run need one folder, such as --out on NFS"
            raise ValueError(f"{folder} is not shared: {cannot}; {need}")
        yield
    finally:
        if axis.rank == 0:
            with suppress(OSError):
                (folder / LOCK).unlink()
            os.close(fd)
            with suppress(OSError):
                folder.rmdir()  # only if it is empty


def on_first_rank(work: Callable[[], T], axis: Axis) -> T:
    """Return what `work` returns on the first rank, or raise what it raises there; a collective."""
    result = problem = None
    if axis.rank == 0:
        try:
            result = work()
        except (OSError, ValueError) as error:
            problem = error
    result, problem = all_gather_object((result, problem), axis)[0]
    if problem is not None:
        raise problem
    return result


def _lock(folder: Path) -> tuple[int, str]:
    """Lock the folder; return the file descriptor that keeps the lock, and a word written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error}; is it another user's?") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        says = f"{folder} is being written by another run"
        raise ValueError(f"{says}; wait for its end, or stop it first") from None
    except OSError:
        pass  # a file system without locks
    word = secrets.token_hex(8)
    os.ftruncate(fd, 0)
    os.pwrite(fd, word.encode(), 0)
    os.fsync(fd)
    return fd, word


def _shows(path: Path, word: str) -> bool:
    """True if this host sees `word` in the file, within `PATIENCE`."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        with suppress(OSError):
            if path.read_bytes() == word.encode():
                return True
        time.sleep(0.05)
    return False
