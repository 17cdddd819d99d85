"""Everything that decides a training run, in one typed record: the flags of `minipar train`.

A run writes its configuration as `config.json`; `--resume` starts from that file.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from minipar.comm import link
from minipar.comm.mesh import AXES
from minipar.model.llama import PRESETS
from minipar.train.corpus import ByteTokenizer, Corpus, load_corpus, load_tokenizer

SUPPORTED_AXES = ("dp",)


@dataclass(frozen=True)
class TrainConfig:
    """Train a Llama on several ranks and prove it in pictures.

    Under torchrun, joins its ranks; otherwise starts as many as the mesh needs on this machine.
    """

    mesh: str = "dp=4"
    """Ranks along each axis, such as dp=4: four ranks, each with a quarter of every batch."""
    preset: str = "tiny"
    """The model: tiny, small, medium, large, llama-3.2-1b, llama-3.2-3b or llama-3-8b."""
    data: str = "stdlib"
    """The text: stdlib (Python's own source code), a file, a folder, a glob, a .jsonl file with a
    "text" field, or hf:NAME (needs the datasets package)."""
    tokenizer: str = ""
    """A tokenizer.json; by default a token is a byte."""

    steps: int = 245
    """Optimizer steps, in all."""
    batch_size: int = 32
    """Sequences per step, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence."""
    microbatches: int = 1
    """Each rank adds up the gradients of that many smaller batches per step."""

    lr: float = 3e-3
    """Learning rate at its peak."""
    schedule: Literal["cosine", "stable"] = "cosine"
    """After the warm-up: half a cosine, or a plateau with a line down over the last fifth."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none."""
    max_norm: float = 1.0
    """Gradients are scaled down to at most this norm."""

    ddp: Literal["overlapped", "bucketed", "naive"] = "overlapped"
    """How gradients are reduced over dp."""
    bucket_mb: float = 0.0
    """Megabytes per all-reduce; 0 chooses a quarter of the gradients, at most 25."""
    backend: Literal["auto", "gloo", "nccl", "link"] = "auto"
    """auto: nccl where each rank has a GPU, else gloo. link: gloo behind an emulated link."""
    link: str = "1gbe"
    """The link that --backend link emulates."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of parameters, gradients and optimizer state."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Of matrix products: as --dtype says, or in 16 bits while parameters stay in float32. fp16
    scales the loss so that small gradients survive, and leaves out steps that overflow."""
    reduce_dtype: Literal["same", "bfloat16"] = "same"
    """Of gradients on their way between ranks: as --dtype says, or cast to bfloat16."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in backward instead of being kept."""

    eval_every: int = 0
    """Validate every that many steps; 0: at the end only."""
    eval_batches: int = 16
    """Batches of validation text per validation."""
    save_every: int = 50
    """Write a checkpoint every that many steps, and at the end."""
    record_every: int = 20
    """Record the timeline of every that many-th step."""
    sample_tokens: int = 200
    """Length of the text generated at the end; 0 for none."""

    seed: int = 0
    """Of the weights, the order of the data, and the sample."""
    out: str = "runs"
    """Folder for the folder of the run."""
    name: str = ""
    """Name of the run; by default after its preset and mesh."""
    resume: str = ""
    """Folder of a run to go on with: its configuration is the default of all other flags."""
    timeout: float = 600.0
    """Seconds until a collective that not all ranks have joined fails."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work, before anything is started."""
        sizes = self.mesh_sizes()
        for axis, size in sizes.items():
            if axis not in SUPPORTED_AXES and size > 1:
                raise ValueError(
                    f"--mesh {self.mesh}: `minipar train` does not use axis {axis} "
                    f"({AXES[axis]}) yet; use dp"
                )
        if self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset} is unknown; use one of {', '.join(PRESETS)}")
        counts = "steps batch_size seq_len microbatches eval_batches save_every record_every"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"--{_flag(name)} {getattr(self, name)} must be 1 or more")
        for name in ("warmup_steps", "weight_decay", "bucket_mb", "eval_every", "sample_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{_flag(name)} {getattr(self, name)} must be 0 or more")
        for name in ("lr", "max_norm", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{_flag(name)} {getattr(self, name)} must be above 0")
        longest = PRESETS[self.preset].max_seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"--seq-len {self.seq_len} is longer than {self.preset} can see; "
                f"use up to {longest}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed} must be 0 or more, and below 2^63")
        if self.timeout > 1e9:  # more than what fits into nanoseconds means: never
            raise ValueError(f"--timeout {self.timeout:g} must be at most 1e9 seconds")
        if Path(self.name).name != self.name or self.name == "..":
            raise ValueError(f"--name {self.name!r} must be a plain name; --out chooses the folder")
        if self.precision != "float32" and self.dtype != "float32":
            raise ValueError(
                f"--precision {self.precision} casts from master weights in float32, not "
                f"{self.dtype}; leave out --dtype, or --precision"
            )
        if self.reduce_dtype != "same" and self.ddp == "naive":
            raise ValueError(
                f"--reduce-dtype {self.reduce_dtype} casts whole buckets, and --ddp naive has "
                f"none; use --ddp overlapped or bucketed"
            )
        link.parse(self.link)

    def check_text(self) -> None:
        """Raise `ValueError` where the tokenizer or the text cannot be used; reads all of it.

        A stream is left alone, and how many tokens a tokenizer makes of a text is not tried: both
        take long, and the ranks will find out.
        """
        load_tokenizer(self.tokenizer or None)
        if not self.data.startswith("hf:"):
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
            axis, _, size = part.partition("=")
            if axis not in AXES or not size.isdecimal() or int(size) < 1 or axis in sizes:
                raise ValueError(
                    f"--mesh {self.mesh!r}: {part!r} is not axis=size with a new axis out of "
                    f"{', '.join(AXES)} and a size from 1 up; try dp=4"
                )
            sizes[axis] = int(size)
        return sizes

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.mesh_sizes().values())

    def save(self, path: Path) -> None:
        """Write all values as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """Read what `save` wrote. Raises `ValueError` where it is not that."""
        try:
            values = json.loads(path.read_text())
            kinds = get_type_hints(cls)
            known = {name: value for name, value in values.items() if name in kinds}
        except (OSError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not the configuration of a run: {error}") from None
        for name, value in known.items():
            if not _is_a(value, kinds[name]):
                raise ValueError(f"{path} is not the configuration of a run: {name}={value!r}")
        return cls(**known)


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kind = (int, float) if kind is float else kind
    return isinstance(value, kind) and not isinstance(value, bool)


def _flag(name: str) -> str:
    return name.replace("_", "-")
