"""Simulated beside measured here: does a calibrated machine predict steps of this very computer?

    python -m minipar.sim.here [MACHINE.toml]

measures this computer as `minipar calibrate` does, or reads the file that it has written, and then
trains a small Llama on two ranks by each of `PLANS` on each of `LINKS`, without an emulated device:
what computes is the processor. Rounds of all configurations follow on each other, and medians
count. Before each a *control* is measured, ddp on no link, as this computer's speed changes with
what else it does: the second error is that of the times in units of the control's.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minipar.comm.threads import keep_to_a_core, usable_cores
from minipar.emulate import device as devices
from minipar.emulate import link
from minipar.model.llama import LlamaConfig
from minipar.parallel.plan import Plan
from minipar.ranks.launch import Ranks
from minipar.sim import calibrate, emulate, hardware
from minipar.sim.replay import replay
from minipar.sim.trace import trace

CONFIG = LlamaConfig(2048, 256, 704, num_layers=4, num_heads=8, num_kv_heads=4)
SEQ_LEN = 256
PLANS = (
    "dp=2", "dp=2,microbatches=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,sequence_parallel",
    "pp=2,microbatches=4",
)  # fmt: skip
LINKS = ("none", "10gbe", "1gbe")
RANKS = 2
ROUNDS = 5


class Row(NamedTuple):
    """A configuration: its seconds by round, those of its control, and what was predicted."""

    plan: str
    link: str
    measured: tuple[float, ...]
    controls: tuple[float, ...]
    predicted: float
    control: float

    @property
    def error(self) -> float:
        """Of the predicted seconds."""
        return self.predicted / float(np.median(self.measured)) - 1

    @property
    def beside_control(self) -> float:
        """Of the predicted multiple of the control's seconds."""
        ratios = np.divide(self.measured, self.controls)
        return self.predicted / self.control / float(np.median(ratios)) - 1


@dataclass(frozen=True)
class Here(emulate.Emulated):
    """The emulated link between processes of this computer, which move the bytes themselves."""

    machine: hardware.Machine

    def seconds_of_collective(
        self, verb: str, num_bytes: float, ranks: int, nodes: int = 1
    ) -> float:
        """Seconds of `verb`: what a call of no bytes takes here, and then the link's seconds, or
        those of moving the bytes if they are more.
        """
        call, moving = (self.machine.seconds_of_collective(verb, n, ranks) for n in (0, num_bytes))
        return max(call + super().seconds_of_collective(verb, num_bytes, ranks, nodes), moving)

    def seconds_of_moving(self, num_bytes: float) -> float:
        """Seconds in which a rank cannot compute, since its core moves `num_bytes` that it sends.

        None where there are more cores than ranks: another core does that.
        """
        return 0.0 if usable_cores() > RANKS else num_bytes / self.machine.inside.bus(RANKS)


def compare(machine: hardware.Machine, plans: tuple[str, ...] = PLANS, rounds: int = ROUNDS,
            links: tuple[str, ...] = LINKS) -> list[Row]:  # fmt: skip
    """Measure and predict each plan on each link."""
    pairs = [(plan, name) for name in links for plan in plans]
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {pair: [] for pair in pairs}
    with Ranks(RANKS, backend="link", sink=None, timeout=300) as ranks:
        ranks.run(link.check_calls, False)
        ranks.run_each(keep_to_a_core, [(rank, RANKS) for rank in range(RANKS)])

        def measure(plan: str, name: str) -> float:
            ranks.run(link.use, name)
            return emulate.step(ranks, CONFIG, Plan.parse(plan), seq_len=SEQ_LEN).seconds

        for _ in range(rounds):
            for pair in pairs:
                control = measure("dp=2", "none")
                seconds[pair].append((measure(*pair), control))

    def predict(plan: str, name: str) -> float:
        there = Here(devices.Device(machine.device), link.parse(name), machine)
        traces = trace(CONFIG, Plan.parse(plan), seq_len=SEQ_LEN, on_cpu=True)
        return replay(traces, there).seconds

    control = predict("dp=2", "none")
    return [
        Row(*pair, *zip(*times, strict=True), predict(*pair), control)
        for pair, times in seconds.items()
    ]


def table(rows: list[Row]) -> str:
    """Return a line per configuration, and the median and the worst error."""
    lines = ["measured, predicted (ms), error, error beside the control, plan, link"]
    for row in rows:
        times = f"{np.median(row.measured) * 1e3:8.1f} {row.predicted * 1e3:8.1f}"
        lines.append(f"{times} {row.error:+7.1%} {row.beside_control:+7.1%}  {row.plan} {row.link}")
    for name, errors in (
        ("error", [row.error for row in rows]),
        ("beside the control", [row.beside_control for row in rows]),
    ):
        sizes = np.abs(errors)
        lines.append(f"{name}: median {np.median(sizes):.1%}, worst {sizes.max():.1%}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table for this computer."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "here.toml")
            machine = (
                hardware.load(arguments[0])
                if arguments
                else calibrate.run(calibrate.CalibrateConfig(out, ranks=RANKS), backend="link")
            )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(table(compare(machine)))


if __name__ == "__main__":
    main(sys.argv[1:])
