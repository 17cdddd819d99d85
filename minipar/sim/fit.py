"""Fit the constants of collectives to published tables, and say how good they are.

    python -m minipar.sim.fit FOLDER

prints for each table in FOLDER (`TABLES`) the error of the constants in ``networks.toml`` beside
that of a *constant*, the table's median bus bandwidth for all of its rows, and then the constants
that fit best, to be copied there. All errors are in-sample: a law that does not beat the constant
has shown nothing, and one that does may still be wrong elsewhere.

The fit is Gauss-Newton on logarithms with numpy's least squares; rows far off weigh less, so that
the sum of absolute errors falls, not that of their squares (shared networks have long tails).
"""

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from minipar.comm.spans import wire_bytes
from minipar.sim import hardware

FITTED = {  # network: the tables it is fitted to, and the constants that these can tell
    "nvlink2": ("vtrain v100", "launch latency ramp tree"),
    "nvlink3": ("vtrain a100, nccl a100", "launch latency share ramp tree"),
    "nvlink4": ("nccl h200, ultrascale 1 node, simai 1 node", "launch share nvls ramp"),
    "nvlink5": ("nccl b200", "launch share nvls ramp"),
    "ib-ndr": ("simai nic", "launch latency share ramp"),
    "efa": ("nccl b200-efa", "launch latency share ramp"),
    "efa-busy": ("ultrascale", "latency share"),
}
_load = cache(hardware.load)


@dataclass(frozen=True)
class Point:
    """A measured collective of `num_bytes` in all; `bus` as in nccl-tests, but in bytes/s."""

    table: str
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


def _vtrain(row: dict[str, str]) -> Point | None:
    gpu, size, ranks = row["gpu"], int(row["bytes"]), int(row["ngpus"])
    if size > 2**24 and size % 2**24:  # of evenly spaced sizes, one in 16
        return None
    bus = float(row["busbw_gbps_oop"]) * 1e9
    return Point(f"vtrain {gpu}", gpu, "all_reduce", size, ranks, 1, bus)


def _nccl(row: dict[str, str]) -> Point | None:
    gpu, name = row["hardware"].split()[0].lower(), row["benchmark"]
    if gpu not in ("a100", "h200", "b200") or "NVLS off" in name or "ENABLE=0" in name:
        return None  # not named, or not the algorithm that NCCL would take
    nodes = 4 if "4 nodes" in row["hardware"] else 1
    machine, verb = gpu + "-efa" * (nodes > 1), name.split()[0].rstrip(";").replace("-", "_")
    size, ranks, bus = int(row["bytes"]), int(row["gpus"]), float(row["busbw_gbps"]) * 1e9
    return Point(f"nccl {machine}", machine, verb, size, ranks, nodes, bus)


def _ultrascale(row: dict[str, str]) -> Point:
    verbs = {"AllReduce": "all_reduce", "AllGather": "all_gather"}
    verb, nodes = verbs.get(row["collective"], "reduce_scatter"), int(row["nodes"])
    table, size = "ultrascale" + " 1 node" * (nodes == 1), int(row["message_mb"]) << 20
    bus = float(row["bandwidth_gbps"]) * 1e9
    return Point(table, "h100-efa-busy", verb, size, int(row["gpus"]), nodes, bus)


def _simai(row: dict[str, str]) -> Point | None:
    """Of a peak that the table does not name: NVLink 4 in a node, between nodes the 8 ports of
    400 Gb/s together, and one of them for all-to-all."""
    count, _, rest = row["setting"].partition("Node")
    one, file = count.strip() == "1", row["file"]
    if not rest or file == "nvlink_ratio" or (one and file == "ata_ratio"):
        return None
    table, verb, peak = "simai nic", "all_gather", 400e9
    if file == "ata_ratio":
        table, verb, peak = "simai all-to-all", "all_to_all", 50e9
    elif one:
        table, peak = "simai 1 node", 450e9
    size, bus = int(row["bytes"]), peak * float(row["efficiency"])
    return Point(table, "h100-ndr", verb, size, 8 * int(count), int(count), bus)


TABLES = {
    "vtrain_nccl_allreduce_lut.csv": _vtrain,
    "nccl_busbw_ml_engineering.csv": _nccl,
    "ultrascale_nccl_bandwidth_by_nodes.csv": _ultrascale,
    "simai_busbw_efficiency.csv": _simai,
}


def read(folder: Path) -> dict[str, list[Point]]:
    """Return the points of the files of `TABLES` in `folder`, by table."""
    points: dict[str, list[Point]] = {}
    for name, parse in TABLES.items():
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            for row in csv.DictReader(line for line in lines if not line.startswith("#")):
                if point := parse(row):
                    points.setdefault(point.table, []).append(point)
    return points


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

    def off(logs: np.ndarray) -> np.ndarray:
        tried = {where: replace(network, **dict(zip(keys, np.exp(logs).tolist(), strict=True)))}
        return np.log([p.predicted(**tried) / p.bus for p in points])

    found = solve(off, [getattr(network, key) for key in keys])
    return dict(zip(keys, found, strict=True))


def main(folder: str) -> None:
    """Print the errors and the fitted constants."""
    points = read(Path(folder))
    if not points:
        raise SystemExit(f"{folder} holds none of {', '.join(TABLES)}")
    print(f"{'error: median, 90 %, worst':28} {'rows':>5}   {'the law':22}   a constant")
    for table, rows in points.items():
        flat = [float(np.median([p.bus for p in rows]))] * len(rows)
        found = (errors(rows, [p.predicted() for p in rows]), errors(rows, flat))
        shown = "   ".join("  ".join(f"{x:6.1%}" for x in e) for e in found)
        print(f"{table:28} {len(rows):5}   {shown}")
    for network, (tables, keys) in FITTED.items():
        if rows := [p for table in tables.split(", ") for p in points.get(table, [])]:
            best = fit(rows, "inside" if rows[0].nodes == 1 else "between", keys.split())
            print(f"{network:9}", ", ".join(f"{key} = {value:.3g}" for key, value in best.items()))


if __name__ == "__main__":
    main(*sys.argv[1:2] or ".")
