"""A plan: how many ranks each axis has, and which strategy works along it.

Every strategy works along an axis of its own, so a plan is little more than one size per axis.
Some choices do not go together: `Plan.check` names the rule that a plan breaks. compose.py applies
a plan. explain.py says which rank has which part of each parameter, and which bytes a step sends.

Proved by tests/parallel/test_compose.py and tests/law/test_plans.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from minipar.comm.mesh import Axis, whole_number
from minipar.model.llama import LlamaConfig
from minipar.parallel import expert, matrices
from minipar.parallel.base.shards import check_divides
from minipar.parallel.pipeline import schedules
from minipar.parallel.pipeline.actions import Schedule

MESH = ("pp", "dp", "cp", "ep", "tp")
"""The axes, outermost first: pp sends least and may cross nodes; ranks of tp are neighbours."""
OPTIONS = {  # by axis: options that need several ranks of the axis
    "tp": ("sequence_parallel", "expert_tensor_parallel", "experts_over_tp"),
    "cp": ("context",),
    "pp": ("schedule", "stages_per_rank"),
}


# ---------------------------------------------------------------------- 1. the plan
@dataclass(frozen=True)
class Plan:
    """How several ranks train one Llama: the size of each axis, and the strategy along it."""

    dp: int = 1
    """Data parallelism: this many groups of ranks train on different sequences."""
    tp: int = 1
    """Tensor parallelism: this many ranks share every matrix."""
    pp: int = 1
    """Pipeline parallelism: this many ranks share the layers."""
    cp: int = 1
    """Context parallelism: this many ranks share every sequence."""
    ep: int = 1
    """Expert parallelism: this many ranks share the experts; each has its own sequences."""
    zero: Literal[0, 1, 2, 3] = 0
    """Shards over dp, cp and ep. 0: nothing (ddp); 1: optimizer state; 2: gradients, too;
    3: weights, too (fsdp)."""
    sequence_parallel: bool = False
    """Between the matrices of tp, shard activations along the tokens: norms, residual stream."""
    expert_tensor_parallel: bool = False
    """Cut each expert over tp. Otherwise every rank of tp has its experts whole."""
    tp_overlap: bool = False
    """With sequence_parallel, send one piece of a matmul while another is computed."""
    context: Literal["ring", "gather", "ulysses"] = "ring"
    """How attention sees all tokens over cp: pass keys on, gather keys, or exchange heads."""
    dispatch: expert.Dispatch = "all_to_all"
    """How tokens travel to their experts over ep: see expert.py."""
    expert_nodes: int = 1
    """With dispatch=hierarchical, the number of nodes that the ranks of ep are on."""
    experts_over_tp: bool = False
    """With sequence_parallel, ranks of tp have different experts, too, for their own tokens."""
    schedule: str = "1f1b"
    """The order of forward and backward on ranks of pp: see pipeline/schedules.py."""
    stages_per_rank: int = 0
    """Stages on each rank of pp, where the schedule leaves a choice; 0: its default."""
    microbatches: int = 1
    """Microbatches per step, on every rank of dp."""
    precision: Literal["float32", "bf16", "fp16", "autocast-bf16"] = "float32"
    """The numbers of matmuls. bf16: weights and activations, too; the optimizer steps float32
    master weights. fp16, autocast-bf16: autocast casts inputs of matmuls, and weights stay."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations backward computes again."""

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read a text such as "dp=2, tp=2, zero=1, sequence_parallel".

        Raises `ValueError` for a word or a value that no plan has.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        read = {bool: {"": True, "true": True, "false": False}.get, int: whole_number, str: str}
        values: dict[str, Any] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            name = name.replace("-", "_")
            if name not in kinds or name in values:
                raise ValueError(f"plan {text!r}: {part!r} is not one of {', '.join(kinds)}, once")
            values[name] = read[kinds[name]](value.lower())
            if values[name] in (None, ""):
                usual = f"{name}={getattr(cls, name)}"
                raise ValueError(f"plan {text!r}: cannot read {part!r}; the default is {usual}")
        return cls(**values)

    def __str__(self) -> str:
        """Return the text that `parse` reads: all fields that differ from their defaults."""
        given = {n: v for n, v in asdict(self).items() if v != getattr(Plan, n)} or {"dp": 1}
        return ",".join(n if v is True else f"{n}={v}" for n, v in given.items())

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(getattr(self, axis) for axis in MESH)

    def mesh_sizes(self) -> dict[str, int]:
        """Return the axes of a `Mesh` with more than one rank, outermost first."""
        sizes = {axis: getattr(self, axis) for axis in MESH}
        # With ep there is a dp of 1, so that sums over "dp+ep" differ from exchanges over "ep".
        used = {a: n for a, n in sizes.items() if n != 1 or (a == "dp" and self.ep > 1)}
        return used or {"dp": 1}

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes on which ranks hold different tokens: gradients are summed over them."""
        return ("dp", *(axis for axis in ("cp", "ep") if getattr(self, axis) > 1))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes on which ranks share the experts."""
        return ("ep", "tp") if self.experts_over_tp else ("ep",)

    @property
    def autocast(self) -> str:
        """The precision that autocast provides: "float32" under bf16, where weights are bf16."""
        return "float32" if self.precision == "bf16" else self.precision

    def make_schedule(self) -> Schedule:
        """Return the pipeline's schedule. Raises `ValueError` if there is none."""
        v = self.stages_per_rank or None
        return schedules.make(self.schedule, self.pp, self.microbatches, v)

    def axis(self, *names: str) -> Axis:
        """Return the joint axis of `names` as rank 0 sees it, without a process group."""
        sizes = self.mesh_sizes()
        names = tuple(name for name in sizes if name in names)
        size = math.prod(sizes[name] for name in names)
        return Axis("+".join(names) or "none", 0, size, tuple(range(size)))

    # ------------------------------------------------------------------ 2. its rules
    def check(self, config: LlamaConfig) -> None:
        """Raise `ValueError` with the rule, if the plan breaks a rule."""
        if problem := self.problem(config):
            raise ValueError(f"plan {self}: {problem}")

    def problem(self, config: LlamaConfig) -> str | None:
        """Return the rule that the plan breaks, with its numbers; None if it breaks none."""
        try:
            return next(self._problems(config), None)
        except ValueError as error:  # a strategy checks its own sizes
            return str(error)

    def _problems(self, config: LlamaConfig) -> Iterator[str]:
        for name in (*MESH, "microbatches"):
            if (own := getattr(self, name)) < 1:
                yield f"{name}={own} must be 1 or more"
        choices = {field.name: get_args(field.type) for field in fields(self)}
        for name, allowed in choices.items():
            if allowed and getattr(self, name) not in allowed:
                yield f"{name}={getattr(self, name)} is not one of {', '.join(map(str, allowed))}"
        for axis in (axis for axis in OPTIONS if getattr(self, axis) == 1):
            for name in OPTIONS[axis]:
                if (own := getattr(self, name)) != getattr(Plan, name):
                    yield f"{name}={own} needs several ranks of {axis}, and there is one: {axis}=1"
        yield from self._problems_of_heads(config)
        yield from self._problems_of_experts(config)
        yield from self._problems_of_pipeline(config)
        yield from self._problems_of_gradients(config)

    def _problems_of_heads(self, config: LlamaConfig) -> Iterator[str]:
        """Yield the broken rules of tp and cp."""
        matrices.check_sizes(config, self.tp, experts=self.expert_tensor_parallel)
        if self.tp_overlap and not self.sequence_parallel:
            yield "tp_overlap interleaves the collectives of sequence_parallel; set both"
        if self.context == "ulysses":
            check_divides("cp", self.cp, "heads_per_rank", config.num_heads // self.tp)

    def _problems_of_experts(self, config: LlamaConfig) -> Iterator[str]:
        """Yield the broken rules of ep."""
        if self.experts_over_tp and not self.sequence_parallel:
            yield "experts_over_tp needs other tokens on each rank of tp: set sequence_parallel"
        if self.experts_over_tp and self.expert_tensor_parallel:
            yield "experts_over_tp and expert_tensor_parallel are two ways to share experts over tp"
        axis = self.axis(*self.expert_axes)
        if config.has_experts:
            pieces = self.cp * (self.tp if self.sequence_parallel else 1)
            expert.check_sizes(config.moe, axis, self.dispatch, self.expert_nodes, pieces)
        elif axis.size > 1:
            yield f"{axis.name}={axis.size} spreads experts, and this Llama has none in any layer"
        if self.dispatch != "all_to_all" and axis.size == 1:
            yield f"dispatch={self.dispatch} says how tokens travel to experts; with ep=1 none do"
        if (self.dispatch == "hierarchical") != (self.expert_nodes > 1):
            own = f"dispatch={self.dispatch} with expert_nodes={self.expert_nodes}"
            yield f"{own}: hierarchical needs several nodes, and no other dispatch uses them"

    def _problems_of_pipeline(self, config: LlamaConfig) -> Iterator[str]:
        """Yield the broken rules of pp."""
        if self.dispatch == "paired" and self.schedule not in schedules.PAIRED:
            good = " or ".join(schedules.PAIRED)
            yield f"schedule={self.schedule} is not made of pairs; use {good}"
        if self.pp == 1:
            return
        # Every schedule has at least this many stages. Count first, to avoid a huge schedule.
        num_stages = self.pp * max(1, self.stages_per_rank)
        if num_stages <= config.num_layers:
            num_stages = self.make_schedule().num_stages
        if num_stages > config.num_layers:
            cut = f"on pp={self.pp} cuts the model into {num_stages} stages, each with a layer"
            yield f"schedule={self.schedule} {cut}, and there are num_layers={config.num_layers}"
        if config.moe is not None and self.make_schedule().copies > 1:
            yield f"schedule={self.schedule} has two copies of every router, each balanced alone"

    def _problems_of_gradients(self, config: LlamaConfig) -> Iterator[str]:
        """Yield the broken rules that keep gradients from being silently wrong."""
        is_tp_sum = self.sequence_parallel or self.tp > config.num_kv_heads or config.qk_norm
        if self.zero and is_tp_sum and config.vocab_size % self.tp:
            yield (
                f"tp={self.tp} does not divide vocab_size={config.vocab_size}, so shards of "
                f"zero={self.zero} would begin elsewhere on each rank of tp, which sums them; pad "
                f"the vocabulary to {-(-config.vocab_size // self.tp) * self.tp} words"
            )
        if self.zero == 3 and self.pp > 1:
            schedule = self.make_schedule()
            is_simple = schedule.copies == 1 and not schedule.splits_backward
            if config.tie_embeddings or not is_simple:
                yield (
                    f"zero=3 with pp={self.pp} needs a schedule of F and B with one copy of the "
                    f"model (this is {self.schedule}), and tie_embeddings=False (this is "
                    f"{config.tie_embeddings}): it reduces gradients after each whole backward"
                )


def meshes(num_ranks: int, axes: Sequence[str] = MESH) -> Iterator[dict[str, int]]:
    """Yield every way to spread `num_ranks` over `axes`."""
    if len(axes) == 1:
        yield {axes[0]: num_ranks}
        return
    small = [n for n in range(1, math.isqrt(num_ranks) + 1) if num_ranks % n == 0]
    for size in sorted({*small, *(num_ranks // n for n in small)}):
        for rest in meshes(num_ranks // size, axes[1:]):
            yield {axes[0]: size, **rest}
