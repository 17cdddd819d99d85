"""The bytes that the fullest rank of a plan holds, in closed form, by part.

Idea.   Weights, gradients and optimizer state follow from parameters, in the bytes of
        `memory.MASTER_ADAM`. Activations are a layer's (`memory.llama_activations`), times the
        layers, times the microbatches that a schedule has in flight at its fullest.
Math.   A rank of the pipeline has n layers. Recomputation leaves k bytes of each layer. Schedules
        that put weight gradients off also keep w bytes for them:

            activations = max(f n k + o w)    over the pairs (f, o) of `in_flight`

        and, of one layer at a time, all activations that were not kept.
Fitted. `gathered` of `hardware.Software` to published runs, and `HEADROOM`.
Source. Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for activations.

Limits: no allocator under pressure. `cost.py` has the time of the same plans.
"""

from dataclasses import replace
from functools import cache

from minipar.parallel.pipeline.schedules import LOOPED, make
from minipar.sim.hardware import Device
from minipar.sim.job import Job
from minipar.sim.memory import MASTER_ADAM, llama_activations

HEADROOM = 0.78
"""Share of a device that a plan may fill: two fuller runs took four and eight times as long."""
ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")


def room(device: Device) -> float:
    """Return the bytes of a device that a plan may fill."""
    return min(HEADROOM * device.memory, device.usable_memory())


def memory(job: Job) -> dict[str, float]:
    """Return the bytes of the fullest rank: weights, gradients, optimizer, activations, logits."""
    moe = job.config.moe
    if moe is not None and job.plan.pp > 1:  # some rank may have no layer without experts
        is_even = not any(layers / job.chunks % moe.every for layers in job.layers)
        moe = replace(moe, first_dense=0, every=moe.every if is_even else 1)
        job = replace(job, config=replace(job.config, moe=moe))
    kept = activations(job)
    ranks = (_memory_of(job, stage, kept) for stage in range(job.plan.pp))
    return max(ranks, key=lambda held: sum(held.values()))


def _memory_of(job: Job, stage: int, parts: dict[str, float]) -> dict[str, float]:
    """Return the bytes of a rank of the pipeline; `parts` are the activations of a layer."""
    plan, software, c, sizes = job.plan, job.software, job.config, job.parameters
    layers = job.layers[stage]
    mine, experts = job.numbers(stage)
    cut, has_head = job.shard(mine, experts), job.tables(stage)[1]
    # ZeRO 1 reduces in the last microbatch. With one microbatch it frees gradients as ZeRO 2 does.
    freed = plan.zero >= 2 or plan.zero and plan.microbatches == 1 and not software.buffered
    # The shards of ZeRO 3 are the float32 weights that all others have in the optimizer's state.
    gathered = MASTER_ADAM.parameters * (2 * sizes.layer + sizes.table * has_head)
    held = {
        "weights": gathered if plan.zero == 3 else MASTER_ADAM.parameters * mine,
        "gradients": MASTER_ADAM.gradients * (cut if freed else mine),
        "optimizer": MASTER_ADAM.optimizer * (cut if plan.zero else mine),
    }
    inputs = 2 * job.tokens * c.hidden_size / (plan.tp if plan.sequence_parallel else 1)
    stored = sum(parts.values())
    kept = {"none": stored, "selective": software.kept * stored, "full": inputs}[plan.checkpointing]
    # The gradients of weights need what was stored, but for what no product multiplies.
    waits = layers * (stored - parts.get("scores", 0) - parts.get("masks", 0))
    waits += 2 * job.tokens * (c.hidden_size + c.vocab_size / plan.tp) * has_head
    most = max(f * layers * kept + w * waits for f, w in in_flight(job)[stage])
    # Recomputation brings all activations back, of one layer at a time.
    held["activations"] = most + stored - kept
    # In other schedules the last stage runs a microbatch's backward right after its forward.
    waiting = plan.microbatches - 1 if plan.schedule in ALL_FORWARDS_FIRST else 0
    logit = software.logits + waiting * min(4, software.logits)  # what softmax returns, float32
    held["logits"] = logit * job.tokens * c.vocab_size / plan.tp * has_head
    return held


def activations(job: Job) -> dict[str, float]:
    """Return the bytes that backward needs of a layer for one microbatch, by part: the mean."""
    return job.mean(_activations_of)


def _activations_of(job: Job) -> dict[str, float]:
    c, plan, tp, software = job.config, job.plan, job.plan.tp, job.software
    kept, again = (  # norms' results are kept, or gathered again in backward
        llama_activations(
            c, job.tokens, tp=tp, sequence=plan.sequence_parallel, overlap=overlap,
            experts=plan.expert_tensor_parallel, fused_norm=software.fused >= 1,
            fused_gate=software.fused >= 2,
        )
        for overlap in (False, plan.sequence_parallel)
    )  # fmt: skip
    share = software.gathered
    found = {part: share * b + (1 - share) * again[part] for part, b in kept.items()}
    if not job.gated:  # inputs and results of norms, and dropout's masks; no gate
        stream = job.tokens * c.hidden_size / (tp if plan.sequence_parallel else 1)
        found |= {"norms": 8 * stream, "masks": 2 * stream}
        if c.moe is None:
            found["mlp"] = 4 * job.tokens * c.intermediate_size / tp
    if not job.flash and plan.checkpointing != "selective":  # softmax's input, output and mask
        found["scores"] = 5 * job.tokens * c.num_heads / tp * job.seq_len
    return found


def in_flight(job: Job) -> list[set[tuple[float, float]]]:
    """Return pairs of what each rank of the pipeline keeps at once, in microbatches, in any order.

    A pair counts the microbatches that wait for backward, and the microbatches that wait for their
    weight gradients only.
    """
    p, m, name = job.plan.pp, job.plan.microbatches, job.plan.schedule
    if name not in ALL_FORWARDS_FIRST:
        m = min(m, 4 * p + m % p)  # then the schedule repeats itself
    return _count(name, p, m, job.chunks if name in LOOPED else None)


@cache
def _count(name: str, p: int, m: int, v: int | None) -> list[set[tuple[float, float]]]:
    try:
        schedule, found = make(name, p, m, v), []
    except ValueError:  # no schedule: `Plan.problem` says why
        return [{(p, 0)}] * p
    v = len(schedule.stages_on(0)) // schedule.copies
    for row in schedule.actions:
        live = owed = 0
        pairs = set()
        for action in row:
            live += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            owed += {"I": 1, "W": -1}.get(action.kind, 0)
            pairs.add((live / v, owed / v))
        found.append(pairs)
    return found
