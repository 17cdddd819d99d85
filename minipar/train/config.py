"""Everything that decides a training run, in one typed record: the flags of `minipar train`.

A run writes its configuration as `config.json`; `--resume` starts from that file.
"""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from minipar.comm.mesh import AXES, MOST_RANKS, whole_number
from minipar.emulate import link
from minipar.model import hf
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.parallel.compression.feedback import COMPRESSORS
from minipar.parallel.local_sgd import METHODS
from minipar.parallel.plan import MESH, Plan
from minipar.train import compiled
from minipar.train.batch_size import LARGEST_BATCH, microbatches_of, parse_ramp
from minipar.train.corpus import Corpus, load_corpus
from minipar.train.flags import CLASHES, Batch, Model, Optimizer, Parallel, Run, Saving
from minipar.train.metrics import summary_writer, write_whole
from minipar.train.straggler import parse_slow
from minipar.train.tokenizer import ByteTokenizer, try_out

_ALIKE = "zero sequence_parallel expert_tensor_parallel tp_overlap context stages_per_rank "
_ALIKE += "microbatches precision dispatch expert_nodes experts_over_cp experts_over_tp"
IN_A_PLAN = {name: name for name in _ALIKE.split()} | {
    "pipeline_schedule": "schedule",
    "compress": "compression",
    "recompute": "checkpointing",
}
"""Flags, and the words of a `Plan` for them."""

EXPERTS = {
    "expert_balance": "balance",
    "expert_bias": "bias_speed",
    "expert_capacity": "capacity_factor",
}
"""Flags, and the fields of a `MoEConfig` for them."""

LARGEST = 10**9
"""What any number typed may be at most. More would only overflow: a clock, an index, the memory."""

SMALLEST = 1e-12
"""What a number that must be positive may be at least. Less would vanish in a product."""

_FROM_ONE = "steps batch_size seq_len microbatches eval_batches save_every keep record_every "
_FROM_ONE += "local_every timeout"
_FROM_ZERO = "warmup_steps weight_decay bucket_mb eval_every sample_tokens "
_FROM_ZERO += "rebalance_every expert_bias expert_capacity stall_seconds"
_LEAST = dict.fromkeys(_FROM_ONE.split(), 1.0) | dict.fromkeys(_FROM_ZERO.split(), 0.0)
_LEAST |= dict.fromkeys(("lr", "max_norm"), SMALLEST)


