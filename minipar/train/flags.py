"""The flags of `minipar train`, in groups, and what is said of those that do not go together."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Model:
    """What is trained, on which ranks and which text."""

    mesh: str = "dp=4"
    """Ranks along each axis, such as dp=2,tp=2,pp=2: dp shares out sequences, cp tokens, pp layers,
    tp matrices, ep sequences and experts. Ranks of the last axis are neighbours."""
    plan: str = ""
    """All in one, such as dp=2,tp=2,zero=1,sequence_parallel,microbatches=4: takes the place of
    --mesh and of the flags that have a word of it. Not named means: as usual."""
    preset: str = "tiny"
    """The model: tiny, small, medium, large, llama-3.2-1b, llama-3.2-3b or llama-3-8b; with experts
    tiny-moe, small-moe, mixtral-8x7b or qwen3-30b-a3b."""
    expert_balance: Literal["preset", "none", "sequence", "microbatch", "batch"] = "preset"
    """Of experts: over what a loss balances them; as the preset has it, or not, or over each
    sequence, the microbatch of a rank, or those of all ranks."""
    expert_bias: float = 0.0
    """Of experts: balance them by a bias on their scores that moves that far in each step, 0.001 in
    DeepSeek-V3; 0: by none."""
    expert_capacity: float = 0.0
    """Of experts: seats over mean load in each sequence, such as 1.25; who finds none is dropped.
    0: as many as it takes."""
    init: str = ""
    """Start from the model in this Hugging Face folder, instead of a fresh one of --preset."""
    data: str = "stdlib"
    """The text: stdlib (Python's own source code), a file, a folder, a glob, a .jsonl file with a
    "text" field, or hf:NAME (needs the datasets package)."""
    tokenizer: str = ""
    """A tokenizer.json; by default a token is a byte."""


@dataclass(frozen=True)
class Batch:
    """How long, with which batches, and who has which share of them."""

    steps: int = 245
    """Optimizer steps, in all."""
    batch_size: int = 32
    """Sequences per step, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence."""
    microbatches: int = 1
    """Each rank adds up the gradients of that many smaller batches per step."""

    batch_ramp: str = ""
    """Other batch sizes from some steps on, such as 64@100,128@200."""
    grow_batch_to: int = 0
    """Double the batch up to that many sequences, as the noise of the gradients asks for; at
    --batch-size itself, only measure the noise; 0: neither."""
    batch_lr: Literal["sqrt", "linear", "fixed"] = "sqrt"
    """How the learning rate grows with the batch: sqrt fits Adam."""
    slow: str = ""
    """Ranks to slow down on purpose, such as 1=2.5: rank 1 takes 2.5 times as long to compute."""
    rebalance_every: int = 0
    """Every that many steps, share out microbatches by how fast each rank has been; 0: evenly."""


@dataclass(frozen=True)
class Optimizer:
    """Of AdamW."""

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


@dataclass(frozen=True)
class Parallel:
    """How ranks work together, and in which precision."""

    ddp: Literal["overlapped", "bucketed", "naive", "tuned"] = "overlapped"
    """How gradients are reduced over dp; tuned times the link and cuts buckets for it."""
    bucket_mb: float = 0.0
    """Megabytes per all-reduce; 0 chooses a quarter of the gradients, at most 25."""
    zero: Literal[0, 1, 2, 3] = 0
    """Cut over dp, cp, ep: 0 nothing (ddp), 1 the optimizer state, 2 also gradients, 3 also
    weights, gathered where they are used (fsdp). A run may be resumed with another one."""
    sequence_parallel: bool = False
    """Over tp: cut norms and the residual stream along the tokens."""
    expert_tensor_parallel: bool = False
    """Over tp: cut each expert, too, instead of leaving all of a rank's whole."""
    tp_overlap: bool = False
    """Over tp, with --sequence-parallel: send pieces of products while others are computed."""
    context: Literal["ring", "gather", "ulysses"] = "ring"
    """Over cp: how attention sees all tokens."""
    dispatch: Literal[
        "all_to_all", "gather", "hierarchical", "overlapped", "halves", "paired", "padded"
    ] = "all_to_all"
    """Over ep: how tokens meet their experts. gather suits ep up to the experts per token;
    hierarchical sends a token once to each node; overlapped and halves compute while tokens
    travel, and so does paired, another microbatch of a pipeline with schedule dualpipe_v; padded
    fills messages up to --expert-capacity, so that the host need not wait for a GPU to know sizes.
    """
    expert_nodes: int = 1
    """Over ep, of hierarchical: nodes that these ranks are on, one after the other."""
    experts_over_cp: bool = False
    """Ranks of cp have experts of their own as well."""
    experts_over_tp: bool = False
    """So have ranks of tp, with --sequence-parallel: each sends its part of a sequence."""
    pipeline_schedule: str = "1f1b"
    """Over pp: naive, gpipe, 1f1b, eager_1f1b, interleaved_1f1b, looped_bfs, zb_h1, zb_h2,
    interleaved_zb, zb_v, dualpipe or dualpipe_v; of as many microbatches as --microbatches."""
    stages_per_rank: int = 0
    """Over pp, of schedules that leave it open; 0: as many as the schedule has."""
    local_method: str = "none"
    """Let ranks train alone between agreements: none, local sgd, post-local sgd, diloco,
    diloco delayed or diloco streaming. Or agree in every step, but a step late: delayed gradients.
    Validated and saved is the model agreed on."""
    local_every: int = 16
    """Steps from one agreement to the next."""
    backend: Literal["auto", "gloo", "nccl", "link"] = "auto"
    """auto: nccl where each rank has a GPU, else gloo. link: gloo behind an emulated link."""
    link: str = "1gbe"
    """The link that --backend link emulates."""
    strict: bool = False
    """On that link: stop at what would be a race on a GPU, such as a buffer used while it travels.
    Slow."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of parameters, gradients and optimizer state."""
    precision: Literal["float32", "bf16", "fp16", "autocast-bf16"] = "float32"
    """Of matrix products: as --dtype says, or in 16 bits. bf16: of weights and activations, too,
    beside master weights in float32. The others cast from float32 weights, and so does every
    --local-method; fp16 scales the loss so that small gradients survive, and leaves out steps that
    overflow."""
    tf32: bool = False
    """On GPUs, multiply float32 matrices by the first 10 bits of their fractions: several times as
    fast. Otherwise by all 23."""
    reduce_dtype: Literal["same", "bfloat16"] = "same"
    """Of gradients on their way between ranks: as --dtype says, or cast to bfloat16."""
    compress: str = "none"
    """Send gradients with fewer bytes: none, fp16, bf16, int8, fp8-e4m3, fp8-e5m2, sign, top-k,
    random-k or powersgd. What is left out of a step is added to the next."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Compile each block by itself, under strategies that stay outside of blocks: inductor for
    speed, aot_eager to try it without a compiler."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in backward instead of being kept."""


@dataclass(frozen=True)
class Saving:
    """What is validated, saved and recorded."""

    eval_every: int = 0
    """Validate every that many steps; 0: at the end only."""
    eval_batches: int = 16
    """Batches of validation text per validation."""
    save_every: int = 50
    """Write a checkpoint every that many steps, and at the end."""
    keep: int = 2
    """How many checkpoints stay: the newest."""
    async_save: bool = False
    """Go on training while checkpoints are written."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard as well, into the folder of the run."""
    record_every: int = 20
    """Record the timeline of every that many-th step."""
    sample_tokens: int = 200
    """Length of the text generated at the end; 0 for none."""


@dataclass(frozen=True)
class Run:
    """Where it goes, and what it goes on with."""

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
    stall_seconds: float = 60.0
    """After that many seconds in one collective, say which rank keeps it waiting, and where that
    is; 0: never."""


CLASHES = {
    "reduce_dtype & ddp=naive": "{} casts whole buckets, and {} has none; use --ddp overlapped or "
    "bucketed",
    "precision & dtype": "{} casts from master weights in float32, and {} has others; leave out "
    "one of them",
    "reduce_dtype | compress | grow_batch_to & ddp=tuned": "{} changes how buckets are "
    "sent, and {} times exact all-reduces; use --ddp overlapped",
    "grow_batch_to & batch_ramp": "{} and {}: use one of them",
    "grow_batch_to & ddp=naive": "{} looks into buckets, and {} has none; use --ddp overlapped or "
    "bucketed",
    "compress & ddp=naive": "{} needs buckets, and {} has none; use --ddp overlapped or bucketed",
    "compress & reduce_dtype": "{} and {} both say how gradients are sent; use one of them",
    "compress & grow_batch_to": "{} changes the average of the gradients, and {} measures noise by "
    "it; use one of them",
    "zero | local_method & ddp | compress | grow_batch_to": "{} does without the buckets of ddp, "
    "which {} is about; use one of them",
    "zero=1 | zero=2 & reduce_dtype": "{} and {} do not go together; use --zero 0 or 3",
    "zero=3 & bucket_mb": "{} sends block by block, so {} says nothing; leave it out, or use "
    "--zero 0 to 2",
    "slow | rebalance_every & zero": "{} takes the time of a forward for computing, and with {} it "
    "also waits for weights there; use --zero 0",
    "local_method & zero": "{} needs a whole model on every rank, and {} cuts it up; use --zero 0",
    "local_method & reduce_dtype | bucket_mb": "{} sends no buckets of gradients; leave out {}",
    "local_method=delayed gradients & precision=fp16": "{} uses a gradient of the step before, and "
    "{} may have scaled that by another factor; use --precision bf16",
}
"""Flags that do not go together, and what is said of them. A flag counts where it is not as usual,
or has the value named; `|` stands between flags of which any will do."""
