"""What does a step cost? The time of a plan in closed form, by part.

Idea.   A step is its products, attention and elementwise bytes at the speeds of `hardware.py`, the
        collectives of tensor, context and expert parallelism between them, the pipeline's bubble,
        what of data parallelism nothing hides, and the optimizer. `planner.py` ranks thousands of
        plans by it; `validate.py` says how wrong it is.
Math.   A layer takes, forward or backward, no less than the host needs to launch it:

            t = max(products + attention + passes * bytes / bandwidth + collectives, host)

        A rank of the pipeline takes the t of its layers, the last one the head's as well. With M
        microbatches, and a schedule that leaves a share b of 1F1B's bubble,

            step = M max(t) + b (sum(t) - max(t)) + exposed + optimizer + fixed

        ZeRO 0 and 1 reduce once, beside the last backward, ZeRO 2 beside that of each microbatch;
        of it, `exposed` hides behind nothing. ZeRO 3 gathers twice and reduces once per microbatch
        beside the computing of each layer, and moves what it sends of layers through memory,
        `copies` bytes of a parameter, in which nothing else is computed. Others add each
        microbatch's gradients to a sum, which is read and written.
Fitted. The numbers of `hardware.Software`, to published runs (`validate.py`).
Source. Narayanan et al. 2021 (arXiv 2104.04473), section 2, for pipelines.

Limits: no stragglers, no other users of a network. Layers with experts and without take their mean
time on all ranks of a pipeline. `footprint.py` has the memory of the same plans.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from minipar.parallel import expert
from minipar.sim import footprint
from minipar.sim.hardware import BYTES, Machine
from minipar.sim.job import V_SHAPED, Job

PAIRED_HIDDEN = 0.8
"""Share of the all-to-alls of a whole step that pairs of a forward and a backward hide, at most.