@dataclass(frozen=True)
class TrainConfig(Run, Saving, Parallel, Optimizer, Batch, Model):
    """Train a Llama on several ranks and prove it in pictures.

    Under torchrun, joins its ranks; otherwise starts as many as the mesh needs on this machine.
    """

    def __post_init__(self) -> None:
        """Spell out what --plan says."""
        if not self.plan:
            return
        plan = Plan.parse(self.plan)
        sizes = ",".join(f"{axis}={size}" for axis, size in plan.mesh_sizes().items())
        values = {name: getattr(plan, word) for name, word in IN_A_PLAN.items()}
        for name, value in {**values, "mesh": sizes, "plan": ""}.items():
            object.__setattr__(self, name, value)

    def as_plan(self) -> Plan:
        """Return how the ranks work together. Raises `ValueError` for a mesh that no plan has."""
        words = {word: getattr(self, name) for name, word in IN_A_PLAN.items()}
        sizes = self.mesh_sizes()
        return Plan(**{axis: sizes.get(axis, 1) for axis in MESH}, **words)

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work, before anything is started."""
        plan = self.as_plan()
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        check_numbers(self, _LEAST)
        if 0 < self.stall_seconds < 0.1:
            raise ValueError(f"{self._typed('stall_seconds')} must be 0, or 0.1 or more")
        self._check_batch()
        if self.strict and self.backend != "link":
            raise ValueError(f"--strict watches --backend link, not {self.backend}")
        model = self.model_config()
        longest = model.max_seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"--seq-len {self.seq_len} is longer than {self.init or self.preset} can see; "
                f"use up to {longest}"
            )
        own_tokenizer = Path(self.init) / "tokenizer.json"
        is_for_us_to_find = self.init and not self.tokenizer
        if is_for_us_to_find and not ByteTokenizer.wrote(own_tokenizer, model.vocab_size):
            raise ValueError(
                f"--init {self.init} knows text as its own tokens, not as bytes; "
                f"add --tokenizer {own_tokenizer}"
            )
        if self.tensorboard:
            summary_writer()
        if Path(self.name).name != self.name or self.name == "..":
            raise ValueError(f"--name {self.name!r} must be a plain name; --out chooses the folder")
        link.parse(self.link)
        self._check_shares()
        for name, known in (("compress", COMPRESSORS), ("local_method", METHODS)):
            if getattr(self, name) not in ("none", *known):
                asked, names = self._typed(name), ", ".join(known)
                raise ValueError(f"{asked} is unknown; use none, {names}")
        self._check_clashes()
        self._check_data_parallel_alone(plan)
        if self.rebalance_every and model.moe is not None and model.moe.balance == "batch":
            raise ValueError(
                f"--rebalance-every {self.rebalance_every} gives ranks other numbers of "
                f"microbatches, and experts are balanced over those of all ranks, one by one; use "
                f"--expert-balance microbatch"
            )
        if self.compile != "none":
            compiled.check(plan)
        plan.check(model)
        if plan.pp > 1:
            self._check_batches_of_a_pipeline()

    def _check_data_parallel_alone(self, plan: Plan) -> None:
        """What looks at the gradients or at the time of a rank as if it had a whole model."""
        if plan.num_ranks == plan.dp:
            return
        for name in ("local_method", "grow_batch_to", "rebalance_every", "slow"):
            if getattr(self, name) not in ("none", 0, ""):
                raise ValueError(
                    f"{self._typed(name)} is for ranks that have a whole model each, and --mesh "
                    f"{self.mesh} cuts it up; use --mesh dp={self.num_ranks}"
                )

    def _check_batch(self) -> None:
        for name in ("batch_size", "grow_batch_to"):
            if getattr(self, name) > LARGEST_BATCH:
                asked = self._typed(name)
                raise ValueError(f"{asked} must be at most {LARGEST_BATCH:,} sequences")
        dp = self.data_ranks()
        most = -(-self.batch_size // dp)
        if self.microbatches > most:
            raise ValueError(
                f"--microbatches {self.microbatches} would be empty, all but {most}: of "
                f"--batch-size {self.batch_size}, each of {dp} ranks with sequences has no more; "
                f"use up to {most}"
            )

    def _check_shares(self) -> None:
        """Batches that change their size, and ranks that differ in speed."""
        parse_ramp(self.batch_ramp)
        parse_slow(self.slow, self.num_ranks)
        if self.grow_batch_to:
            asked = f"--grow-batch-to {self.grow_batch_to}"
            if self.grow_batch_to < self.batch_size:
                raise ValueError(
                    f"{asked} is below --batch-size {self.batch_size}; use that or more"
                )
            if self.mesh_sizes().get("dp", 1) < 2:
                raise ValueError(f"{asked} compares the gradients of ranks; use dp=2 or more")
        if self.rebalance_every and self.microbatches < 2:
            raise ValueError(
                f"--rebalance-every {self.rebalance_every} has nothing to move with --microbatches "
                f"{self.microbatches}; use 2 or more"
            )

    def _check_batches_of_a_pipeline(self) -> None:
        """Its schedule is for --microbatches of them, in every step."""
        how = self.batch_size, self.microbatches, self.data_ranks()
        least = self.microbatches * self.data_ranks()
        for size in (self.batch_size, *(size for _, size in parse_ramp(self.batch_ramp))):
            if (made := microbatches_of(size, *how)) != self.microbatches:
                better = f"a --batch-size that {least} divides"
                if size != self.batch_size:
                    better = f"pp=1, or no {self._typed('batch_ramp')}"
                raise ValueError(
                    f"a batch of {size} sequences makes {made} microbatches, and the schedule of a "
                    f"pipeline (--mesh {self.mesh}) is for --microbatches {self.microbatches}; use "
                    f"{better}"
                )

    def _check_clashes(self) -> None:
        """Raise `ValueError` for two flags of which one leaves no sense to the other."""
        usual = {field.name: field.default for field in fields(self)}

        def is_used(word: str) -> bool:
            name, _, value = word.partition("=")
            now = getattr(self, name)
            return str(now) == value if value else now != usual[name]

        for pair, says in CLASHES.items():
            for words in itertools.product(*(side.split(" | ") for side in pair.split(" & "))):
                if all(map(is_used, words)):
                    raise ValueError(says.format(*map(self._typed, words)))

    def _typed(self, word: str) -> str:
        """Return a flag and its value as one types them."""
        name = word.partition("=")[0]
        value = getattr(self, name)
        if name == "local_method":  # has blanks
            value = repr(value)
        return (
            f"--{_flag(name)} {value:g}" if isinstance(value, float) else f"--{_flag(name)} {value}"
        )

    def model_config(self, vocab_size: int = 0) -> LlamaConfig:
        """Return the shape of the model, for tokens below `vocab_size`.

        Raises `ValueError` where the model of --init is none, or knows fewer tokens.
        """
        if self.init:
            shape = hf.load_config(self.init)
            if vocab_size > shape.vocab_size:
                raise ValueError(
                    f"--init {self.init} knows {shape.vocab_size} tokens, and the tokenizer has "
                    f"{vocab_size}; use the --tokenizer that the model was trained with"
                )
        else:
            preset = PRESETS[self.preset]
            shape = replace(preset, vocab_size=max(vocab_size, preset.vocab_size))
        asked = [name for name in EXPERTS if getattr(self, name) not in (0, "preset")]
        if not asked:
            return shape
        if shape.moe is None:
            raise ValueError(
                f"{self._typed(asked[0])} is about experts, and this model has none; use one that "
                f"has, such as --preset tiny-moe"
            )
        changes = {EXPERTS[name]: getattr(self, name) for name in asked}
        return replace(shape, moe=replace(shape.moe, **changes))

    def weight_bytes(self) -> int:
        """Bytes of the model that a rank holds before it is cut up; under ZeRO 3, of its part."""
        whole = self.model_config().num_parameters * getattr(torch, self.dtype).itemsize
        return whole // self.num_ranks if self.zero == 3 else whole

    def check_text(self, reads: bool = True) -> None:
        """Raise `ValueError` where the tokenizer or the text, which it `reads`, cannot be used.

        A stream is left alone, and how many tokens a tokenizer makes of a text is not tried: both
        take long, and the ranks will find out.
        """
        if self.tokenizer:
            try_out(self.tokenizer)
        if reads and not self.data.startswith("hf:"):
            corpus = load_corpus(self.data, ByteTokenizer())
            if not self.tokenizer:
                self.check_length(corpus)

    def check_length(self, corpus: Corpus) -> None:
        """Raise `ValueError` unless a sequence fits into both parts of `corpus`."""
        for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
            if self.seq_len >= len(tokens):
                shorter = min(len(corpus.train), len(corpus.validation)) - 1
                raise ValueError(
                    f"--seq-len {self.seq_len} does not fit the {len(tokens):,} tokens of {part} "
                    f"text in {self.data}; use up to {shorter:,}, or more text"
                )

    def mesh_sizes(self) -> dict[str, int]:
        """Return {"dp": 4} for "dp=4"."""
        sizes: dict[str, int] = {}
        for part in self.mesh.replace(" ", "").split(","):
            axis, _, digits = part.partition("=")
            size = whole_number(digits) or 0
            if axis not in AXES or axis in sizes or not 1 <= size <= MOST_RANKS:
                raise ValueError(
                    f"--mesh {self.mesh!r}: {part!r} is not axis=size with a new axis out of "
                    f"{', '.join(AXES)} and a size from 1 to {MOST_RANKS:,}; try dp=4"
                )
            sizes[axis] = size
        # With ep there is a dp, as in a Plan.
        return {"dp": 1, **sizes} if sizes.get("ep", 1) > 1 else sizes

    def data_ranks(self) -> int:
        """How many ranks have sequences of their own."""
        sizes = self.mesh_sizes()
        return sizes.get("dp", 1) * sizes.get("ep", 1)

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.mesh_sizes().values())

    def save(self, path: Path) -> None:
        """Write all values as JSON."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """Read what `save` wrote. Raises `ValueError` where it is not that."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            kinds = get_type_hints(cls)
            known = {name: value for name, value in values.items() if name in kinds}
            for name, value in known.items():
                if not _is_a(value, kinds[name]):
                    raise ValueError(f"{name}={shortened(repr(value))}")
            if "mesh" not in known:  # such as the config.json of a Hugging Face model
                raise ValueError("it has no mesh")
            return cls(**known)
        except (OSError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not the configuration of a run: {error}") from None


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return type(value) is kind
    return isinstance(value, (int, float) if kind is float else kind)


def check_numbers(record: Any, least: Mapping[str, float]) -> None:
    """Raise `ValueError` for a flag of the dataclass `record` that is no number up to `LARGEST`.

    Or none from `least` on, which goes by the names of fields. A seed may be what torch takes.
    """
    for field in fields(record):
        values, low = getattr(record, field.name), least.get(field.name, -LARGEST)
        for value in values if isinstance(values, tuple) else (values,):
            if not isinstance(value, (int, float)):
                continue
            asked = f"--{_flag(field.name)} {shortened(str(value))} must be"
            if field.name == "seed":
                if not 0 <= value < 2**63:
                    raise ValueError(f"{asked} 0 or more, and below 2^63")
            elif not value >= low:
                how = f"above 0, {low:g} at least" if low == SMALLEST else f"{low:g} or more"
                raise ValueError(f"{asked} {how}")
            elif value > LARGEST:
                raise ValueError(f"{asked} a number up to {LARGEST:,}")


def shortened(text: str) -> str:
    """The beginning of `text`, so that a message stays one that people read."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _flag(name: str) -> str:
    return name.replace("_", "-")
