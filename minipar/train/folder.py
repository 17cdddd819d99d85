"""The folder of a run: all ranks see it.

Rank 0 writes a random word there, and each rank must read the word before it trains. A rank that
cannot is on a host that does not share the folder: its part of every checkpoint would be lost.
"""

import platform
import secrets
import time
from contextlib import suppress
from pathlib import Path

from minipar.comm.collectives import all_gather_object
from minipar.comm.mesh import Axis

PATIENCE = 5.0  # seconds until a shared file system shows what another host has written


def make_shared(folder: Path, axis: Axis) -> None:
    """Make `folder`; a collective of `axis`, all ranks of the run.

    Raises on all ranks: `ValueError` where a rank does not see it; `OSError` where it cannot be
    written.
    """
    path, word, problem = folder / ".shared", secrets.token_hex(8), None
    if axis.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(word)
        except OSError as error:
            problem = OSError(f"{folder} cannot be written: {error}; is it another user's?")
    me = f"rank {axis.rank} on {platform.node()}"
    word, problem, first = all_gather_object((word, problem, me), axis)[0]
    if problem is not None:
        raise problem
    sees = all_gather_object((me, _shows(path, word)), axis)
    if axis.rank == 0:
        path.unlink()
    if blind := [who for who, is_seen in sees if not is_seen]:
        raise ValueError(
            f"{folder} is not shared: {', '.join(blind[:8])} cannot read what {first} has written "
            f"there, and checkpoints would lack their parts; all hosts of a run need one folder, "
            f"such as --out on NFS"
        )


def _shows(path: Path, word: str) -> bool:
    """True if this host sees `word` in the file, within `PATIENCE`."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        with suppress(OSError):
            if path.read_text() == word:
                return True
        time.sleep(0.05)
    return False