On emulated devices one pair hides 87 %, and a step of 8 microbatches 69 %: half of its slots are no
pairs (`lab.bench.expert_overlap`). With 120 microbatches on 16 stages a third of them is none.
"""
LOGITS = 12
"""Bytes of a logit that the loss writes: in 16 bits, in float32, its gradient, and between."""
AXES = ("tp", "cp", "ep", "pp", "dp")


def seconds(job: Job) -> dict[str, float]:
    """Return the seconds of a step by what they go to; their sum is the step's.

    compute, host (waiting for launches), optimizer, fixed, bubble, and the exposed communication
    of each axis in `AXES`.
    """
    plan, software = job.plan, job.software
    forward, backward = _layer(job, False), _layer(job, True)
    weights = backward["host"] / 2  # of what a backward waits for its launches, half is for these
    again = {"none": 0, "selective": software.selective, "full": 1}[plan.checkpointing]
    backward = {part: backward[part] + again * forward[part] for part in backward}
    if plan.checkpointing == "selective" and software.kept < 1:
        # What norms return is gathered again: half of what forward sends.
        backward["tp"] += plan.sequence_parallel * max(0.0, 0.5 - again) * forward["tp"]
        if not again:  # products are kept, and neither what is between them nor rows of experts
            kinds = [(share, kind, _products(kind)) for share, kind in job.kinds()]
            backward["compute"] += sum(share * _between(*kind) for share, *kind in kinds)
            backward["ep"] += forward["ep"]
    once = {part: forward[part] + backward[part] for part in forward}
    group = job.dp * plan.cp
    layer, experts, words = footprint.parameters(job)
    layers = job.layers()
    is_tied = plan.pp == 1 and job.config.tie_embeddings
    tables = [(sum(job.ends(rank)) - is_tied) * words for rank in range(plan.pp)]
    if plan.zero == 3 and group > 1:
        with_tables = layer + max(tables) / max(layers)
        gather = _over_dp(job, "all_gather", 2, with_tables, experts)
        reduce = _over_dp(job, "reduce_scatter", software.reduced, with_tables, experts)
        pairs = (gather, forward), (gather + reduce, backward)
        waits = sum(max(0.0, sent - sum(parts.values())) for sent, parts in pairs)
        once["dp"] = waits + _touch(job, software.copies * layer)
    table = 4 * _touch(job, job.tokens * job.config.hidden_size * 2) * (plan.pp > 1)
    ends = [first * table + last * _head(job) for first, last in map(job.ends, range(plan.pp))]
    if plan.schedule == "dualpipe":  # where half of the microbatches enter, the others end
        ends = [half / 2 for half in ends]
    each = [n * sum(once.values()) + end for n, end in zip(layers, ends, strict=True)]
    slowest = max(range(plan.pp), key=each.__getitem__)
    m = plan.microbatches
    total = {part: m * layers[slowest] * value for part, value in once.items()}
    total["compute"] += m * (each[slowest] - layers[slowest] * sum(once.values()))
    # The gradients of weights are products alone, as many as in a forward.
    weights += sum(share * sum(_products(kind)[:4]) for share, kind in job.kinds())
    bubble = job.bubble(weights / sum(once.values()))
    total |= {"bubble": bubble * (sum(each) - each[slowest]), "pp": 0.0}
    if plan.pp > 1:
        steps = m * job.chunks + bubble * (plan.pp - 1)
        total["pp"] = 2 * steps * _to_next_stage(job) + _tie(job, software.gradients * words)
    mine = max(n * layer + own for n, own in zip(layers, tables, strict=True))
    shared = max(layers) * experts
    if group > 1 and plan.zero < 3:
        verb = "reduce_scatter" if plan.zero else "all_reduce"
        reduce = _over_dp(job, verb, software.gradients, mine, shared)
        hidden = min(reduce, layers[0] * sum(backward.values()))
        times = m if plan.zero == 2 else 1
        total["dp"] += times * (reduce - (1 - software.exposed) * hidden)
        if plan.zero:
            total["dp"] += _over_dp(job, "all_gather", software.weights, mine, shared)
    if plan.sequence_parallel and job.experts_cut < plan.tp:
        # Whole experts on ranks of tp that hold different tokens: their gradients are a sum.
        copied = shared * (job.experts_apart > 1)  # not those that are on one rank of tp alone
        summed = copied / (job.experts_copies if plan.zero else 1)
        summed += max(layers) * footprint.shared_experts(job) / (group if plan.zero else 1)
        total["tp"] += job.collective("all_reduce", software.gradients * summed, 1, plan.tp)
    # Adam reads and writes its state, reads a gradient and writes a weight; clipping reads it too.
    shard = footprint.shard(job, mine, shared) if plan.zero else mine
    total["optimizer"] = _touch(job, shard * (2 * software.optimizer + 2 * software.gradients))
    return total | {"fixed": software.fixed}


def _to_next_stage(job: Job) -> float:
    """Return the seconds of a message to the next stage: the mean of near ones and far ones."""
    plan, machine = job.plan, job.machine
    message = 2 * job.tokens * job.config.hidden_size
    message /= plan.tp if plan.sequence_parallel or job.software.scattered else 1
    ranks = plan.num_ranks // plan.pp
    # Of the stages that share a node, the last one alone sends out of it.
    leave = min(1.0, ranks / machine.gpus) if plan.num_ranks > machine.gpus else 0.0
    found = leave * _of_a_stage(job).seconds_of_collective("send", message, 2, 2)
    if leave < 1:
        found += (1 - leave) * machine.seconds_of_collective("send", message, 2)
    return found


def _tie(job: Job, num_bytes: float) -> float:
    """Return the seconds in which the first and the last stage add up gradients of their table.

    They do after the last backward, beside which nothing else is left to do.
    """
    plan = job.plan
    if not job.config.tie_embeddings or plan.schedule in V_SHAPED:  # one table, on one rank
        return 0.0
    if plan.num_ranks <= job.machine.gpus:
        return job.machine.seconds_of_collective("all_reduce", num_bytes, 2)
    return _of_a_stage(job).seconds_of_collective("all_reduce", num_bytes, 2, 2)


def _of_a_stage(job: Job) -> Machine:
    """Return the machine as ranks of one stage see it: they share a node's port, and no others."""
    ranks = job.plan.num_ranks // job.plan.pp
    return replace(job.machine, gpus=min(ranks, job.machine.gpus))


def _over_dp(job: Job, verb: str, width: float, numbers: float, experts: float) -> float:
    """Return the seconds of a collective over the ranks that have the same parameters.

    `experts` of these numbers are those of experts, which fewer ranks have.
    """
    plan, copies = job.plan, job.experts_copies
    found = job.collective(verb, width * (numbers - experts), plan.tp, job.dp * plan.cp)
    if experts and copies > 1:
        apart = job.experts_apart * job.experts_over
        found += job.collective(verb, width * experts, apart, copies)
    return found


class _Products(NamedTuple):
    """Of a layer, in a forward: the seconds of products, and sizes for what is beside them."""

    attention: float
    router: float
    dense: float  # the MLP, or shared experts
    experts: float
    hidden: float  # width of the dense ones, on a rank, for a token of its sequences
    touched: float  # numbers per token that experts read and write
    own: float  # tokens of whole experts
    cut: int  # ranks over which experts are cut


