"""A plan for a model on a machine, and what follows for sizes: who computes how much of what.

`cost.py` turns it into seconds, `footprint.py` into bytes.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from minipar.model.llama import LlamaConfig
from minipar.parallel.pipeline import simulate, stages
from minipar.parallel.pipeline.schedules import LOOPED, PAIRED, make
from minipar.parallel.plan import Plan
from minipar.sim import load
from minipar.sim.hardware import Machine, Software
from minipar.sim.load import Load

FILLED = ("interleaved_zb", "zb_v", "dualpipe", "dualpipe_v")
"""Schedules without a law of their own for how much of 1F1B's bubble few microbatches can fill.

Of many, in pairs, dualpipe leaves (p/2 - 1)(F&B + B - 3W), as DeepSeek-V3 has it (arXiv 2412.19437,
table 2), and dualpipe_v, two stages per rank of half the size, as much on twice as many ranks.
"""
V_SHAPED = ("zb_v", "dualpipe", "dualpipe_v")


@dataclass(frozen=True)
class Job:
    """A plan for a model on a machine; `microbatch` sequences of `seq_len` tokens at a time."""

    config: LlamaConfig
    plan: Plan
    machine: Machine
    software: Software
    seq_len: int
    microbatch: int = 1
    dtype: str = "bf16"
    gated: bool = True  # two matrices into the hidden layer, as in a Llama; or one, as in GPT
    flash: bool = True  # attention in one kernel
    ep: int = 1  # ranks of dp, cp and tp that share the experts, where no axis of the plan does
    experts: Load = ()  # tokens of each

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a rank."""
        return self.microbatch * self.seq_len / self.plan.cp

    @property
    def dp(self) -> int:
        """Ranks with sequences of their own: those of an axis of experts have, too."""
        return self.plan.dp * self.plan.ep

    @property
    def wide(self) -> str:
        """The type of all but a layer's products, which alone may have 8 bits or fewer."""
        return "bf16" if self.dtype in ("fp8", "fp4") else self.dtype

    @property
    def tokens_of_step(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.dp * self.plan.microbatches * self.microbatch * self.seq_len

    @property
    def experts_over(self) -> int:
        """Ranks among which experts are shared out."""
        return max(self.ep, math.prod(getattr(self.plan, axis) for axis in self.plan.expert_axes))

    @property
    def experts_apart(self) -> int:
        """The distance between two of those ranks: tp, or 1 where ranks of tp are among them."""
        over_tp = self.plan.experts_over_tp or self.dp * self.plan.cp % self.experts_over
        return 1 if over_tp else self.plan.tp

    @property
    def experts_copies(self) -> int:
        """Ranks that have the same experts as this one, and sequences of their own."""
        ranks = self.dp * self.plan.cp * self.plan.tp // self.experts_apart
        return max(1, ranks // self.experts_over)

    @property
    def busiest(self) -> float:
        """Rows of the rank with the most, for which all others wait, as a multiple of the mean."""
        if self.plan.dispatch == "padded":  # to what the fullest expert may have
            return self.config.moe.capacity_factor or 1.0
        return load.busiest(self.experts, self.experts_over)[1]

    @property
    def experts_cut(self) -> int:
        """Into how many pieces tensor parallelism cuts an expert; 1: ranks have whole ones."""
        return self.plan.tp if self.plan.expert_tensor_parallel else 1

    @property
    def chunks(self) -> int:
        """Stages of a rank of the pipeline."""
        looped = self.plan.schedule in ("interleaved_1f1b", "looped_bfs", "interleaved_zb")
        default = 2 if looped or self.plan.schedule in V_SHAPED else 1
        return self.plan.stages_per_rank or default

    def kinds(self) -> list[tuple[float, "Job"]]:
        """Return the shares of layers with experts and without, each with a job of these alone."""
        return [(share, replace(self, config=config)) for share, config in _kinds(self.config)]

    def layers(self) -> list[float]:
        """Return for each rank of the pipeline how many layers a microbatch goes through there.

        Those of dualpipe are a mean: there are two copies, each for half of the microbatches.
        """
        p, v = self.plan.pp, self.chunks
        if self.software.even and not self.config.num_layers % (p * v):
            return [self.config.num_layers / p] * p
        if self.plan.schedule == "dualpipe":
            cut = _cut(self.config, p)
            return [(down + up) / 2 for down, up in zip(cut, reversed(cut), strict=True)]
        counts = [0.0] * p
        for part, count in enumerate(_cut(self.config, min(p * v, self.config.num_layers))):
            back = self.plan.schedule in V_SHAPED and part // p % 2
            counts[p - 1 - part % p if back else part % p] += count
        return counts

    def bubble(self, weights: float = 1 / 3) -> float:
        """Idle time of a pipeline in units of 1F1B's; W takes the share `weights` of F + I + W.

        naive leaves M: its ranks compute one after the other, for each microbatch anew. With v
        stages per rank the ends are idle for one stage, and M < p microbatches come round too soon
        to fill the time between two stages of a rank. zb_h1 fills (p-1) W of it, and as much again
        from p microbatches on. Schedules in the memory of zb_h2 are found by a search, and those
        published had no bubble (Qi et al. 2023, arXiv 2401.10241, table 1); with fewer than 2p - 1
        microbatches they have some. What `FILLED` schedules leave is simulated.
        """
        p, m, v, name = self.plan.pp, self.plan.microbatches, self.chunks, self.plan.schedule
        if p == 1:
            return 0.0
        if name == "naive":
            return m
        if name == "zb_h1":
            return 1 - weights * (1 + min(1, (m - 1) / (p - 1)))
        if name == "zb_h2":
            return (1 - weights) * max(0, 1 - (m - 1) / (2 * p - 2))
        if name in FILLED:
            few = min(m, 2 * p + m % p)  # after 2 p microbatches all goes on as before
            paired = name in PAIRED and self.plan.dispatch == "paired"
            none, third = _idle(name, p, few, v if name in LOOPED else None, paired)
            return max(0.0, none + 3 * weights * (third - none))
        return (1 + (v - 1) * max(0, p - m) / (p - 1)) / v

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Return whether a rank of the pipeline has the embedding, and the head."""
        first, last = stage == 0, stage == self.plan.pp - 1
        if self.plan.schedule == "dualpipe":  # the model twice, once the other way round
            return first or last, first or last
        return first, first if self.plan.schedule in V_SHAPED else last

    def spread(self, inner: int, size: int) -> int:
        """Return on how many nodes `size` ranks lie of which neighbours are `inner` ranks apart."""
        return math.ceil(size / max(1, self.machine.gpus // inner))

    def collective(self, verb: str, num_bytes: float, inner: int, size: int) -> float:
        """Return the seconds of a collective of the ranks that `spread` describes."""
        nodes = self.spread(inner, size)
        return self.machine.seconds_of_collective(verb, num_bytes, size, nodes)


@cache
def _idle(name: str, p: int, m: int, v: int | None, paired: bool) -> tuple[float, float]:
    """Return `Job.bubble` of a schedule on paper, where W takes nothing, and where F = I = W.

    Between the two it is a line. Of each rank, the time from its first action to its last counts.
    """
    try:
        schedule = make(name, p, m, v)
    except ValueError:  # there is none: `Plan.problem` says why
        return 1.0, 1.0
    found = []
    for weights in (0.0, 1 / 3):
        half = (1 - weights) / 2
        costs = simulate.Costs(half, half, weights).per_rank(schedule)
        starts, ends = [math.inf] * p, [0.0] * p
        for _, rank, start, end in simulate.events(schedule, costs, paired):
            starts[rank], ends[rank] = min(starts[rank], start), max(ends[rank], end)
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        found.append((longest - m) / (p - 1))
    return found[0], found[1]


@cache
def _kinds(config: LlamaConfig) -> list[tuple[float, LlamaConfig]]:
    moe, count = config.moe, config.num_layers
    sparse = 0 if moe is None else sum(map(moe.is_sparse, range(count))) / count
    found = [(1 - sparse, replace(config, moe=None))] if sparse < 1 else []
    if sparse:
        found.append((sparse, replace(config, moe=replace(moe, first_dense=0, every=1))))
    return found


@cache
def _cut(config: LlamaConfig, parts: int) -> tuple[int, ...]:
    """Return the layers of each stage, for the least time of the slowest: the last has the head.

    As `stages.balance`, of layers that are alike: hundreds of plans want another cut each.
    """
    if parts == 1:
        return (config.num_layers,)
    *_, layer, head = stages.estimate_costs(config)

    def slowest(last: int) -> tuple[float, int]:
        return max(-(-(config.num_layers - last) // (parts - 1)), last + head / layer), -last

    last = min(range(1, config.num_layers - parts + 2), key=slowest)
    each, more = divmod(config.num_layers - last, parts - 1)
    # Early stages hold more microbatches: fewer layers there.
    return (*([each] * (parts - 1 - more)), *([each + 1] * more), last)
