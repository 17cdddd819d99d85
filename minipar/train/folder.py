"""The folder of a run: one job at a time writes into it, and all of its ranks see it.

*One job.* Rank 0 locks the file `lock` for as long as the run lasts. The kernel lets go of the lock
when the process ends, however that happens.

*Seen by all.* Rank 0 writes a random word into that file, and each rank must read the word before
it trains. A rank that cannot is on a host that does not share the folder: its part of every
checkpoint would be lost.
"""

import fcntl
import os
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis

LOCK = "lock"
PATIENCE = 5.0  # seconds until a shared file system shows what another host has written


@contextmanager
def held(folder: Path, axis: Axis) -> Iterator[None]:
    """Hold the folder of a run while the body lasts; a collective of `axis`, all ranks of the run.

    Makes the folder, and removes it afterwards if nothing was put there. Raises on all ranks:
    `ValueError` where another process holds it, or a rank does not see it; `OSError` where it
    cannot be made.
    """
    fd = problem = None
    word = secrets.token_hex(8)
    if axis.rank == 0:
        try:
            fd = _lock(folder, word)
        except (OSError, ValueError) as error:
            problem = error
    me = f"rank {axis.rank} on {platform.node()}"
    word, problem, first = all_gather_object((word, problem, me), axis)[0]
    try:
        if problem is not None:
            raise problem
        sees = _shows(folder / LOCK, word)
        blind = [who for who, sees in all_gather_object((me, sees), axis) if not sees]
        if blind:
            raise ValueError(
                f"{folder} is not shared: {', '.join(blind[:8])} cannot read what {first} has "
                f"written there; all hosts of a run need one folder, such as --out on NFS"
            )
        yield
    finally:
        if fd is not None:
            with suppress(OSError):
                (folder / LOCK).unlink()
            os.close(fd)
            with suppress(OSError):
                folder.rmdir()  # only an empty one goes


def _lock(folder: Path, word: str) -> int:
    """Lock the folder, and write `word` there; return the file descriptor that keeps the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error}; is it another user's?") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ValueError(
            f"{folder} is being written by another run; wait for its end, or stop it first"
        ) from None
    except OSError:
        pass  # a file system without locks
    os.ftruncate(fd, 0)
    os.pwrite(fd, word.encode(), 0)
    os.fsync(fd)
    return fd


def _shows(path: Path, word: str) -> bool:
    """True if this host sees `word` in the file, within `PATIENCE`."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        with suppress(OSError):
            if path.read_bytes() == word.encode():
                return True
        time.sleep(0.05)
    return False