def _products(job: Job) -> _Products:
    c, plan, n, device = job.config, job.plan, job.tokens, job.machine.device
    width, tp = c.hidden_size, plan.tp

    def product(outputs: float, inputs: float, tokens: float = n, batch: float = 1) -> float:
        return device.seconds_of_matmul(tokens, outputs, inputs, job.dtype, batch=batch)

    queries, keys = _heads(job)
    attention = product(queries + 2 * keys, width) + product(width, queries)
    ups = 2 if job.gated else 1
    hidden, touched, router, experts, cut, own = c.intermediate_size / tp, 0.0, 0.0, 0.0, tp, n
    if c.moe is not None:
        cut = job.experts_cut
        own = n / tp if cut < tp and plan.sequence_parallel else n  # tokens of whole experts
        chosen, held = own * c.moe.top_k, max(1, c.moe.num_experts / job.experts_over)
        f = c.moe.expert_size / cut
        chosen *= job.busiest
        dtype = "fp32" if job.software.exact_router else job.wide
        router = device.seconds_of_matmul(own, c.moe.num_experts, width, dtype)
        experts = product(ups * f, width, chosen / held, held)
        experts += product(width, f, chosen / held, held)
        hidden = c.moe.num_shared * f
        touched = (job.software.rows * width + 8 * f) * chosen / n
    dense = product(ups * hidden, width, own) + product(width, hidden, own) if hidden else 0.0
    return _Products(attention, router, dense, experts, hidden * own / n, touched, own, cut)


def _heads(job: Job) -> tuple[float, float]:
    """Return the widths of queries, and of keys or values, on a rank of tp."""
    c, tp = job.config, job.plan.tp
    return c.num_heads * c.head_dim / tp, max(c.num_kv_heads / tp, 1) * c.head_dim


def _layer(job: Job, backward: bool) -> dict[str, float]:
    """Return the seconds of a layer in one direction, by part: the mean of all."""
    return footprint.mean(job, lambda kind: _layer_of(kind, backward))


def _layer_of(job: Job, backward: bool) -> dict[str, float]:
    """Return the seconds of a layer in one direction, by part, where all are alike."""
    c, plan, n = job.config, job.plan, job.tokens
    device, times = job.machine.device, 2 if backward else 1
    width, tp = c.hidden_size, plan.tp
    queries, keys = _heads(job)
    products = _products(job)
    _, _, dense, experts, _, _, own, cut = products
    compute = sum(products[:4])
    kernel = "cudnn" if job.software.cudnn and "cudnn" in device.attention else ""
    # A ring computes cp pieces of a square each, and adds up their results in float32.
    pieces = plan.cp if plan.context == "ring" else 1
    attention = device.seconds_of_attention(
        job.microbatch * pieces, c.num_heads / tp, job.seq_len / plan.cp, job.seq_len / pieces,
        c.head_dim, job.wide, backward=backward, kernel=kernel if job.flash else "unfused",
    )  # fmt: skip
    attention *= job.software.attention if job.flash else 1
    attention += _touch(job, 12 * times * (pieces - 1) * n * (queries + (times - 1) * keys))
    if backward and plan.checkpointing == "selective" and not job.flash:
        attention *= 1.5
    parts = {"compute": times * (compute + _between(job, products)) + attention}
    if backward:
        parts["compute"] += _sum_up(job, footprint.parameters(job)[0])
        if plan.sequence_parallel:  # beyond the part of a sequence, which `touched` has
            parts["compute"] += _touch(job, 2 * n * job.software.whole * width * (1 - 1 / tp))
    parts |= dict.fromkeys(AXES, 0.0)
    if tp > 1:
        parts["tp"] = (1 + (cut == tp)) * _over_tp(job, 2 * n * width)
        if job.software.beside or plan.tp_overlap:  # tp hops, but for one beside part of a product
            parts["tp"] -= min((1 - 1 / tp) * parts["tp"], times * compute)
    if plan.cp > 1:
        parts["cp"] = _context(job, attention, times, queries, keys)
    if job.experts_over > 1 and c.moe is not None:
        halves = 2 if plan.dispatch == "halves" else 1
        trip = _trip(job, own / halves)
        parts["ep"] = _trips(plan.dispatch, halves, trip, times * dense, times * experts)
        if plan.dispatch == "paired":  # a forward and a backward, which is twice as long
            beside = 1.5 / times * parts["compute"]
            parts["ep"] -= min(PAIRED_HIDDEN * parts["ep"], beside)
    return parts | {"host": max(0.0, host(job) - sum(parts.values()))}


def _between(job: Job, products: _Products) -> float:
    """Return the seconds of what a layer computes between its products, in a forward."""
    plan, software, width = job.plan, job.software, job.config.hidden_size
    (queries, keys), hidden, touched = _heads(job), products.hidden, products.touched
    # Two norms and two residual sums of the stream, and what becomes of the hidden layer. A Llama
    # rotates queries and keys, and multiplies by a gate; a GPT has neither, but may have dropout's
    # masks, and biases, whose gradients are sums of those of all outputs: half of them per way.
    touched += 10 * width / (plan.tp if plan.sequence_parallel else 1)
    touched += 4 * (queries + keys) + 5 * hidden if job.gated else 2 * hidden
    if not job.gated:
        touched += software.biases * (2 * width + (queries + 2 * keys + hidden) / 2)
    if not job.flash:  # its result is put in the order of tokens
        touched += 2 * queries
    if job.wide != job.dtype:  # operands are written in so few bits, for rows and for columns
        touched += (1 + BYTES[job.dtype]) * (queries + 2 * width + hidden)
    moved = _touch(job, 2 * job.tokens * touched * software.passes)
    launched = software.launched + software.routed * (job.config.moe is not None)
    return moved + launched * job.machine.device.launch


