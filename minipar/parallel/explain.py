"""What comes of a plan: who has which piece of each parameter, and what a step sends for it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import expert, fsdp, matrices, tensor
from minipar.parallel.base.shards import axes_of, copies_axis, full_shape
from minipar.parallel.pipeline import runtime, simulate, stages
from minipar.text import aligned

if TYPE_CHECKING:
    from minipar.parallel.plan import Plan


@dataclass(frozen=True)
class Row:
    """One parameter: what a rank has of it, and where its gradient travels."""

    name: str
    full_shape: tuple[int, ...]
    shape: tuple[int, ...]  # on the first rank of tp, before dp and cp cut it
    stage_ranks: tuple[int, ...]  # the ranks of pp that have it
    cut_over: tuple[str, ...]  # axes over which the weight is cut, or of whose ranks few have it
    summed: dict[str, str]  # axis -> the collective that adds up its gradient there
    sent: dict[str, int]  # axis -> bytes of its gradient that a rank sends per step
    num_bytes: dict[str, int]  # "weights", "gradients", "optimizer": on a rank between two steps


@dataclass(frozen=True)
class Explanation:
    """What `Plan.explain` found; prints as a table, in which layers that are alike are one line."""

    plan: "Plan"
    rows: tuple[Row, ...]

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and sizes."""
        return self.plan.mesh_sizes()

    def bytes_on(self, stage_rank: int = 0) -> dict[str, int]:
        """Weights, gradients and optimizer state that the ranks of a place on pp hold."""
        rows = [row for row in self.rows if stage_rank in row.stage_ranks]
        return {kind: sum(row.num_bytes[kind] for row in rows) for kind in _STATE}

    def sent_by(self, stage_rank: int = 0) -> dict[str, int]:
        """Bytes of gradients along each axis that the ranks of a place on pp send per step."""
        rows = [row for row in self.rows if stage_rank in row.stage_ranks]
        axes = dict.fromkeys(axis for row in rows for axis in row.sent)
        return {axis: sum(row.sent.get(axis, 0) for row in rows) for axis in axes}

    def __str__(self) -> str:
        header = ("parameter", "shape", "on a rank", "pp", "cut over", "summed over", "bytes sent")
        alike: dict[tuple[str, ...], list[str]] = {}  # what layers have in common -> their numbers
        for row in self.rows:
            before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", row.name).groups()
            shapes = ("x".join(map(str, shape)) for shape in (row.full_shape, row.shape))
            summed = [f"{axis} ({verb})" for axis, verb in row.summed.items()]
            sent = [f"{axis} {num_bytes:,}" for axis, num_bytes in row.sent.items()]
            cells = (map(str, row.stage_ranks), row.cut_over, summed, sent)
            cells = (before, after, *shapes, *(", ".join(cell) or "-" for cell in cells))
            alike.setdefault(cells, []).append(number)
        lines = [header]
        for (before, after, *cells), numbers in alike.items():
            lines.append((f"{before}{_runs(numbers)}{after}", *cells))
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        lines = [f"{self.plan}: {self.plan.num_ranks} ranks, {sizes}", *aligned(lines)]
        precision = self.plan.precision.removeprefix("autocast-")
        if self.plan.precision == "bf16":
            where = "the shards" if self.plan.zero == 3 else "in the optimizer"
            lines.insert(1, f"{_WORKING}{where}")
        elif precision != "float32":
            lines.insert(1, _CAST.format(precision))
        return "\n".join(lines)


