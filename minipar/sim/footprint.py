"""Does a plan fit? What the fullest of its ranks holds, in closed form, by part.

Idea.   Weights, gradients and optimizer state follow from parameters, as `memory.model_state` has
        it, with the bytes per parameter of a software family. Activations are those of a layer,
        times the layers, times the microbatches that a schedule has in flight at its fullest.
Math.   A rank of the pipeline with n layers keeps of each what recomputation leaves, k bytes, and
        what weight gradients that are put off wait for, w:

            activations = max(f n k + o w)    over the pairs (f, o) of `in_flight`

        and of one layer at a time all that was not kept.
Fitted. Some numbers of `hardware.Software`, to published runs (`validate.py`), and `HEADROOM`.
Source. Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for activations.

Limits: no allocator under pressure. `cost.py` has the time of the same plans.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from minipar.parallel.pipeline.schedules import LOOPED, make
from minipar.sim.hardware import Device
from minipar.sim.job import Job

HEADROOM = 0.78
"""Share of a device that a plan may fill: two fuller ones took four and eight times as long."""
WAITING = 4
"""Bytes of a logit that the loss keeps for its backward, at most: what softmax returns, float32."""
ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")


def room(device: Device) -> float:
    """Return the bytes of a device that a plan may fill."""
    return min(HEADROOM * device.memory, device.usable_memory())


def parameters(job: Job) -> tuple[float, float, float]:
    """Return a rank's parameters before ZeRO: a layer's, of these experts', and a table's.

    The table is the embedding, or the head; a layer is the mean of all.
    """
    whole, experts, matrices = 0.0, 0.0, 2 + job.gated
    for share, kind in job.kinds():
        c = kind.config
        layer = float(c.layer_parameters())
        if c.moe is None:
            layer -= (3 - matrices) * c.intermediate_size * c.hidden_size
        else:
            one = c.moe.expert_size * c.hidden_size
            layer -= 3 * (c.moe.num_experts + c.moe.num_shared) * one
            each = c.moe.num_experts * one / (job.experts_over * job.experts_cut)
            experts += share * matrices * each
        whole += share * layer
    c, tp = job.config, job.plan.tp
    layer = whole / tp + shared_experts(job) + experts
    return layer, experts, c.vocab_size * c.hidden_size / tp


def shared_experts(job: Job) -> float:
    """Return how many of a layer's parameters on a rank are of shared experts: cut as others are.

    A layer is the mean of all.
    """
    moe = job.config.moe
    if moe is None:
        return 0.0
    sparse = sum(share for share, kind in job.kinds() if kind.config.moe is not None)
    width = sparse * moe.num_shared * moe.expert_size
    return width * (2 + job.gated) * job.config.hidden_size / job.experts_cut


def mean(job: Job, numbers_of: Callable[[Job], dict[str, float]]) -> dict[str, float]:
    """Return the mean over all layers, with experts and without, of a layer's numbers."""
    total: dict[str, float] = defaultdict(float)
    for share, kind in job.kinds():
        for part, number in numbers_of(kind).items():
            total[part] += share * number
    return dict(total)


def shard(job: Job, numbers: float, experts: float) -> float:
    """Return how many of a rank's numbers are left to it where all that have them share them."""
    return (numbers - experts) / (job.dp * job.plan.cp) + experts / job.experts_copies


def memory(job: Job) -> dict[str, float]:
    """Return the bytes of the fullest rank: weights, gradients, optimizer, activations, logits."""
    moe = job.config.moe
    if moe is not None and job.plan.pp > 1:  # some rank may have no layer without experts
        is_even = not any(layers / job.chunks % moe.every for layers in job.layers())
        moe = replace(moe, first_dense=0, every=moe.every if is_even else 1)
        job = replace(job, config=replace(job.config, moe=moe))
    ranks = (_memory_of(job, stage, layers) for stage, layers in enumerate(job.layers()))
    return max(ranks, key=lambda held: sum(held.values()))


