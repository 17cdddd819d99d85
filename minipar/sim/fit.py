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
from collections.abc import Iterable, Sequence
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
    """One measured collective: `seconds` for the whole tensor's `num_bytes` on `machine`."""

    table: str
    machine: str
    verb: str
    num_bytes: int
    ranks: int
    nodes: int
    seconds: float

    def predicted(self, **networks: hardware.Network) -> float:
        """Return the law's seconds, with `inside` or `between` in the place of the machine's."""
        machine = replace(_load(self.machine), **networks)
        return machine.seconds_of_collective(self.verb, self.num_bytes, self.ranks, self.nodes)

    @property
    def bus(self) -> float:
        """The bus bandwidth of nccl-tests in bytes/s."""
        return wire_bytes(self.verb, self.num_bytes, self.ranks) / self.seconds


def _at(table: str, machine: str, verb: str, size: int, ranks: int, nodes: int, bus: float) -> Point:
    return Point(table, machine, verb, size, ranks, nodes, wire_bytes(verb, size, ranks) / bus)


def _vtrain(row: dict[str, str]) -> Point | None:
    size, ranks, seconds = int(row["bytes"]), int(row["ngpus"]), float(row["time_ns_oop"]) / 1e9
    if size > 2**24 and size % 2**24:  # of evenly spaced sizes, one in 16
        return None
    return Point(f"vtrain {row['gpu']}", row["gpu"], "all_reduce", size, ranks, 1, seconds)


def _nccl(row: dict[str, str]) -> Point | None:
    gpu, name = row["hardware"].split()[0].lower(), row["benchmark"]
    if gpu not in ("a100", "h200", "b200") or "NVLS off" in name or "ENABLE=0" in name:
        return None  # not named, or not the algorithm that NCCL would take
    nodes = 4 if "4 nodes" in row["hardware"] else 1
    machine, verb = gpu + "-efa" * (nodes > 1), name.split()[0].rstrip(";").replace("-", "_")
    bus = float(row["busbw_gbps"]) * 1e9
    return _at(f"nccl {machine}", machine, verb, int(row["bytes"]), int(row["gpus"]), nodes, bus)


def _ultrascale(row: dict[str, str]) -> Point:
    verbs = {"AllReduce": "all_reduce", "AllGather": "all_gather"}
    verb, nodes = verbs.get(row["collective"], "reduce_scatter"), int(row["nodes"])
    table = "ultrascale" + " 1 node" * (nodes == 1)
    size, bus = int(row["message_mb"]) << 20, float(row["bandwidth_gbps"]) * 1e9
    return _at(table, "h100-efa-busy", verb, size, int(row["gpus"]), nodes, bus)


def _simai(row: dict[str, str]) -> Point | None:
    """Shares of a peak that is not named: 450 GB/s in a node is ours, 8 ports of 50 GB/s beyond,
    and one port for all-to-all."""
    nodes, _, rest = row["setting"].partition("Node")
    if not rest or row["file"] == "nvlink_ratio" or (nodes := int(nodes)) == 1 and "ata" in row["file"]:
        return None
    table, verb, peak = "simai nic", "all_gather", 400e9
    if row["file"] == "ata_ratio":
        table, verb, peak = "simai all-to-all", "all_to_all", 50e9
    elif nodes == 1:
        table, peak = "simai 1 node", 450e9
    bus = peak * float(row["efficiency"])
    return _at(table, "h100-ndr", verb, int(row["bytes"]), 8 * nodes, nodes, bus)


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


def errors(points: Sequence[Point], predicted: Iterable[float]) -> np.ndarray:
    """Return the median, 90th percentile and worst of \\|predicted / measured - 1\\|."""
    off = [abs(found / p.seconds - 1) for p, found in zip(points, predicted, strict=True)]
    return np.quantile(off, [0.5, 0.9, 1])


def constant(points: Sequence[Point]) -> list[float]:
    """Return the seconds of all points at the bus bandwidth that is their median."""
    bus = float(np.median([p.bus for p in points]))
    return [p.seconds * p.bus / bus for p in points]


def fit(points: Sequence[Point], where: str, keys: Sequence[str]) -> dict[str, float]:
    """Return the best `keys` of the network that is `where` ("inside", "between") in `points`."""
    network = getattr(_load(points[0].machine), where)

    def off(logs: np.ndarray) -> np.ndarray:
        tried = {where: replace(network, **dict(zip(keys, np.exp(logs).tolist(), strict=True)))}
        return np.log([p.predicted(**tried) / p.seconds for p in points])

    logs = np.log([max(getattr(network, key), 1e-9) for key in keys])
    for _ in range(12):
        here = off(logs)
        slopes = np.stack([(off(logs + 1e-3 * e) - here) * 1e3 for e in np.eye(len(keys))], 1)
        weights = 1 / np.sqrt(np.abs(here) + 0.01)
        move = np.linalg.lstsq(slopes * weights[:, None], -here * weights, rcond=1e-6)[0]
        tries = [logs + scale * np.clip(move, -1, 1) for scale in (0, 0.03, 0.1, 0.3, 1)]
        logs = min(tries, key=lambda t: np.abs(off(t)).sum())
    return dict(zip(keys, np.exp(logs).tolist(), strict=True))


def main(folder: str) -> None:
    """Print the errors and the fitted constants."""
    points = read(Path(folder))
    if not points:
        raise SystemExit(f"{folder} holds none of {', '.join(TABLES)}")
    print(f"{'error: median, 90 %, worst':28} {'rows':>5}   {'the law':24}   a constant")
    for table, rows in points.items():
        law, flat = errors(rows, [p.predicted() for p in rows]), errors(rows, constant(rows))
        shown = ["  ".join(f"{x:6.1%}" for x in found) for found in (law, flat)]
        print(f"{table:28} {len(rows):5}   {shown[0]:24}   {shown[1]}")
    for network, (tables, keys) in FITTED.items():
        if rows := [p for table in tables.split(", ") for p in points.get(table, [])]:
            where = "inside" if rows[0].nodes == 1 else "between"
            best = fit(rows, where, keys.split()).items()
            print(f"{network:9}", ", ".join(f"{key} = {value:.3g}" for key, value in best))


if __name__ == "__main__":
    main(*sys.argv[1:2] or ".")
