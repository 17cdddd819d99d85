"""Fit the constants of collectives to measured times, and say how good they are.

    python -m minipar.sim.fit TABLE.csv

prints for each source in the table the error of the constants in ``networks.toml`` beside that of a
*constant*, the source's median bus bandwidth for all of its rows, and then the constants that fit
best, to be copied there. All errors are in-sample: a law that does not beat the constant has shown
nothing. A row is ``source,machine,verb,bytes,ranks,nodes,busbw``, the last in GB/s, as nccl-tests
prints it.

The fit is Gauss-Newton on logarithms with numpy's least squares; rows far off weigh less, so that
the sum of absolute errors falls, not that of their squares (shared networks have long tails).
"""

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from minipar.comm.collectives import wire_bytes
from minipar.sim import hardware

COLUMNS = "source,machine,verb,bytes,ranks,nodes,busbw"
MOST = {"share": 1.0, "ramp": 2.0}
"""No network moves more than all of its bandwidth, nor ramps up slower than a pipeline does."""
_load = cache(hardware.load)


@dataclass(frozen=True)
class Point:
    """A measured collective of `num_bytes` in all; `bus` as in nccl-tests, but in bytes/s."""

    source: str
    machine: str
    verb: str
    num_bytes: int
    ranks: int
    nodes: int
    bus: float

    def predicted(self, **networks: hardware.Network) -> float:
        """Return the law's bus bandwidth; `inside` or `between` replace those of the machine."""
        machine = replace(_load(self.machine), **networks)
        seconds = machine.seconds_of_collective(self.verb, self.num_bytes, self.ranks, self.nodes)
        return wire_bytes(self.verb, self.num_bytes, self.ranks) / seconds


def read(path: str | Path) -> list[Point]:
    """Return the points of a table; raise `ValueError` for a row that is none."""
    points = []
    for number, row in enumerate(rows_of(path), 1):
        try:
            counts = [int(row[key]) for key in ("bytes", "ranks", "nodes")]
            bus = float(row["busbw"]) * 1e9
            points.append(Point(row["source"], row["machine"], row["verb"], *counts, bus))
        except KeyError as error:
            raise ValueError(f"{path}: has no column {error}; use {COLUMNS}") from None
        except (TypeError, ValueError):
            raise ValueError(
                f"{path}: row {number} needs numbers as its bytes, ranks, nodes and busbw"
            ) from None
    return points


def rows_of(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, in which a line that begins with # is a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
        return [*csv.DictReader(line for line in lines if not line.startswith("#"))]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: is no table: {error}") from error


def errors(points: Sequence[Point], buses: Iterable[float]) -> np.ndarray:
    """Return the median, 90th percentile and worst of \\|time by these / time measured - 1\\|."""
    return np.quantile(
        [abs(p.bus / b - 1) for p, b in zip(points, buses, strict=True)], [0.5, 0.9, 1]
    )


def solve(
    off: Callable[[np.ndarray], np.ndarray],
    start: Sequence[float],
    weights: np.ndarray | float = 1.0,
    prior: float = 0.0,
) -> list[float]:
    """Return the constants for which `off`, of their logarithms, is nearest to 0 everywhere.

    `prior` draws constants that no row tells anything of to where they start.
    """
    logs = first = np.log(np.maximum(start, 1e-9))
    axes = np.eye(len(first))
    for _ in range(12):
        here = off(logs)
        slopes = np.stack([(off(logs + 1e-3 * e) - here) * 1e3 for e in axes], 1)
        each = weights / np.sqrt(np.abs(here) + 0.01)
        left = np.vstack([slopes * np.reshape(each, (-1, 1)), prior * axes])
        right = np.concatenate([-here * each, prior * (first - logs)])
        move = np.linalg.lstsq(left, right, rcond=1e-6)[0]
        tries = [logs + scale * np.clip(move, -1, 1) for scale in (0, 0.03, 0.1, 0.3, 1)]
        logs = min(tries, key=lambda t: np.sum(weights * np.abs(off(t))))
    return np.exp(logs).tolist()


def fit(points: Sequence[Point], where: str, keys: Sequence[str]) -> dict[str, float]:
    """Return the best `keys` of the network that is `where` ("inside", "between") in `points`."""
    network = getattr(_load(points[0].machine), where)

    def named(constants: Sequence[float]) -> dict[str, float]:
        most = zip(keys, constants, strict=True)
        return {key: min(value, MOST.get(key, value)) for key, value in most}

    def off(logs: np.ndarray) -> np.ndarray:
        tried = {where: replace(network, **named(np.exp(logs).tolist()))}
        return np.log([p.predicted(**tried) / p.bus for p in points])

    return named(solve(off, [getattr(network, key) for key in keys]))


def main(path: str) -> None:
    """Print the errors and the fitted constants, by source and by network."""
    print(f"{'error: median, 90 %, worst':24} {'rows':>5}   {'the law':22}   a constant")
    points = sorted(read(path), key=lambda p: (p.source, p.nodes > 1, p.machine))
    for source, group in groupby(points, key=lambda p: p.source):
        rows = list(group)
        flat = [float(np.median([p.bus for p in rows]))] * len(rows)
        found = (errors(rows, [p.predicted() for p in rows]), errors(rows, flat))
        shown = "   ".join("  ".join(f"{x:6.1%}" for x in e) for e in found)
        print(f"{source:24} {len(rows):5}   {shown}")
    for (_, far, machine), group in groupby(points, lambda p: (p.source, p.nodes > 1, p.machine)):
        where = "between" if far else "inside"
        best = fit(list(group), where, ("launch", "latency", "share", "ramp"))
        print(f"{machine}, {where}:", ", ".join(f"{k} = {v:.3g}" for k, v in best.items()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m minipar.sim.fit TABLE.csv")
    try:
        main(sys.argv[1])
    except (OSError, ValueError) as error:
        raise SystemExit(" ".join(str(error).split())) from None