def _memory_of(job: Job, stage: int, layers: float) -> dict[str, float]:
    plan, software, c = job.plan, job.software, job.config
    layer, experts, table = parameters(job)
    has_embedding, has_head = job.ends(stage)
    tables = has_embedding + has_head - (plan.pp == 1 and c.tie_embeddings)
    copies = 2 if plan.schedule == "dualpipe" else 1
    mine, shared = copies * layers * layer + tables * table, copies * layers * experts
    cut = shard(job, mine, shared)
    # With activations at their highest there are no gradients yet, unless of microbatches before.
    freed = plan.microbatches == 1 and not software.buffered
    # The shards of ZeRO 3 are the float32 weights that all others have in the optimizer's state.
    gathered = 4 * layer + 2 * table * has_head
    held = {
        "weights": gathered if plan.zero == 3 else software.weights * mine,
        "gradients": software.gradients * (cut if plan.zero >= (1 if freed else 2) else mine),
        "optimizer": software.optimizer * (cut if plan.zero else mine),
    }
    stored = sum(activations(job).values())
    inputs = 2 * job.tokens * c.hidden_size / (plan.tp if plan.sequence_parallel else 1)
    kept = {"none": stored, "selective": software.kept * stored, "full": inputs}[plan.checkpointing]
    waits = layers * sum(share * _put_off(kind) for share, kind in job.kinds())
    waits += 2 * job.tokens * (c.hidden_size + c.vocab_size / plan.tp) * has_head
    most = max(f * layers * kept + w * waits for f, w in in_flight(job)[stage])
    # Of one layer at a time all is there again.
    held["activations"] = most + stored - kept
    # Others have the backward of a microbatch's last stage right after its forward.
    waiting = plan.microbatches - 1 if plan.schedule in ALL_FORWARDS_FIRST else 0
    logit = software.logits + waiting * min(WAITING, software.logits)
    held["logits"] = logit * job.tokens * c.vocab_size / plan.tp * has_head
    if freed and job.dp * plan.cp * plan.pp == 1:  # no buckets: gradients come as the others go
        going = held["activations"] + held["logits"]
        held["gradients"] = max(0.0, held["gradients"] - going)
    return held


def activations(job: Job) -> dict[str, float]:
    """Return the bytes that backward needs of a layer for one microbatch, by part.

    As `memory.llama_activations`, but as software on GPUs does it: norms may keep float32 beside 16
    bits, unfused gates keep their silu, and sequence parallelism leaves some of what it gathers
    whole. Rows of experts are kept as they come and as they go. Of a GPT layer, dropout's masks;
    without flash attention, softmax's input and output and its mask, T x T each. The mean of all.
    """
    return mean(job, _activations_of)


def _activations_of(job: Job) -> dict[str, float]:
    c, plan, tp = job.config, job.plan, job.plan.tp
    fused, whole = job.software.fused, job.software.gathered * plan.sequence_parallel
    norms = job.software.norms if job.gated else 5
    heads = 2 * c.num_heads / tp + 2 * max(c.num_kv_heads / tp, 1)
    numbers = {
        "norms": c.hidden_size * ((norms - whole) / (tp if plan.sequence_parallel else 1) + whole),
        "attention": heads * c.head_dim,
        "mlp": (4 - fused if job.gated else 2) * _hidden(job),
    }
    if c.moe is not None:
        own = tp if job.experts_cut < tp and plan.sequence_parallel else 1
        numbers["rows"] = 2 * c.moe.top_k * job.busiest * c.hidden_size / own
    if not job.flash and plan.checkpointing != "selective":
        numbers["scores"] = 2.5 * c.num_heads / tp * job.seq_len
    return {part: 2 * job.tokens * n for part, n in numbers.items()}


def _hidden(job: Job) -> float:
    """Return the width of a rank's MLP for a token; with experts, where most rows are."""
    c, moe, tp = job.config, job.config.moe, job.plan.tp
    if moe is None:
        return c.intermediate_size / tp
    width = (moe.top_k * job.busiest + moe.num_shared) * moe.expert_size
    # Whole experts compute the tokens of a rank: its part of a sequence, or all of it.
    return width if job.experts_cut < tp and not job.plan.sequence_parallel else width / tp


def _put_off(job: Job) -> float:
    """Return the bytes that a layer's weight gradients wait for, where schedules put them off.

    They are the inputs of its products, and the gradients of what these return.
    """
    c, plan, tp = job.config, job.plan, job.plan.tp
    whole = job.software.gathered if plan.sequence_parallel else 2
    width = c.hidden_size * (whole + (2 - whole) / tp + 2)
    heads = 2 * (c.num_heads + max(c.num_kv_heads, tp)) * c.head_dim
    return 2 * job.tokens * (width + heads / tp + (2 + job.gated) * _hidden(job))


def in_flight(job: Job) -> list[set[tuple[float, float]]]:
    """Return what each rank of the pipeline keeps at its fullest, in microbatches, in any order.

    These are pairs: microbatches whose backward is to come, and those of which weight gradients
    alone are.
    """
    p, m, name = job.plan.pp, job.plan.microbatches, job.plan.schedule
    if name in ALL_FORWARDS_FIRST:
        return [{(m, 0)}] * p
    # After 4 p microbatches all goes on as before.
    return _count(name, p, min(m, 4 * p + m % p), job.chunks if name in LOOPED else None)


@cache
def _count(name: str, p: int, m: int, v: int | None) -> list[set[tuple[float, float]]]:
    try:
        schedule, found = make(name, p, m, v), []
    except ValueError:  # there is none: `Plan.problem` says why
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