def host(job: Job) -> float:
    """Return the seconds that a host needs to launch a layer, in one direction."""
    plan, software = job.plan, job.software
    far = plan.pp > 1 and plan.num_ranks > job.machine.gpus
    return software.host + math.log2(plan.tp) * (software.host_tp + software.host_across * far)


def _over_tp(job: Job, num_bytes: float) -> float:
    """Return the seconds in which tp gathers the stream and sums it up; with tp_overlap, by hops.

    `num_bytes` are the stream's. Each hop is a message of a tp-th of it to the next rank.
    """
    tp = job.plan.tp
    if not job.plan.tp_overlap:
        return job.collective("all_reduce", num_bytes, 1, tp)
    nodes = 1 + (job.spread(1, tp) > 1)
    return 2 * (tp - 1) * job.machine.seconds_of_collective("send", num_bytes / tp, 2, nodes)


def _trip(job: Job, tokens: float) -> float:
    """Return the seconds in which rows of so many tokens go to experts, or back: the mean."""
    moe, plan, ep, apart = job.config.moe, job.plan, job.experts_over, job.experts_apart
    # To experts in 8 bits, and back in 16 (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).
    token = (1.5 if job.dtype == "fp8" else 2) * job.config.hidden_size * tokens
    if plan.dispatch == "gather":
        verbs = ("all_gather", "reduce_scatter")
        return sum(job.collective(verb, ep * token, apart, ep) for verb in verbs) / 2
    # The whole tensor of an all-to-all is what one rank deals out.
    slots = moe.top_k * job.busiest * token
    nodes = job.spread(apart, ep) if job.software.per_node else plan.expert_nodes
    if nodes == 1:
        return job.collective("all_to_all", slots, apart, ep)
    copies = expert.nodes_touched(moe.num_experts, moe.top_k, nodes) * token
    across = job.collective("all_to_all", copies, apart * ep // nodes, nodes)
    inside = job.collective("all_to_all", slots, apart, ep // nodes)
    return max(across, inside) if job.software.per_node else across + inside


def _trips(dispatch: str, parts: int, trip: float, dense: float, experts: float) -> float:
    """Return what a layer waits for rows that travel to experts and back, in so many parts.

    As `parallel.expert.overlapped`: `dense`, the shared experts, compute while they travel there,
    and the experts of one part while another travels; trips follow one on the other.
    """
    if dispatch not in ("overlapped", "halves"):
        return 2 * trip
    at, free = dense, parts * trip
    for part in range(parts):
        at = max(at, (part + 1) * trip) + experts / parts
        free = max(free, at) + trip
    return free - dense - experts


def _context(job: Job, attention: float, times: int, queries: float, keys: float) -> float:
    """Return what a layer waits for on cp: a ring travels beside attention, others do not."""
    cp, tokens, inner = job.plan.cp, job.tokens, job.plan.tp * job.plan.ep
    if job.plan.context == "ring":
        nodes = 1 + (job.spread(inner, cp) > 1)
        hop = job.machine.seconds_of_collective("send", 4 * times * tokens * keys, 2, nodes)
        return (cp - 1) * max(0.0, hop - attention / cp)
    if job.plan.context == "gather":
        return times * job.collective("all_gather", 4 * tokens * keys * cp, inner, cp)
    return job.collective("all_to_all", 4 * tokens * (queries + keys), inner, cp)


def _head(job: Job) -> float:
    """Return the seconds of the head and the loss, both directions."""
    words, width = job.config.vocab_size / job.plan.tp, job.config.hidden_size
    product = job.machine.device.seconds_of_matmul(job.tokens, words, width, job.wide)
    compute = 3 * product + _sum_up(job, words * width)
    return compute + _touch(job, 2 * LOGITS * job.tokens * words)


def _sum_up(job: Job, numbers: float) -> float:
    """Return the seconds in which a microbatch adds so many gradients to the sum of those before.

    A buffer takes the first ones as they are. ZeRO 3 has but a shard of it.
    """
    m, software = job.plan.microbatches, job.software
    added = (m - software.buffered) / m * software.added * (job.plan.zero < 3)
    return _touch(job, added * numbers)


def _touch(job: Job, num_bytes: float) -> float:
    device = job.machine.device
    return num_bytes / (device.memory_bandwidth * device.memory_efficiency)
