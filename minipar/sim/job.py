"""A plan for a model on a machine, and the sizes that follow: which rank computes how much of what.

`cost.py` turns a job into seconds, `footprint.py` into bytes; both read the sizes from here.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from minipar.model.llama import LlamaConfig
from minipar.parallel.pipeline import stages
from minipar.parallel.pipeline.schedules import LOOPED
from minipar.parallel.plan import Plan
from minipar.sim.hardware import Machine, Software

V_SHAPED = ("zb_v", "dualpipe", "dualpipe_v")
"""Schedules in which the first rank also has the last stage."""


class Parameters(NamedTuple):
    """Parameters that a rank has before ZeRO shards them; a layer is the mean of all layers."""

    layer: float
    experts: float  # of the layer's, numbers of routed experts,
    shared: float  # and numbers of shared experts
    table: float  # the embedding, or the head


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

    # ------------------------------------------------------------------ tokens
    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a rank."""
        return self.microbatch * self.seq_len / self.plan.cp

    @property
    def dp(self) -> int:
        """Ranks with sequences of their own: those of dp and of ep."""
        return self.plan.dp * self.plan.ep

    @property
    def group(self) -> int:
        """Ranks that hold the same parameters, but for experts."""
        return self.dp * self.plan.cp

    @property
    def bucket(self) -> float:
        """Gradients in one collective of data parallelism, at most."""
        return max(self.software.bucket, self.software.bucket_dp * self.group)

    @property
    def tokens_of_step(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.dp * self.plan.microbatches * self.microbatch * self.seq_len

    def ideal(self, causal: bool) -> float:
        """Return the seconds of a step at the peak, with the causal half of attention or all."""
        c = self.config
        flops = c.flops_per_token(self.seq_len, causal)
        if not self.gated:  # two matrices of three
            layers = (c.layer_parts(n, active=True) for n in range(c.num_layers))
            flops -= 2 * sum(parts["mlp"] for parts in layers)
        peak = self.machine.device.peak[self.dtype]
        return flops * self.tokens_of_step / self.plan.num_ranks / peak

    @property
    def wide(self) -> str:
        """The dtype outside of a layer's products; only these may have 8 bits or fewer."""
        return "bf16" if self.dtype in ("fp8", "fp4") else self.dtype

    # ------------------------------------------------------------------ experts
    @property
    def experts_over(self) -> int:
        """Ranks that share the experts."""
        return max(self.ep, math.prod(getattr(self.plan, axis) for axis in self.plan.expert_axes))

    @property
    def experts_apart(self) -> int:
        """The distance between two ranks that share experts: tp, or 1 if tp is among them."""
        over_tp = self.plan.experts_over_tp or self.group % self.experts_over
        return 1 if over_tp else self.plan.tp

    @property
    def experts_copies(self) -> int:
        """Ranks that hold the same experts and different sequences."""
        return max(1, self.group * self.plan.tp // self.experts_apart // self.experts_over)

    @property
    def experts_cut(self) -> int:
        """Parts into which tensor parallelism cuts an expert; 1: ranks have whole experts."""
        return self.plan.tp if self.plan.expert_tensor_parallel else 1

    @cached_property
    def kinds(self) -> list[tuple[float, "Job"]]:
        """Shares of the layers with and without experts, each with a job of such layers alone."""
        return [(share, replace(self, config=config)) for share, config in _kinds(self.config)]

    def mean(self, numbers_of: Callable[["Job"], dict[str, float]]) -> dict[str, float]:
        """Return the mean over all layers, with experts and without, of a layer's numbers."""
        total: dict[str, float] = defaultdict(float)
        for share, kind in self.kinds:
            for part, number in numbers_of(kind).items():
                total[part] += share * number
        return dict(total)

    # ------------------------------------------------------------------ parameters
    @cached_property
    def parameters(self) -> Parameters:
        """Parameters of a rank before ZeRO."""
        found = self.mean(_layer_parameters)
        table = self.config.vocab_size * self.config.hidden_size / self.plan.tp
        return Parameters(sum(found.values()), found["experts"], found["shared"], table)

    def shard(self, numbers: float, experts: float) -> float:
        """Return how many of a rank's `numbers` ZeRO leaves it; `experts` of them are experts'."""
        return (numbers - experts) / self.group + experts / self.experts_copies

    # ------------------------------------------------------------------ the pipeline
    @property
    def chunks(self) -> int:
        """Stages of a rank of the pipeline."""
        default = 2 if self.plan.schedule in (*LOOPED, *V_SHAPED) else 1
        return self.plan.stages_per_rank or default

    @cached_property
    def layers(self) -> list[float]:
        """Layers that a microbatch passes on each rank of the pipeline.

        For dualpipe this is a mean: it has two copies of the model, each for half the microbatches.
        """
        p, v, greedy = self.plan.pp, self.chunks, bool(self.software.greedy)
        if self.plan.schedule == "dualpipe":
            cut = _cut(self.config, p, greedy)
            return [(down + up) / 2 for down, up in zip(cut, reversed(cut), strict=True)]
        counts = [0.0] * p
        for part, count in enumerate(_cut(self.config, min(p * v, self.config.num_layers), greedy)):
            back = self.plan.schedule in V_SHAPED and part // p % 2
            counts[p - 1 - part % p if back else part % p] += count
        return counts

    def numbers(self, stage: int) -> tuple[float, float]:
        """Return the parameters of a rank of the pipeline, and how many of them are experts'."""
        sizes, copies = self.parameters, 2 if self.plan.schedule == "dualpipe" else 1
        layers = copies * self.layers[stage]
        # A tied table counts once.
        tables = sum(self.tables(stage)) - (self.plan.pp == 1 and self.config.tie_embeddings)
        return layers * sizes.layer + tables * sizes.table, layers * sizes.experts

    def tables(self, stage: int) -> tuple[bool, bool]:
        """Return whether a rank of the pipeline has the embedding, and the head."""
        first, last = stage == 0, stage == self.plan.pp - 1
        if self.plan.schedule == "dualpipe":  # the model twice, once the other way round
            return first or last, first or last
        return first, first if self.plan.schedule in V_SHAPED else last

    def bubble(self, weights: float = 1 / 3) -> float:
        """Return the idle time of a pipeline in units of 1F1B's, (p - 1) (F + I + W).

        Weight gradients take the share `weights` of F + I + W; zero-bubble schedules fill idle time
        with them. zb_h1 fills (p-1) W, and as much again from p microbatches on (Qi et al. 2023,
        arXiv 2401.10241, table 1); DualPipe's (p/2 - 1)(F&B + B - 3W) is as much (DeepSeek-V3,
        arXiv 2412.19437, table 2). The published schedules with zb_h2's memory have no bubble from
        2p - 1 microbatches on. naive leaves M: its ranks compute one after the other. With v stages
        per rank, ranks are idle for one stage at either end. M < p microbatches are too few to fill
        the time between two stages of a rank.
        """
        p, m, v, name = self.plan.pp, self.plan.microbatches, self.chunks, self.plan.schedule
        if p == 1:
            return 0.0
        if name == "naive":
            return m
        if name == "zb_h2":
            return (1 - weights) * max(0, 1 - (m - 1) / (2 * p - 2))
        filled = weights * (1 + min(1, (m - 1) / (p - 1)))
        if name == "zb_h1" or name in V_SHAPED:
            return 1 - filled
        looped = (1 + (v - 1) * max(0, p - m) / (p - 1)) / v
        return looped * (1 - filled) if name == "interleaved_zb" else looped

    # ------------------------------------------------------------------ nodes
    def spread(self, inner: int, size: int) -> int:
        """Return on how many nodes `size` ranks lie, at most, if neighbours are `inner` apart."""
        gpus, ranks, block = self.machine.gpus, self.plan.num_ranks, inner * size
        if ranks <= gpus or gpus % block == 0:
            return 1
        if inner >= gpus:  # each is on a node of its own
            return size
        # After lcm(gpus, block) ranks, the places of groups on nodes repeat.
        groups = range(0, min(ranks, math.lcm(gpus, block)), block)
        starts = (a + b for a, b in itertools.product(groups, range(inner)))
        return max((start + block - inner) // gpus - start // gpus for start in starts) + 1

    def collective(self, verb: str, num_bytes: float, inner: int, size: int) -> float:
        """Return the seconds of a collective of the ranks that `spread` describes."""
        nodes = self.spread(inner, size)
        return self.machine.seconds_of_collective(verb, num_bytes, size, nodes)


def _layer_parameters(job: Job) -> dict[str, float]:
    c, moe, matrices = job.config, job.config.moe, 2 + job.gated
    parts, found = c.layer_parts(), {"experts": 0.0, "shared": 0.0}
    mlp = parts["mlp"] * matrices / 3
    if moe is not None:
        mlp = moe.num_experts * c.hidden_size  # the router
        one = matrices * moe.expert_size * c.hidden_size / job.experts_cut
        found["experts"] = moe.num_experts * one / job.experts_over
        found["shared"] = moe.num_shared * one
    return found | {"own": (parts["attention"] + mlp + parts["norm"]) / job.plan.tp}


@cache
def _kinds(config: LlamaConfig) -> list[tuple[float, LlamaConfig]]:
    moe, count = config.moe, config.num_layers
    if moe is None:
        return [(1.0, config)]
    sparse = sum(map(moe.is_sparse, range(count))) / count
    found = [(1 - sparse, replace(config, moe=None))] if sparse < 1 else []
    if sparse:
        found.append((sparse, replace(config, moe=replace(moe, first_dense=0, every=1))))
    return found


@cache
def _cut(config: LlamaConfig, parts: int, greedy: bool = False) -> tuple[int, ...]:
    """Return the layers of each stage: by `stages.balance`, which makes the slowest one fastest.

    `greedy`: a stage takes layers until it exceeds its share of the cost, as nanotron does.
    """
    costs = stages.estimate_costs(config)
    if not greedy:
        return stages.balance(costs, parts)
    counts, cost = [0] * parts, 0.0
    stage = 0
    for layer in costs[1:-1]:
        counts[stage] += 1
        cost += layer
        stage += cost > sum(costs) / parts * (stage + 1)
    return tuple(counts)
