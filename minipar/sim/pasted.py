"""A plan as flags to paste into the command lines of three projects.

Source. `torchtitan/config/job_config.py` of pytorch/torchtitan (000204a) and
`megatron/training/arguments.py` of NVIDIA/Megatron-LM (307dcf3): the names are theirs.
"""

from minipar.sim.cost import Job


def flags(job: Job) -> dict[str, str]:
    """Return what to paste into the command lines of three projects.

    Where one has no ZeRO 1 or 2, the next stage that it has; without such a schedule, a word on it.
    """
    plan = job.plan
    batch = job.dp * plan.microbatches * job.microbatch
    ours = f"--plan {plan} --batch-size {batch} --seq-len {job.seq_len}"
    p, names = "--parallelism.", {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
    cut = ("shard", "replicate") if plan.zero else ("replicate", "shard")
    titan = (
        f"--training.seq_len {job.seq_len} --training.global_batch_size {batch} "
        f"--training.local_batch_size {job.microbatch * (plan.microbatches if plan.pp > 1 else 1)} "
        f"{p}data_parallel_{cut[0]}_degree {job.dp} {p}data_parallel_{cut[1]}_degree 1 "
        f"{p}tensor_parallel_degree {plan.tp} {p}context_parallel_degree {plan.cp} "
        f"{p}pipeline_parallel_degree {plan.pp} --activation_checkpoint.mode {plan.checkpointing}"
    )
    megatron = (
        f"--tensor-model-parallel-size {plan.tp} --pipeline-model-parallel-size {plan.pp} "
        f"--context-parallel-size {plan.cp} --micro-batch-size {job.microbatch} "
        f"--global-batch-size {batch} --seq-length {job.seq_len}"
    )
    if plan.zero:
        titan += f" {p}fsdp_reshard_after_forward {'always' if plan.zero == 3 else 'never'}"
    if plan.ep > 1:
        titan += f" {p}expert_parallel_degree {plan.ep}"
        megatron += f" --expert-model-parallel-size {plan.ep}"
    if job.config.moe is not None and plan.tp > 1:
        cut = plan.tp if plan.expert_tensor_parallel else 1
        megatron += f" --expert-tensor-parallel-size {cut}"
    megatron += " --sequence-parallel" if plan.sequence_parallel else ""
    megatron += {0: "", 1: " --use-distributed-optimizer", 2: " --use-distributed-optimizer"}.get(
        plan.zero, " --use-torch-fsdp2"
    )
    if plan.checkpointing == "full":
        megatron += " --recompute-granularity full --recompute-method uniform"
        megatron += " --recompute-num-layers 1"
    elif plan.checkpointing == "selective":
        megatron += " --recompute-granularity selective"
    if plan.pp > 1:
        if plan.schedule not in names:
            none = f"has no schedule {plan.schedule}"
            return {"minipar train": ours, "torchtitan": none, "Megatron-LM": none}
        titan += f" {p}pipeline_parallel_schedule {names[plan.schedule]}"
        titan += f" {p}pipeline_parallel_microbatch_size {job.microbatch}"
        if plan.schedule == "interleaved_1f1b":
            megatron += f" --num-virtual-stages-per-pipeline-rank {job.chunks}"
    return {"minipar train": ours, "torchtitan": titan, "Megatron-LM": megatron}
