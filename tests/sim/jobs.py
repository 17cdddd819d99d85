"""Jobs and sums for the tests of time and memory."""

from math import prod

from minipar.model.llama import PRESETS
from minipar.model.moe import MoEConfig
from minipar.parallel.plan import Plan
from minipar.sim import cost, footprint, hardware
from minipar.sim.tracer import Compute, Launch

H100 = hardware.load("h100-ndr")
ANY = hardware.software("any")
PARTLY = MoEConfig(8, 2, 14_336, num_shared=1, first_dense=3, every=2)
"""Experts in 15 layers of 32."""


def job(plan: str, *, config=PRESETS["llama-3-8b"], machine=H100, software=ANY, **options):
    return cost.Job(
        config, Plan.parse(plan), machine, software, options.pop("seq", 8192), **options
    )


def held(a: cost.Job) -> float:
    return sum(footprint.memory(a).values())


def flops(rank) -> int:
    """FLOPs of products and attention of a traced rank, with what is computed again."""
    total = 0
    for work in (event.work for event in rank.events() if type(event) is Compute):
        if work.work == "product":
            total += 2 * prod(work.shape)
        if work.work == "attention":
            *sizes, causal = work.shape
            total += (10 if "backward" in work.op else 4) * prod(sizes) // (1 + causal)
    return total


def sent(rank) -> dict[str, int]:
    """Bytes that a traced rank sends in a step, by axis."""
    launches = [event for event in rank.events() if type(event) is Launch]
    return {
        a: sum(e.num_bytes for e in launches if e.axis == a) for a in {e.axis for e in launches}
    }
