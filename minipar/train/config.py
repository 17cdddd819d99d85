"""Everything that decides a training run, in one typed record: the flags of `minipar train`.

A run writes its configuration as `config.json`, and `--resume` starts from that file. `--config`
reads flags from a TOML file with the same names.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from minipar.emulate import link
from minipar.model import hf
from minipar.model.config import check_kinds
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.parallel.plan import MESH, Plan
from minipar.train import compiled
from minipar.train.metrics import write_whole
from minipar.train.tokenizer import ByteTokenizer

WORDS = {
    "zero": "zero",
    "microbatches": "microbatches",
    "precision": "precision",
    "recompute": "checkpointing",
}
"""Flags that are one word of a plan, and the word."""

LARGEST = 10**9  # number that a flag takes: more would overflow a clock, an index or the memory
LEAST = dict.fromkeys(("steps", "batch_size", "seq_len", "save_every", "keep", "timeout"), 1)
LEAST |= {"lr": 1e-12, "max_norm": 1e-12}
"""The smallest number of a flag, if it is not 0."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a Llama on several ranks, and draw how they work together.

    Under torchrun, join its ranks. Otherwise start as many ranks as the plan has on this machine.
    """

    # ------------------------------------------------------------------ how ranks work together
    plan: str = "dp=4"
    """Ranks along each axis, and how they work, such as dp=2,tp=2,zero=1,sequence_parallel. dp cuts
    the batch, cp the sequence, pp the layers, tp matrices, ep experts. All words:
    minipar/parallel/plan.py."""
    mesh: str = ""
    """Only the ranks along each axis of the plan, such as dp=2,tp=2; its other words stay."""
    zero: Literal[0, 1, 2, 3] | None = None
    """Word of the plan. Shard over dp, cp and ep: 0 nothing (ddp), 1 the optimizer state, 2 also
    gradients, 3 also weights (fsdp)."""
    microbatches: int | None = None
    """Word of the plan. Each rank adds up the gradients of this many smaller batches per step."""
    precision: Literal["float32", "bf16", "fp16", "autocast-bf16"] | None = None
    """Word of the plan. bf16: 16-bit weights and activations, float32 master weights. fp16 and
    autocast-bf16: only matmuls in 16 bits. fp16 scales the loss."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Word of the plan (checkpointing). The activations that backward computes again."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """The dtype of parameters, gradients and optimizer state."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Compile each block: inductor for speed, aot_eager to try it without a compiler."""
    backend: Literal["auto", "gloo", "nccl", "link"] = "auto"
    """auto: nccl where each rank has a GPU, else gloo. link: gloo behind an emulated link."""
    link: str = "1gbe"
    """The link that --backend link emulates."""

    # ------------------------------------------------------------------ the model and the text
    preset: str = "tiny"
    """The model: tiny, small, medium, large, llama-3.2-1b, llama-3.2-3b or llama-3-8b; with experts
    tiny-moe, small-moe, mixtral-8x7b or qwen3-30b-a3b."""
    init: str = ""
    """Start from the model in this Hugging Face folder, instead of a fresh one of --preset."""
    data: str = "stdlib"
    """The text: stdlib (Python's own source code), a file, a folder, a glob, a .jsonl file with a
    "text" field, or hf:NAME (needs the datasets package)."""
    tokenizer: str = ""
    """A tokenizer.json; by default a token is a byte."""

    # ------------------------------------------------------------------ batches and the optimizer
    steps: int = 245
    """Optimizer steps, in all."""
    batch_size: int = 32
    """Sequences per step, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence."""
    lr: float = 3e-3
    """Learning rate of AdamW at its peak."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises; then it falls by half a cosine."""
    weight_decay: float = 0.1
    """Decay of matrices; norms and biases have none."""
    max_norm: float = 1.0
    """Gradients are scaled down to at most this norm."""

    # ------------------------------------------------------------------ files
    eval_every: int = 0
    """Steps from one validation to the next; 0: validate at the end only."""
    save_every: int = 50
    """Steps from one checkpoint to the next; the last step writes one, too."""
    keep: int = 2
    """Number of checkpoints that stay: the newest ones."""
    async_save: bool = False
    """Go on training while checkpoints are written."""
    record_steps: int = 3
    """Number of steps at the end whose timeline is recorded."""
    profile: bool = False
    """Write a trace of torch.profiler for a few steps, and on a GPU a snapshot of its memory."""
    sample_tokens: int = 200
    """Length of the text that the model writes at the end; 0 for none."""

    # ------------------------------------------------------------------ the run
    seed: int = 0
    """Seed of the weights, the order of the data, and the sample."""
    out: str = "runs"
    """Folder for the folder of the run."""
    name: str = ""
    """Name of the run; by default after its preset and mesh."""
    resume: str = ""
    """A run, or one of its checkpoints, to continue; the flags of that run become the defaults. A
    run continues from its highest step. latest: continue the run called --name, or begin it."""
    config: str = ""
    """A TOML file with flags by name, such as batch_size = 64; typed flags override the file."""
    timeout: float = 600.0
    """Seconds for which a collective waits for missing ranks before it fails."""

    def __post_init__(self) -> None:
        """Write --mesh, and the flags that are one word of a plan, into the plan."""
        plan = Plan.parse(self.plan)
        if self.mesh:
            strange = [p for p in self.mesh.split(",") if p.partition("=")[0].strip() not in MESH]
            if strange:
                axes = f"axis=size with an axis out of {', '.join(MESH)}; try dp=4"
                raise ValueError(f"--mesh {self.mesh}: {strange[0]!r} is not {axes}")
            sizes = Plan.parse(self.mesh)
            plan = replace(plan, **{axis: getattr(sizes, axis) for axis in MESH})
        given = {word: getattr(self, flag) for flag, word in WORDS.items()}
        plan = replace(plan, **{word: v for word, v in given.items() if v is not None})
        out = str(Path(self.out).expanduser())  # no shell reads ~ in a file of flags
        fixed = {"plan": str(plan), "mesh": "", "out": out, **dict.fromkeys(WORDS)}
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    def as_plan(self) -> Plan:
        """Return how the ranks work together."""
        return Plan.parse(self.plan)

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.as_plan().num_ranks

    # ------------------------------------------------------------------ what cannot work
    def check(self) -> None:
        """Raise `ValueError` for values that cannot work, before anything is started."""
        plan = self.as_plan()
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        check_numbers(self, LEAST)
        link.parse(self.link)
        if Path(self.name).name != self.name or self.name == "..":
            raise ValueError(f"--name {self.name!r} must be a plain name; --out chooses the folder")
        model = self.model_config()
        if self.seq_len > model.max_seq_len:
            sees = f"{self.init or self.preset} can see {model.max_seq_len} tokens"
            raise ValueError(f"--seq-len {self.seq_len} is too long: {sees}")
        own_tokenizer = Path(self.init) / "tokenizer.json"
        asks = self.init and not self.tokenizer
        if asks and not ByteTokenizer.wrote(own_tokenizer, model.vocab_size):
            raise ValueError(f"--init {self.init} reads no bytes; add --tokenizer {own_tokenizer}")
        plan.check(model)
        ranks = plan.dp * plan.ep  # ranks that have sequences of their own
        most = -(-self.batch_size // ranks)  # sequences of a rank
        made = -(-most // -(-most // plan.microbatches))  # microbatches that are not empty
        if made != plan.microbatches:
            has = f"a rank has {most} sequences of --batch-size {self.batch_size}"
            some = f"--microbatches {plan.microbatches} leaves some empty"
            raise ValueError(f"{some}: {has}, for {made} microbatches")
        if plan.precision != "float32" and self.dtype != "float32":
            raise ValueError(f"--precision {plan.precision} needs --dtype float32")
        if self.compile != "none":
            compiled.check(plan)

    # ------------------------------------------------------------------ the model
    def model_config(self, vocab_size: int = 0) -> LlamaConfig:
        """Return the shape of the model, for tokens below `vocab_size`.

        Raises `ValueError` where the model of --init cannot be read, or knows fewer tokens.
        """
        if not self.init:
            preset = PRESETS[self.preset]
            return replace(preset, vocab_size=max(vocab_size, preset.vocab_size))
        shape = hf.load_config(self.init)
        if vocab_size > shape.vocab_size:
            knows = f"--init {self.init} knows {shape.vocab_size} tokens"
            raise ValueError(f"{knows}, and the tokenizer has {vocab_size}; use the model's own")
        return shape

    def weight_bytes(self) -> int:
        """Return the bytes of the model that a rank holds at first; under ZeRO 3, of its part."""
        whole = self.model_config().num_parameters * getattr(torch, self.dtype).itemsize
        return whole // self.num_ranks if self.as_plan().zero == 3 else whole

    # ------------------------------------------------------------------ files
    def save(self, path: Path) -> None:
        """Write all values as JSON."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """Read what `save` wrote. Raises `ValueError` for any other file."""
        try:
            config = cls(**json.loads(path.read_text(encoding="utf-8")))
            check_kinds(config)
            return config
        except (AttributeError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the configuration of a run: {error}") from None


def check_numbers(record: Any, least: Mapping[str, float]) -> None:
    """Raise `ValueError` for a number in the dataclass `record` that is too small or too large.

    `least` maps the name of a field to its smallest value; it is 0 for all other fields.
    """
    for field in fields(record):
        value, low = getattr(record, field.name), least.get(field.name, 0)
        if isinstance(value, (int, float)) and not low <= value <= LARGEST:
            flag = f"--{field.name.replace('_', '-')} {value}"
            raise ValueError(f"{flag} must be {low:g} or more, up to {LARGEST:,}")
