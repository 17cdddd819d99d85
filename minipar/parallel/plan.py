"""A plan: which strategies on which mesh; what cannot be, and what comes of it, known beforehand.

Every strategy works along an axis of its own, so a plan is little more than a size for each axis.
But not all go together: `Plan.problem` names the rule that is broken, `Plan.nearest` the plan that
changes least and works. `Plan.explain` says of every parameter who has which part of it, over which
axes its gradient is summed, and how many bytes that sends; compose.py does it.

Use::

    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,microbatches=4")
    plan.check(config)  # ValueError: why not, and how
    print(plan.explain(config))

Proved by tests/parallel/test_compose.py: what is said, beside what ranks do.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

import torch

from minipar.comm.mesh import MOST_RANKS, Axis, whole_number
from minipar.model.llama import LlamaConfig
from minipar.parallel import expert, tensor
from minipar.parallel.compression.feedback import COMPRESSORS
from minipar.parallel.explain import Explanation, rows_of
from minipar.parallel.pipeline import runtime, schedules
from minipar.parallel.pipeline.actions import Schedule

MESH = ("pp", "dp", "cp", "ep", "tp")  # from what needs the least of a link to what is in a node
EACH_NUMBER_ALONE = ("none", "fp16", "bf16")
"""Compression that rounds a number without a look at its neighbours in the bucket."""
MOST_MICROBATCHES = 10_000  # of a plan: a schedule is a list of all that is done with them


# ---------------------------------------------------------------------- 1. the plan
@dataclass(frozen=True)
class Plan:
    """How a Llama is trained on several ranks: the size of each axis, and what happens along it."""

    dp: int = 1
    """Ranks with sequences of their own."""
    tp: int = 1
    """Ranks among which every matrix is cut."""
    pp: int = 1
    """Ranks with layers of their own."""
    cp: int = 1
    """Ranks among which every sequence is cut."""
    ep: int = 1
    """Ranks with experts, and sequences, of their own."""
    zero: Literal[0, 1, 2, 3] = 0
    """Cut over dp, cp, ep: nothing (ddp), optimizer state, also gradients, also weights (fsdp)."""
    sequence_parallel: bool = False
    """Over tp, cut norms and residual stream along the tokens."""
    expert_tensor_parallel: bool = False
    """Over tp, cut each expert, too, instead of leaving all of a rank's whole."""
    tp_overlap: bool = False
    """Over tp, send pieces of products while others are computed."""
    context: Literal["ring", "gather", "ulysses"] = "ring"
    """Over cp, how attention sees all tokens."""
    dispatch: expert.Dispatch = "all_to_all"
    """Over ep, how tokens meet their experts."""
    expert_nodes: int = 1
    """Over ep, of dispatch=hierarchical: nodes that these ranks are on, one after the other."""
    experts_over_cp: bool = False
    """Ranks of cp have experts of their own, too: cp times ep of them share the experts."""
    experts_over_tp: bool = False
    """With sequence_parallel, so have ranks of tp: each sends the tokens of its part."""
    schedule: str = "1f1b"
    """Over pp, who runs forward and backward of which microbatch when: see `schedules.py`."""
    stages_per_rank: int = 0
    """Over pp, of schedules that leave it open; 0: as many as the schedule has."""
    microbatches: int = 1
    """Per step, of every rank of dp."""
    compression: str = "none"
    """Over dp and cp, how gradients are sent: see `compression/`."""
    precision: Literal["float32", "bf16", "fp16", "autocast-bf16"] = "float32"
    """Of matrix products. bf16: weights and activations, too, beside master weights that learn; the
    others cast by autocast, which leaves weights and what is between products as they are."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in backward."""

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read "dp=2, tp=2, zero=1, sequence_parallel"; raise `ValueError` where it is not that."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = part.partition("=")
            name = name.replace("-", "_")
            if name not in kinds or name in values:
                raise ValueError(f"plan {text!r}: {part!r} is not one of {', '.join(kinds)}, once")
            if kinds[name] is bool and value.lower() in ("", "true", "false"):
                values[name] = value.lower() != "false"
            elif kinds[name] is int and (number := whole_number(value)) is not None:
                values[name] = number
            elif kinds[name] is str and equals:
                values[name] = value
            else:
                like = {bool: "true", int: "2", str: getattr(cls, name)}[kinds[name]]
                raise ValueError(f"plan {text!r}: cannot read {part!r}; try {name}={like}")
        return cls(**values)

    def __str__(self) -> str:
        """What `parse` reads: all that is not as usual."""
        given = {n: v for n, v in asdict(self).items() if v != getattr(Plan, n)} or {"dp": 1}
        return ",".join(
            name if value is True else f"{name}={value}" for name, value in given.items()
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(getattr(self, axis) for axis in MESH)

    def mesh_sizes(self) -> dict[str, int]:
        """Return the axes of a `Mesh` with more than one rank; those of tp are neighbours."""
        sizes = {axis: getattr(self, axis) for axis in MESH}
        # With ep there is a dp, so that sums over "dp+ep" are told from what goes to experts.
        seen = {a: n for a, n in sizes.items() if n != 1 or (a == "dp" and self.ep > 1)}
        return seen or {"dp": 1}

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different tokens: over them, gradients are summed."""
        return tuple(a for a in ("dp", "cp", "ep") if a == "dp" or getattr(self, a) > 1)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes whose ranks share the experts: each has some of them, whole or cut."""
        return ("cp",) * self.experts_over_cp + ("ep",) + ("tp",) * self.experts_over_tp

    @property
    def autocast(self) -> str:
        """The precision that is left to autocast: weights of bf16 need none."""
        return "float32" if self.precision == "bf16" else self.precision

    def make_schedule(self) -> Schedule:
        """The schedule of the pipeline. Raises `ValueError` where there is none."""
        return _schedule(self.schedule, self.pp, self.microbatches, self.stages_per_rank or None)

    def axis(self, *names: str) -> Axis:
        """The joint axis of `names` on the plan's mesh, as its first rank sees it: on paper."""
        sizes = self.mesh_sizes()
        names = tuple(name for name in sizes if name in names)
        size = math.prod(sizes[name] for name in names)
        return Axis("+".join(names) or "none", 0, size, tuple(range(size)))

    # ------------------------------------------------------------------ what cannot be
    def check(self, config: LlamaConfig) -> None:
        """Raise `ValueError` unless a Llama of this shape can be trained so: why not, and how."""
        problem = self.problem(config)
        if problem is not None:
            raise ValueError(
                f"plan {self}: {problem}. The nearest plan that works is {self.nearest(config)}"
            )

    def problem(self, config: LlamaConfig) -> str | None:
        """Say which rule is broken, with its numbers; None if all is well."""
        try:
            return next(self._problems(config), None)
        except ValueError as error:  # of a part that knows its own limits
            return str(error)

    def _problems(self, config: LlamaConfig) -> Iterator[str]:
        for name in (*MESH, "microbatches"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} must be 1 or more"
        if self.num_ranks > MOST_RANKS:
            yield f"{self.num_ranks:,} ranks are more than the {MOST_RANKS:,} of the largest plan"
        if self.microbatches > MOST_MICROBATCHES:
            yield f"microbatches={self.microbatches} must be at most {MOST_MICROBATCHES:,}"
        for field in fields(self):
            allowed, value = get_args(field.type), getattr(self, field.name)
            if allowed and value not in allowed:
                yield f"{field.name}={value} is not one of {', '.join(map(str, allowed))}"
        if self.compression not in ("none", *COMPRESSORS):
            yield f"compression={self.compression} is not one of none, {', '.join(COMPRESSORS)}"
        yield from self._problems_of_axes(config)
        yield from self._problems_of_gradients(config)

    def _problems_of_axes(self, config: LlamaConfig) -> Iterator[str]:
        """Each axis for itself."""
        tensor.check_sizes(config, self.tp)
        if self.sequence_parallel and self.tp == 1:
            yield "sequence_parallel cuts what tensor parallelism leaves whole; tp=1 cuts nothing"
        if self.tp_overlap and not self.sequence_parallel:
            yield "tp_overlap interleaves the collectives of sequence_parallel; set both"
        if self.context != "ring" and self.cp == 1:
            yield f"context={self.context} says how ranks of cp share keys, and there is one: cp=1"
        if self.context == "ulysses" and config.num_heads // self.tp % self.cp:
            yield (
                f"ulysses hands whole heads around: cp={self.cp} does not divide the "
                f"num_heads={config.num_heads} / tp={self.tp} of a rank"
            )
        yield from self._problems_of_experts(config)
        if self.pp == 1:
            if self.schedule != "1f1b" or self.stages_per_rank:
                yield f"schedule={self.schedule} is for a pipeline of several ranks, and pp=1"
            return
        # No schedule has fewer stages, and to list what very many ranks do would take long.
        num_stages = self.pp * max(1, self.stages_per_rank)
        if num_stages <= config.num_layers:
            num_stages = self.make_schedule().num_stages
        if num_stages > config.num_layers:
            yield (
                f"schedule={self.schedule} on pp={self.pp} cuts the model into {num_stages} "
                f"stages, each with a layer, and there are num_layers={config.num_layers}"
            )

    def _problems_of_experts(self, config: LlamaConfig) -> Iterator[str]:
        if self.experts_over_cp and self.cp == 1:
            yield "experts_over_cp spreads experts over ranks that share sequences; cp=1 has none"
        if self.experts_over_tp and not (self.sequence_parallel and self.tp > 1):
            yield (
                f"experts_over_tp spreads experts over ranks that hold different tokens; those of "
                f"tp={self.tp} do with sequence_parallel, from tp=2 on"
            )
        if self.experts_over_tp and self.expert_tensor_parallel:
            yield "experts_over_tp and expert_tensor_parallel are two ways to share experts over tp"
        name = " x ".join(axis for axis in ("ep", "cp", "tp") if axis in self.expert_axes)
        n = math.prod(getattr(self, axis) for axis in self.expert_axes)
        if not config.has_experts:
            if n > 1:
                none = "none (moe=None)" if config.moe is None else "none in any layer"
                yield f"{name}={n} spreads experts, and this Llama has {none}"
        else:
            expert.check_sizes(config.moe, n, name)
            pieces = self.cp * (self.tp if self.sequence_parallel else 1)
            expert.check_capacity(config.moe, self.dispatch, pieces)
        if self.expert_tensor_parallel:
            tensor.check_experts(config.moe, self.tp)
            if self.tp == 1:
                yield "expert_tensor_parallel cuts experts over tp, and tp=1 cuts nothing"
        if self.dispatch != "all_to_all" and n == 1:
            yield f"dispatch={self.dispatch} says how tokens travel to experts; with ep=1 none do"
        expert.check_nodes(self.expert_nodes, n, name)
        if (self.dispatch == "hierarchical") != (self.expert_nodes > 1):
            yield (
                f"dispatch={self.dispatch} with expert_nodes={self.expert_nodes}: hierarchical "
                f"sends one copy to each of several nodes, and no other dispatch asks for them"
            )
        if self.dispatch == "paired":
            if self.pp == 1:
                yield (
                    "dispatch=paired computes one microbatch while tokens of another travel, in a "
                    "pipeline; with pp=1 use dispatch=halves, or take pp=2,schedule=dualpipe_v"
                )
            schedules.check_pairs(self.make_schedule())
            if self.zero == 3:
                yield f"{runtime.PAIRED_FSDP} (zero=3, dispatch=paired); use zero=2"
        if config.moe is not None and self.pp > 1 and self.make_schedule().copies > 1:
            yield (
                f"schedule={self.schedule} has two copies of every router, and each would count "
                f"its own tokens alone for the balance"
            )

    def _problems_of_gradients(self, config: LlamaConfig) -> Iterator[str]:
        """What does not go together, because a gradient would be wrong without a word."""
        is_tp_sum = self.sequence_parallel or self.tp > config.num_kv_heads or config.qk_norm
        if self.zero and is_tp_sum and config.vocab_size % self.tp:
            yield (
                f"zero={self.zero} cuts all parameters of a rank in a row, and tensor parallelism "
                f"adds up gradients piece by piece; but with vocab_size={config.vocab_size}, which "
                f"tp={self.tp} does not divide, pieces begin elsewhere on every rank; pad the "
                f"vocabulary to {-(-config.vocab_size // self.tp) * self.tp} words"
            )
        shares = self._shares(config)
        if self.zero == 3 and shares:
            yield (
                f"zero=3 reduces the gradients of one rank of pp at a time, but with "
                f"schedule={self.schedule}, tie_embeddings={config.tie_embeddings} the same "
                f"weights are on several, to be summed before"
            )
        if self.compression == "none":
            return
        if self.zero:
            yield (
                f"compression={self.compression} is for the buckets of ddp, and zero={self.zero} "
                f"has others"
            )
        if self.dp == 1 and 1 in (self.cp, self.ep) and self.cp * self.ep > 1:
            name = "cp" if self.cp > 1 else "ep"
            yield (
                f"compression={self.compression} calls from a thread of its own, and over {name} "
                f"alone, dp=1, the model's calls are on the same ranks: these would launch in two "
                f"orders; use dp=2 or more"
            )
        if self.compression not in EACH_NUMBER_ALONE and (self.tp > 1 or shares):
            where = f"tp={self.tp}" if self.tp > 1 else f"pp={self.pp}"
            yield (
                f"compression={self.compression} rounds a number by its neighbours in a bucket; "
                f"ranks of {where} hold copies of the same parameters beside different ones, and "
                f"copies would drift apart"
            )
        if self.precision == "fp16" and COMPRESSORS[self.compression]().feedback:
            yield (
                f"compression={self.compression} adds to a step what the last one left out, and "
                f"precision=fp16 scales the two by factors that differ"
            )

    def _shares(self, config: LlamaConfig) -> bool:
        """Whether several ranks of the pipeline hold the same parameter."""
        if self.pp == 1:
            return False
        schedule = self.make_schedule()
        ends = schedule.rank_of[0], schedule.rank_of[schedule.num_stages - 1]
        return schedule.copies > 1 or (config.tie_embeddings and ends[0] != ends[1])

    def nearest(self, config: LlamaConfig) -> "Plan":
        """The plan for as many ranks that works and changes the least; options before axes.

        Of more ranks than there can be, the largest of dp alone.
        """
        if self.num_ranks > MOST_RANKS:
            return Plan(dp=MOST_RANKS)
        changes = []
        for field in fields(self):
            if field.name in MESH:
                continue
            own = getattr(self, field.name)
            values = get_args(field.type) or (field.default,)
            if field.name == "schedule":
                values = tuple(schedules.SCHEDULES)
            if isinstance(own, int):
                values = sorted(values, key=lambda value, own=own: abs(value - own))
            changes.append([{field.name: value} for value in values if value != own])
        changes.append(sorted(meshes(max(1, self.num_ranks)), key=self._distance))
        for count in range(1, 4):
            for kinds in itertools.combinations(changes, count):
                for chosen in itertools.product(*kinds):
                    plan = replace(self, **{k: v for change in chosen for k, v in change.items()})
                    if plan.problem(config) is None:
                        return plan
        return Plan(dp=max(1, self.num_ranks))

    def _distance(self, sizes: Mapping[str, int]) -> tuple[float, int]:
        """How far a mesh is from ours; of two that are as far, more of dp is nearer."""
        ratios = (n / max(1, getattr(self, axis)) for axis, n in sizes.items())
        return round(sum(abs(math.log(ratio)) for ratio in ratios), 6), -sizes["dp"]

    # ------------------------------------------------------------------ what comes of it
    def explain(self, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Explanation:
        """Say of every parameter who has which part of it, and where its gradient travels.

        Computed by the very code that cuts a model, on tensors without data. Raises `ValueError`
        for a plan that does not work.
        """
        self.check(config)
        return Explanation(self, tuple(rows_of(self, config, dtype)))


def meshes(num_ranks: int) -> Iterator[dict[str, int]]:
    """Every way to spread `num_ranks` over pp, dp, cp and tp."""

    def spread(left: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        small = [n for n in range(1, math.isqrt(left) + 1) if left % n == 0]
        for size in sorted({*small, *(left // n for n in small)}):
            for rest in spread(left // size, axes[1:]):
                yield {axes[0]: size, **rest}

    return spread(num_ranks, MESH)


@cache
def _schedule(name: str, p: int, m: int, v: int | None) -> Schedule:
    return schedules.make(name, p, m, v)
