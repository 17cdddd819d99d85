"""Explain a plan: which rank has which piece of each parameter, and what a step sends for it.

`explain` cuts a model without data (on the "meta" device) by the code that cuts a real model. So it
says what ranks do, and it starts no process. Under zero=3 a tied embedding that is a unit of its
own is reduced twice, for the embedding and for the head; the table counts it once.

Use::

    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,microbatches=4")
    print(explain(plan, config))

Proved by tests/parallel/test_compose.py: what `explain` says, beside what ranks hold and send.
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import nn

from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import expert, matrices, tensor
from minipar.parallel.base.shards import axes_of, copies_axis, region_of
from minipar.parallel.compose import Parts
from minipar.parallel.pipeline import runtime, stages
from minipar.parallel.plan import Plan
from minipar.text import aligned


# ---------------------------------------------------------------------- 1. what is said
@dataclass(frozen=True)
class Row:
    """One parameter: what a rank has of it, and where its gradient travels."""

    name: str
    full_shape: tuple[int, ...]
    shape: tuple[int, ...]  # on the first rank of tp, before dp and cp cut it
    stage_ranks: tuple[int, ...]  # the ranks of pp that have it
    cut_over: tuple[str, ...]  # axes on which ranks have different pieces of it, or none
    summed: dict[str, str]  # axis -> the collective that sums its gradient there
    sent: dict[str, int]  # axis -> bytes of its gradient that a rank sends per step
    num_bytes: dict[str, int]  # "weights", "gradients", "optimizer": on a rank between two steps


@dataclass(frozen=True)
class Explanation:
    """The rows of a plan. Prints as a table, in which equal layers share a line."""

    plan: Plan
    rows: tuple[Row, ...]

    def bytes_on(self, stage_rank: int = 0) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state on a rank of this pp rank."""
        rows = [row for row in self.rows if stage_rank in row.stage_ranks]
        return {kind: sum(row.num_bytes[kind] for row in rows) for kind in rows[0].num_bytes}

    def sent_by(self, stage_rank: int = 0) -> dict[str, int]:
        """Return the bytes of gradients that a rank of this pp rank sends per step, by axis."""
        rows = [row for row in self.rows if stage_rank in row.stage_ranks]
        axes = dict.fromkeys(axis for row in rows for axis in row.sent)
        return {axis: sum(row.sent.get(axis, 0) for row in rows) for axis in axes}

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], list[str]] = {}  # cells that layers share -> their numbers
        for row in self.rows:
            before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", row.name).groups()
            shapes = ("x".join(map(str, shape)) for shape in (row.full_shape, row.shape))
            summed = [f"{axis} ({verb})" for axis, verb in row.summed.items()]
            sent = [f"{axis} {num_bytes:,}" for axis, num_bytes in row.sent.items()]
            lists = (map(str, row.stage_ranks), row.cut_over, summed, sent)
            cells = (before, after, *shapes, *(", ".join(cell) or "-" for cell in lists))
            alike.setdefault(cells, []).append(number)
        lines = [("parameter", "shape", "on a rank", "pp", "cut over", "summed over", "bytes sent")]
        for (before, after, *cells), numbers in alike.items():
            lines.append((f"{before}{_runs(numbers)}{after}", *cells))
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.plan.mesh_sizes().items())
        title = f"{self.plan}: {self.plan.num_ranks} ranks, {sizes}"
        return "\n".join([title, *aligned(lines)])


def _runs(numbers: list[str]) -> str:
    """Return "0-2" for "0", "1", "2", but "0,2,5" for numbers with gaps."""
    first, last = numbers[0], numbers[-1]
    is_run = len(numbers) > 1 and int(last) - int(first) + 1 == len(numbers)
    return f"{first}-{last}" if is_run else ",".join(numbers)


# ---------------------------------------------------------------------- 2. how it is found
def explain(plan: Plan, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Explanation:
    """Say for every parameter which rank has which part, and where its gradient travels.

    Raises `ValueError` for a plan that does not work.
    """
    plan.check(config)
    found: dict[str, Row] = {}
    for stage_rank in range(plan.pp):
        with torch.device("meta"):
            model, whole = Llama(config).to(dtype), Llama(config)
        parts = _cut(model, plan, stage_rank)
        for name, p in model.named_parameters():
            if config.tie_embeddings and name == "lm_head.weight":
                name = "model.embed_tokens.weight"
            found.setdefault(name, _row(plan, parts, name, p))
    return Explanation(plan, tuple(found[name] for name, _ in whole.named_parameters()))


def _cut(model: Llama, plan: Plan, stage_rank: int) -> Parts:
    """Apply expert, tensor and pipeline parallelism to a model on "meta", as on one rank."""
    parts = Parts()
    if model.config.moe is not None:
        over = plan.expert_axes
        axis, copies = plan.axis(*over), plan.axis(*(a for a in plan.data_axes if a not in over))
        parts.expert = expert.ExpertParallel(model, axis, copies, plan.dispatch, plan.expert_nodes)
    if plan.tp > 1:
        border = matrices.Border(plan.axis("tp"), plan.sequence_parallel)
        parts.tensor = tensor.TensorParallel(
            model, border, plan.tp_overlap, plan.expert_tensor_parallel
        )
    if plan.pp > 1:
        axis = replace(plan.axis("pp"), rank=stage_rank)
        schedule = plan.make_schedule()
        cut = stages.balance(stages.estimate_costs(model.config), schedule.num_stages)
        parts.pipeline = runtime.Pipeline(model, axis, schedule, cut)
    return parts


def _row(plan: Plan, parts: Parts, name: str, p: nn.Parameter) -> Row:
    """Describe the parameter `p` on this rank."""
    copies, num_bytes = copies_axis(p, plan.axis(*plan.data_axes)), p.nbytes
    n, t = copies.size, plan.tp
    cut = [axis.name for axis in axes_of(p)]
    by_tensor, pipeline = parts.tensor, parts.pipeline
    stage_ranks = (0,) if pipeline is None else pipeline.twins.get(p, (pipeline.axis.rank,))
    summed, sent = {}, {}
    if n > 1:
        # ZeRO 2 and 3 reduce every microbatch: they keep no whole gradients.
        times = plan.microbatches if plan.zero > 1 else 1 if plan.zero else 2
        summed[copies.name] = "reduce-scatter" if plan.zero else "all-reduce"
        sent[copies.name] = times * num_bytes * (n - 1) // n
        if plan.zero == 3:
            cut.append(copies.name)
    if by_tensor is not None and name in (*by_tensor.summed, *by_tensor.copied):
        rows = by_tensor.model.config.num_kv_heads if name in by_tensor.copied else 1
        summed["tp"] = "all-reduce"
        sent["tp"] = 2 * rows * num_bytes * (t - 1) // t // (n if plan.zero else 1)
    if len(stage_ranks) > 1:
        summed["pp"] = "exchange"
        sent["pp"] = num_bytes * (len(stage_ranks) - 1)
    # Bytes of the whole, and the stage of ZeRO from which on each rank has 1/n.
    held = {"weights": (num_bytes, 3), "gradients": (num_bytes, 2), "optimizer": (2 * num_bytes, 1)}
    if plan.precision == "bf16" and plan.zero < 3:  # under 3 shards are the masters
        held |= {"weights": (2 * p.numel(), 3), "optimizer": (3 * num_bytes, 1)}
    state = {kind: own // (n if plan.zero >= stage else 1) for kind, (own, stage) in held.items()}
    full = region_of(p).shape
    return Row(name, full, tuple(p.shape), stage_ranks, tuple(cut), summed, sent, state)
