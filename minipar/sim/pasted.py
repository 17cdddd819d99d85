"""A plan as flags to paste into the command lines of three projects.

Source. `torchtitan/config/job_config.py` of pytorch/torchtitan (000204a), with the rules of its
`ParallelDims` and `parallelize_llama`, and `megatron/training/arguments.py` of NVIDIA/Megatron-LM
(000c4ac), with the rules of its `validate_args`: names and rules are theirs.
"""

from collections.abc import Iterator

from minipar.parallel.plan import Plan
from minipar.sim.job import Job

SCHEDULES = {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
"""Of ours, those that the others have, too, by torchtitan's names."""


def flags(job: Job) -> dict[str, str]:
    """Return what to paste into the command lines of three projects.

    Of a project that refuses the plan, "cannot: " and why. torchtitan has no ZeRO 1; where the plan
    has, it gets ZeRO 2.
    """
    batch = job.dp * job.plan.microbatches * job.microbatch
    found = {"minipar train": f"--plan {job.plan} --batch-size {batch} --seq-len {job.seq_len}"}
    for name, refused, text in (
        ("torchtitan", _refused_by_torchtitan(job), _torchtitan),
        ("Megatron-LM", _refused_by_megatron(job), _megatron),
    ):
        why = next(refused, None)
        found[name] = text(job, batch) if why is None else f"cannot: {why}"
    return found


def _refused_by_torchtitan(job: Job) -> Iterator[str]:
    plan = job.plan
    yield from _without_a_flag(job, "tp_overlap")
    if plan.cp > 1 and plan.context == "ulysses":
        yield "its context parallelism passes keys and values on, and no heads"
    shard, multiple = (job.dp if plan.zero else 1) * plan.cp, 2 * plan.tp * plan.cp
    if plan.schedule not in SCHEDULES:
        yield f"it has no schedule {plan.schedule}"
    if plan.schedule == "interleaved_1f1b" and job.chunks != 2:
        yield f"its ranks of {plan.schedule} have 2 stages, and the plan's have {job.chunks}"
    if plan.precision == "fp16":
        yield "it has no fp16, only bfloat16 and float32"
    if job.seq_len % multiple:
        yield f"its seq_len is a multiple of 2 x tp x cp = {multiple}, and {job.seq_len} is not"
    if shard == 1 < plan.tp * plan.pp:
        if job.dp > 1:
            yield f"its DDP (zero=0, on {job.dp} ranks) goes with no other axis; use zero=1"
        if plan.precision != "float32":
            yield f"its tp and pp compute in float32, not {plan.precision}, without FSDP or cp"
    if plan.experts_over_tp:
        yield "its ranks of tp have experts of their own by a flag that is not written here"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "its tp cuts norms and residual streams along the tokens, too; use sequence_parallel"
    if job.config.moe is not None and plan.tp > 1 and not plan.expert_tensor_parallel:
        yield "its tp cuts every expert, too; use expert_tensor_parallel"
    if plan.ep > 1 and (plan.ep % plan.cp or shard % plan.ep):
        yield (
            f"its ep is a multiple of cp={plan.cp} and divides the ranks of FSDP and cp, here "
            f"{shard}; ep={plan.ep} is not so"
        )


def _without_a_flag(job: Job, *more: str) -> Iterator[str]:
    """Say which words of the plan no flag is written for here."""
    for word in ("compression", "dispatch", *more):
        value = getattr(job.plan, word)
        if value != getattr(Plan, word):
            yield f"{word}={value} has no flag here"


def _torchtitan(job: Job, batch: int) -> str:
    plan, p = job.plan, "--parallelism."
    cut = ("shard", "replicate") if plan.zero else ("replicate", "shard")
    precision = plan.precision.removeprefix("autocast-").replace("bf16", "bfloat16")
    text = (
        f"--training.seq_len {job.seq_len} --training.global_batch_size {batch} "
        f"--training.local_batch_size {job.microbatch * (plan.microbatches if plan.pp > 1 else 1)} "
        f"--training.mixed_precision_param {precision} "
        f"{p}data_parallel_{cut[0]}_degree {job.dp} {p}data_parallel_{cut[1]}_degree 1 "
        f"{p}tensor_parallel_degree {plan.tp} {p}context_parallel_degree {plan.cp} "
        f"{p}pipeline_parallel_degree {plan.pp} --activation_checkpoint.mode {plan.checkpointing}"
    )
    if plan.checkpointing == "selective":  # by operation, as it is priced
        text += " --activation_checkpoint.selective_ac_option op"
    if plan.zero:
        text += f" {p}fsdp_reshard_after_forward {'always' if plan.zero == 3 else 'never'}"
    if plan.cp > 1:
        method = "allgather" if plan.context == "gather" else "alltoall"
        text += f" {p}context_parallel_rotate_method {method}"
    if plan.ep > 1:
        text += f" {p}expert_parallel_degree {plan.ep}"
    if plan.pp > 1:
        text += f" {p}pipeline_parallel_schedule {SCHEDULES[plan.schedule]}"
        text += f" {p}pipeline_parallel_microbatch_size {job.microbatch}"
    return text


def _refused_by_megatron(job: Job) -> Iterator[str]:
    plan, layers, stages = job.plan, job.config.num_layers, job.plan.pp * job.chunks
    multiple = (2 * plan.cp if plan.cp > 1 else 1) * (plan.tp if plan.sequence_parallel else 1)
    yield from _without_a_flag(job)
    if plan.cp > 1 and plan.context == "gather":
        yield "context=gather has no flag here"
    if plan.checkpointing == "selective" and job.software.kept < 1:
        yield (
            "its selective recomputation leaves out the scores of attention alone, and keeps more "
            "than this plan, which may not fit; ask with --fix checkpointing=none or full"
        )
    if plan.schedule not in SCHEDULES:
        yield f"it has no schedule {plan.schedule}"
    if layers % stages:
        yield f"its stages have the same number of layers, and {stages} do not divide {layers}"
    if job.chunks > 1 and plan.microbatches % plan.pp:
        yield (
            f"its interleaved pipeline takes a multiple of pp={plan.pp} microbatches, and "
            f"{plan.microbatches} is none"
        )
    if plan.zero == 2:
        yield (
            "its --use-distributed-optimizer is zero=1, and its --use-torch-fsdp2 is zero=3; for "
            "zero=2 see --use-megatron-fsdp in its documentation"
        )
    tied = job.config.tie_embeddings
    if plan.zero == 3 and (plan.pp > 1 or plan.ep > 1 or plan.precision == "fp16" or tied):
        yield "its --use-torch-fsdp2 goes with no pp, ep, fp16 or tied embeddings"
    if plan.ep > 1 and plan.precision == "fp16":
        yield "its ep goes with no fp16"
    if job.seq_len % multiple:
        yield f"its seq-length is a multiple of {multiple} here, and {job.seq_len} is not"


def _megatron(job: Job, batch: int) -> str:
    plan = job.plan
    text = (
        f"--tensor-model-parallel-size {plan.tp} --pipeline-model-parallel-size {plan.pp} "
        f"--context-parallel-size {plan.cp} --micro-batch-size {job.microbatch} "
        f"--global-batch-size {batch} --seq-length {job.seq_len}"
    )
    text += "" if plan.precision == "float32" else f" --{plan.precision.removeprefix('autocast-')}"
    if job.config.moe is not None and job.experts_over > 1:
        text += f" --expert-model-parallel-size {job.experts_over}"
    if job.config.moe is not None and plan.tp > 1:
        text += f" --expert-tensor-parallel-size {job.experts_cut}"
    if plan.cp > 1:
        text += f" --cp-comm-type {'a2a' if plan.context == 'ulysses' else 'p2p'}"
    text += " --sequence-parallel" if plan.sequence_parallel else ""
    overlaps = plan.tp_overlap or (job.software.beside and plan.sequence_parallel)
    text += " --tp-comm-overlap" if overlaps and plan.tp > 1 else ""
    if plan.zero == 1:
        text += " --use-distributed-optimizer"
    if plan.zero == 3:
        text += " --use-torch-fsdp2 --no-gradient-accumulation-fusion"
        text += " --untie-embeddings-and-output-weights"
    if plan.checkpointing == "full":
        text += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif plan.checkpointing == "selective":
        text += " --recompute-granularity selective"
    if job.chunks > 1:
        text += f" --num-virtual-stages-per-pipeline-rank {job.chunks}"
    return text
