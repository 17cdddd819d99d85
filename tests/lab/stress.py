"""Provoke every failure that a notebook can meet, many times, and time the recovery.

    python -m tests.lab.stress --rounds 20

prints a table: how long it takes until the pool of ranks has answered a next, correct cell, counted
from the failure; how many ranks were lost without being killed; and how often that next cell was
wrong, or a variable gone.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO

from minipar.lab.cells import CellError, Ranks

NET = """
net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
"""
STEPS = """
for step in range(6):
    if step == {step} and rank == {rank}:
        raise ValueError("provoked")
"""
RING = "after, before = (rank + 1) % world_size, (rank - 1) % world_size\n"

# {rank} and {step} are drawn afresh for every round.
FAILURES = {
    "raises before all_reduce": STEPS + "    dist.all_reduce(torch.ones(1))",
    "raises inside DDP": NET
    + "net = torch.nn.parallel.DistributedDataParallel(net)"
    + STEPS
    + "    net(torch.ones(2, 16)).sum().backward()",
    "raises inside fully_shard": "from torch.distributed.fsdp import fully_shard"
    + NET
    + "for layer in net:\n    fully_shard(layer)\nfully_shard(net)"
    + STEPS
    + "    net(torch.ones(2, 16)).sum().backward()",
    "raises in a sub-group": "half, _ = dist.new_subgroups(2)"
    + STEPS
    + "    dist.all_reduce(torch.ones(1), group=half)\n    dist.barrier()",
    "raises in a ring of messages": RING
    + STEPS
    + "    sent = dist.isend(torch.ones(5), after)\n"
    + "    dist.recv(torch.ones(5), before)\n    sent.wait()",
    "raises, others loop": "if rank == {rank}:\n    raise ValueError('provoked')\nwhile True: pass",
    "different shapes": "dist.all_reduce(torch.ones(2 + (rank == {rank})))",
    "different collectives": "if rank == {rank}:\n    dist.barrier()\n"
    + "else:\n    dist.all_reduce(torch.ones(1))",
    "skips a collective": "if rank != {rank}:\n    dist.all_reduce(torch.ones(1))",
    "all wait for each other": RING + "dist.recv(torch.ones(1), before)",
    "killed": "import os\nif rank == {rank}:\n    os.kill(os.getpid(), 9)\ndist.barrier()",
    "exits": "import os\nif rank == {rank}:\n    os._exit(3)\ndist.barrier()",
    "segmentation fault": "import os\nif rank == {rank}:\n    os.kill(os.getpid(), 11)\n"
    + "dist.barrier()",
    "stop button: all_reduce": "import time\nif rank == {rank}:\n    time.sleep(60)\n"
    + "dist.all_reduce(torch.ones(1))",
    "stop button: recv": RING + "dist.recv(torch.ones(1), before)",
    "stop button: endless loop": "while True: pass",
    "stop button: sleep": "import time\ntime.sleep(60)",
}
NEEDS_LINK = {  # gloo knows neither what others call nor who waits: it waits for its timeout
    "different shapes",
    "different collectives",
    "skips a collective",
    "all wait for each other",
}
DEADLY = {"killed", "exits", "segmentation fault"}
PATIENCE = 0.3  # seconds until the stop button is pressed
NEXT_CELL = "proof = torch.ones(1)\ndist.all_reduce(proof, group=mesh.world.group)"


@dataclass
class Row:
    """What happened to one kind of failure."""

    seconds: list[float] = field(default_factory=list)  # of each recovery
    unnoticed: int = 0  # no error reached the notebook
    lost: int = 0  # ranks that ended without having been ended
    wrong: int = 0  # the next cell failed, was wrong, or a variable was gone


def provoke(ranks: Ranks, name: str, row: Row, dice: random.Random) -> None:
    """Let `name` happen once and enter in `row` how the ranks came out of it."""
    victim = dice.randrange(ranks.size)
    code = (
        FAILURES[name].replace("{rank}", str(victim)).replace("{step}", str(dice.randrange(1, 5)))
    )
    ranks.put(keepsake=42)
    pids, patience = ranks.pids, 0.0
    if name.startswith("stop button"):
        patience = PATIENCE
        timer = threading.Timer(patience, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
    start, noticed = time.monotonic(), False
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            ranks.cell(code)
        except (CellError, KeyboardInterrupt):
            noticed = True
    survivors = [] if name in DEADLY else range(ranks.size)  # else all are started anew
    try:
        ranks.cell(NEXT_CELL)
        proofs = [proof.item() for proof in ranks["proof"]]
        kept = ranks["globals().get('keepsake')"]
        good = proofs == [ranks.size] * ranks.size and all(kept[r] == 42 for r in survivors)
    except CellError:
        good = False
    row.seconds.append(time.monotonic() - start - patience)
    row.unnoticed += not noticed
    row.lost += sum(pids[rank] != ranks.pids[rank] for rank in survivors)
    row.wrong += not good


def table(rows: dict[str, Row]) -> str:
    """Return the results as a table in plain text."""
    lines = [
        f"{'failure':30} {'rounds':>6} {'median s':>9} {'worst s':>8} {'unnoticed':>10} "
        f"{'ranks lost':>11} {'next cell wrong':>16}"
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:30} {len(row.seconds):6} {statistics.median(row.seconds):9.2f} "
            f"{max(row.seconds):8.2f} {row.unnoticed:10} {row.lost:11} {row.wrong:16}"
        )
    return "\n".join(lines)


def stress(
    rounds: int,
    size: int = 4,
    backend: str = "link",
    names: Iterable[str] = FAILURES,
    seed: int = 0,
) -> dict[str, Row]:
    """Provoke each failure `rounds` times, in mixed order, on one pool of `size` ranks."""
    rows, dice = {name: Row() for name in names}, random.Random(seed)
    plan = [name for name in rows for _ in range(rounds)]
    dice.shuffle(plan)
    with Ranks(size, backend=backend) as ranks:
        for name in plan:
            provoke(ranks, name, rows[name], dice)
    return rows


def main() -> int:
    """Run as a command; the exit code is 1 if a recovery took over 5 s, or went wrong."""
    parser = argparse.ArgumentParser(description="Provoke every failure, time every recovery.")
    parser.add_argument("--rounds", type=int, default=20, help="how often each failure happens")
    parser.add_argument("--size", type=int, default=4, help="number of ranks")
    parser.add_argument("--backend", default="link", choices=["link", "gloo"])
    parser.add_argument("--only", default="", help="failures whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    names = [name for name in FAILURES if asked.only in name]
    if asked.backend == "gloo":
        names = [name for name in names if name not in NEEDS_LINK]
    rows = stress(asked.rounds, asked.size, asked.backend, names, asked.seed)
    print(f"{asked.size} ranks, backend {asked.backend}\n{table(rows)}")
    return int(
        any(max(row.seconds) > 5 or row.unnoticed or row.lost or row.wrong for row in rows.values())
    )


if __name__ == "__main__":
    sys.exit(main())