def _runs(numbers: list[str]) -> str:
    """ "0", "1", "2", "5" -> "0-2,5"."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


_STATE = ("weights", "gradients", "optimizer")
_CAST = "  autocast: matrix products in {}; weights and what is between products as they are"
_WORKING = (
    "  bf16: weights that compute, activations, what stages send; float32: gradients as they are "
    "summed, and master weights, "
)


def rows_of(plan: "Plan", config: LlamaConfig, dtype: torch.dtype) -> Iterator[Row]:
    found: dict[str, Row] = {}
    with torch.device("meta"):
        whole = Llama(config)
    is_unit = plan.tp == 1 and whole.model.embed_tokens in fsdp.find_blocks(whole)
    # Of a table that is embedding and head, each as a unit of fsdp, both reduce their gradient.
    is_twice = plan.zero == 3 and config.tie_embeddings and is_unit
    reduced_twice = "model.embed_tokens.weight" if is_twice else None
    for stage_rank in range(plan.pp):
        with torch.device("meta"):
            model = Llama(config).to(dtype)
        cut = _cut_without_values(model, plan, stage_rank)
        for name, p in model.named_parameters():
            if config.tie_embeddings and name == "lm_head.weight":
                name = "model.embed_tokens.weight"
            row = _row(plan, *cut, name, p)
            if name == reduced_twice:
                row = replace(row, sent={axis: 2 * sent for axis, sent in row.sent.items()})
            if name not in found:
                found[name] = row
    yield from (found[name] for name, _ in whole.named_parameters())


def _cut_without_values(
    model: Llama, plan: "Plan", stage_rank: int
) -> tuple[tensor.TensorParallel | None, runtime.Pipeline | None]:
    """Tensor and pipeline parallelism on a model on "meta", as on one of the ranks."""
    by_tensor = pipeline = None
    if model.config.moe is not None:
        over = plan.expert_axes
        axis, copies = plan.axis(*over), plan.axis(*(a for a in plan.data_axes if a not in over))
        expert.ExpertParallel(model, axis, copies, plan.dispatch, plan.expert_nodes, (axis,), None)
    if plan.tp > 1:
        border = matrices.Border(plan.axis("tp"), plan.sequence_parallel)
        by_tensor = tensor.TensorParallel(
            model, border, plan.tp_overlap, plan.expert_tensor_parallel
        )
    if plan.pp > 1:
        axis = replace(plan.axis("pp"), rank=stage_rank)
        schedule = simulate.lower(plan.make_schedule())
        cut = stages.balance(stages.estimate_costs(model.config), schedule.num_stages)
        pipeline = runtime.Pipeline(model, axis, schedule, cut)
    return by_tensor, pipeline


def _row(
    plan: "Plan",
    by_tensor: tensor.TensorParallel | None,
    pipeline: runtime.Pipeline | None,
    name: str,
    p: nn.Parameter,
) -> Row:
    copies, t, num_bytes = copies_axis(p, plan.axis(*plan.data_axes)), plan.tp, p.nbytes
    n, data = copies.size, copies.name
    cut = [axis.name for axis in axes_of(p)]
    stage_ranks = (0,) if pipeline is None else pipeline.twins.get(p, (pipeline.axis.rank,))
    summed, sent = {}, {}
    if n > 1:
        # ZeRO 2 and 3 reduce every microbatch: they keep no whole gradients.
        times = plan.microbatches if plan.zero > 1 else 1 if plan.zero else 2
        summed[data] = "reduce-scatter" if plan.zero else "all-reduce"
        sent[data] = times * num_bytes * (n - 1) // n
        if plan.zero == 3:
            cut.append(data)
    if by_tensor is not None and name in (*by_tensor.summed, *by_tensor.copied):
        rows = by_tensor.model.config.num_kv_heads if name in by_tensor.copied else 1
        summed["tp"] = "all-reduce"
        sent["tp"] = 2 * rows * num_bytes * (t - 1) // t // (n if plan.zero else 1)
    if len(stage_ranks) > 1:
        summed["pp"] = "exchange"
        sent["pp"] = num_bytes * (len(stage_ranks) - 1)
    held = {"weights": (num_bytes, 3), "gradients": (num_bytes, 2), "optimizer": (2 * num_bytes, 1)}
    if plan.precision == "bf16" and plan.zero < 3:  # under 3 shards are the masters
        held |= {"weights": (2 * p.numel(), 3), "optimizer": (3 * num_bytes, 1)}
    state = {kind: own // (n if plan.zero >= stage else 1) for kind, (own, stage) in held.items()}
    full = tuple(full_shape(p))
    return Row(name, full, tuple(p.shape), stage_ranks, tuple(cut), summed, sent, state)
