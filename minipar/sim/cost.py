"""The time of a step of a plan in closed form, by part.

Idea.   A step is its products, attention and elementwise bytes at the speeds of `hardware.py`, the
        collectives of tensor, context and expert parallelism between them, the pipeline's bubble,
        the exposed part of data parallelism, and the optimizer. `planner.py` ranks thousands of
        plans by it; `validate.py` prints its errors on published runs.
Math.   A layer takes, forward or backward, no less than the host needs to launch it:

            t = max(products + attention + passes * bytes / bandwidth + collectives, host)

        A rank of the pipeline takes the sum of t over its layers, and the last rank also the head.
        Each rank waits for a message from either side. With M microbatches, and a schedule that
        leaves a share b of 1F1B's bubble,

            step = M max(t) + b (sum(t) - max(t)) + exposed + optimizer + fixed

        Gradients travel in buckets, and each bucket pays the latency of a collective. ZeRO 0 and 1
        reduce once, beside the last backward. ZeRO 2 reduces in the backward of each microbatch.
        The share `exposed` of this time is never hidden. ZeRO 1 and 2 gather weights beside the
        next forward, or before it in software that has `waited`. ZeRO 3 gathers twice and reduces
        once per microbatch, beside the computing of each layer, and copies all that it sends
        through memory, `copies` bytes per parameter. The others add gradients to a sum.
Fitted. Some numbers of `hardware.Software`, to published runs.
Source. Narayanan et al. 2021 (arXiv 2104.04473), section 2, for pipelines.

Limits: no stragglers, no other users of a network. All ranks of a pipeline take the mean time of
layers with experts and without. All experts get the same number of tokens. Every dispatch but
"paired" is priced as one all-to-all each way; context parallelism is a ring. `footprint.py` has the
memory of the same plans.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from minipar.parallel.pipeline.schedules import LOOPED
from minipar.sim.hardware import BYTES, Machine
from minipar.sim.job import Job

PAIRED_HIDDEN = 0.8
"""Share of the all-to-alls of a whole step that pairs of a forward and a backward hide, at most.

On emulated devices one pair hides 87 %, and a step of 8 microbatches 69 %: half of its slots are no
pairs (`lab.bench.expert_overlap`). On 16 stages, 120 microbatches leave a third without pairs.
"""
LOGITS = 12
"""Bytes of a logit that the loss writes: in 16 bits, in float32, its gradient, and between."""
AXES = ("tp", "cp", "ep", "pp", "dp")


def seconds(job: Job) -> dict[str, float]:
    """Return the seconds of a step by part; their sum is the step.

    compute, host (waiting for launches), optimizer, fixed, bubble, and the exposed communication
    of each axis in `AXES`.
    """
    plan, software, m = job.plan, job.software, job.plan.microbatches
    forward, backward = layer(job, False), layer(job, True)
    # Half of a backward's waits for launches belong to the gradients of weights.
    weights = backward["host"] / 2 + sum(
        share * _products(kind).seconds for share, kind in job.kinds
    )
    again = {"none": 0, "selective": software.selective, "full": 1}[plan.checkpointing]
    backward = {part: backward[part] + again * forward[part] for part in backward}
    once = {part: forward[part] + backward[part] for part in forward}
    ways = sum(forward.values()), sum(backward.values())
    if plan.zero == 3 and job.group > 1:
        once["dp"] = _sharded_layer(job, *ways)
    each = [n * sum(once.values()) + end for n, end in zip(job.layers, _ends(job), strict=True)]
    slowest = max(range(plan.pp), key=each.__getitem__)
    total = {part: m * job.layers[slowest] * value for part, value in once.items()}
    total["compute"] += m * each[slowest] - sum(total.values())
    bubble = job.bubble(weights / sum(once.values()))
    total |= {"bubble": bubble * (sum(each) - each[slowest]), "pp": 0.0}
    if plan.pp > 1:
        hops, around = _hops(job)
        # A rank waits for a message from either side, as it posts receives when it needs them.
        sides = zip(each, [around, *hops], [*hops, around], strict=True)
        pace = max(busy + job.chunks * (before + after) for busy, before, after in sides)
        # Before the first backward, forwards wait for one message after the other.
        ahead = max((plan.pp - 1 - stage) * hop for stage, hop in enumerate(hops))
        total["pp"] = m * (pace - each[slowest]) + bubble * max(2 * sum(hops), ahead)
        if job.config.tie_embeddings and not all(job.tables(0)):  # the ends sum its gradients
            nodes, table = 1 + (plan.num_ranks > job.machine.gpus), 4 * job.parameters.table
            total["pp"] += message(job.machine, table, nodes, plan.num_ranks // plan.pp)
    mine, experts = max(map(job.numbers, range(plan.pp)))  # of the fullest rank
    # Stages reduce their gradients at the same time, and equal stages wait equally long.
    alike = {job.numbers(n): n for n in range(plan.pp)}
    total["dp"] += max(_reductions(job, n, *ways) for n in alike.values())
    if plan.sequence_parallel and job.experts_cut < plan.tp:
        total["tp"] += _sum_of_whole_experts(job, experts)
    # Adam reads and writes its state, writes a weight, reads a gradient; clipping reads this, too.
    shard = job.shard(mine, experts) if plan.zero else mine
    total["optimizer"] = _touch(job, shard * 32)
    return total | {"fixed": software.fixed}


# ---------------------------------------------------------------------- data parallelism
def _reductions(job: Job, stage: int, forward: float, backward: float) -> float:
    """Return the exposed seconds of a stage's gradients, and of the weights that ZeRO gathers.

    `forward` and `backward`: seconds of one layer, beside which collectives can run.
    """
    plan, software, layers = job.plan, job.software, job.layers[stage]
    if job.group == 1 or plan.zero == 3:
        return 0.0
    numbers, verb = job.numbers(stage), "reduce_scatter" if plan.zero else "all_reduce"
    reduce, last = _over_dp(job, verb, 4, numbers, job.bucket)
    # No backward is left beside the last call, and no call is ready beside the first backward.
    hidden = (1 - max(software.exposed, last)) * min(reduce, (1 - last) * layers * backward)
    found = (reduce - hidden) * (plan.microbatches if plan.zero == 2 else 1)
    if plan.zero:
        gather, first = _over_dp(job, "all_gather", 2, numbers, job.bucket)
        hidden = (1 - max(software.waited, first)) * min(gather, (1 - first) * layers * forward)
        found += gather - hidden
    return found


def _sharded_layer(job: Job, forward: float, backward: float) -> float:
    """Return what ZeRO 3 adds to a layer: waits for weights and gradients, and copies of them."""
    fullest = max(map(job.numbers, range(job.plan.pp)))
    numbers, experts = (number / max(job.layers) for number in fullest)
    gather, reduce = (
        _over_dp(job, verb, width, (numbers, experts), math.inf)[0]
        for verb, width in (("all_gather", 2), ("reduce_scatter", 4))
    )
    waits = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
    return waits + _touch(job, job.software.copies * job.parameters.layer)


def _over_dp(
    job: Job, verb: str, width: float, numbers: tuple[float, float], bucket: float
) -> tuple[float, float]:
    """Return the seconds of collectives over ranks with the same weights, and the longest's share.

    `numbers`: how many numbers to send, and how many of them belong to experts, which fewer ranks
    have. Each has `width` bytes. A collective has at most a `bucket` of them, or one larger matrix.
    """
    plan, (whole, experts), layers = job.plan, numbers, max(job.layers)
    apart, found, longest = job.experts_apart * job.experts_over, 0.0, 0.0
    for count, matrices, inner, size in (
        (whole - experts, 7 * layers + 2, plan.tp, job.group),
        (experts, 2 * layers, apart, job.experts_copies),  # of all experts of a layer
    ):
        if count and size > 1:
            calls = max(1, min(math.ceil(count / bucket), matrices))
            each = job.collective(verb, width * count / calls, inner, size)
            found, longest = found + calls * each, max(longest, each)
    return found, longest / found if found else 0.0


def _sum_of_whole_experts(job: Job, experts: float) -> float:
    """Return the seconds in which ranks of tp sum gradients of experts that each has whole."""
    copied = experts * (job.experts_apart > 1)  # not those that are on one rank of tp alone
    summed = copied / (job.experts_copies if job.plan.zero else 1)
    summed += max(job.layers) * job.parameters.shared / (job.group if job.plan.zero else 1)
    return job.collective("all_reduce", 4 * summed, 1, job.plan.tp)


# ---------------------------------------------------------------------- the pipeline
def _ends(job: Job) -> list[float]:
    """Return the seconds that the embedding and the head add to a microbatch, by stage."""
    first = 4 * _touch(job, job.tokens * job.config.hidden_size * 2) * (job.plan.pp > 1)
    last = _head(job)
    found = [a * first + b * last for a, b in map(job.tables, range(job.plan.pp))]
    # Half of dualpipe's microbatches enter where the other half ends.
    return [end / 2 for end in found] if job.plan.schedule == "dualpipe" else found


def _head(job: Job) -> float:
    """Return the seconds of the head and the loss, both directions."""
    words, width = job.config.vocab_size / job.plan.tp, job.config.hidden_size
    product = job.machine.device.seconds_of_matmul(job.tokens, words, width, job.wide)
    # Cut over tp, a loss runs operation by operation, unless fused: 42 bytes instead of 24.
    moved = 2 * LOGITS + (1.5 * job.software.logits if job.plan.tp > 1 else 0)
    return 3 * product + _sum_up(job, words * width) + _touch(job, moved * job.tokens * words)


def _hops(job: Job) -> tuple[list[float], float]:
    """Return the seconds of a message from each stage to the next, and from the last to the first.

    The latter is 0, unless the schedule has loops of stages.
    """
    plan, gpus = job.plan, job.machine.gpus
    # Each rank of tp sends its part of the tokens (Narayanan et al. 2021, section 4.1).
    size = 2 * job.tokens * job.config.hidden_size / plan.tp
    ranks = plan.num_ranks // plan.pp

    def hop(first: int, other: int) -> float:
        nodes = [(first + n) // gpus == (other + n) // gpus for n in range(min(ranks, gpus))]
        return message(job.machine, size, 1 if all(nodes) else 2, ranks)

    starts = range(0, plan.num_ranks, ranks)
    around = hop(starts[-1], 0) if plan.schedule in LOOPED else 0.0
    return [hop(*pair) for pair in pairwise(starts)], around


def message(machine: Machine, num_bytes: float, nodes: int, ranks: int) -> float:
    """Return the seconds of a message to the next rank of an axis, which is `ranks` ranks away."""
    if nodes > 1:  # only these ranks share the port of the node
        machine = replace(machine, gpus=min(ranks, machine.gpus))
    return machine.seconds_of_collective("send", num_bytes, 2, nodes)


# ---------------------------------------------------------------------- a layer
class _Products(NamedTuple):
    """The forward of a layer: seconds of its products, and sizes for all other work."""

    seconds: float
    hidden: float  # width of dense hidden layers on a rank, per token of its sequences
    touched: float  # numbers per token that experts read and write
    own: float  # tokens of whole experts


def _products(job: Job) -> _Products:
    c, plan, n, device = job.config, job.plan, job.tokens, job.machine.device
    width, tp = c.hidden_size, plan.tp

    def product(outputs: float, inputs: float, tokens: float = n, batch: float = 1) -> float:
        return device.seconds_of_matmul(tokens, outputs, inputs, job.dtype, batch=batch)

    queries, keys = _heads(job)
    seconds = product(queries + 2 * keys, width) + product(width, queries)
    ups, hidden, touched, own = 2 if job.gated else 1, c.intermediate_size / tp, 0.0, n
    if c.moe is not None:
        cut = job.experts_cut
        own = n / tp if cut < tp and plan.sequence_parallel else n
        chosen, held = own * c.moe.top_k, max(1, c.moe.num_experts / job.experts_over)
        f = c.moe.expert_size / cut
        seconds += device.seconds_of_matmul(own, c.moe.num_experts, width, job.wide)  # the router
        each = chosen / held
        seconds += product(ups * f, width, each, held) + product(width, f, each, held)
        hidden = c.moe.num_shared * f
        # Rows are gathered, computed, weighed and added up, each once.
        touched = (4 * width + 8 * f) * chosen / n
    if hidden:  # of the MLP, or of shared experts
        seconds += product(ups * hidden, width, own) + product(width, hidden, own)
    return _Products(seconds, hidden * own / n, touched, own)


def _heads(job: Job) -> tuple[float, float]:
    """Return the widths of queries, and of keys or values, on a rank of tp."""
    c, tp = job.config, job.plan.tp
    return c.num_heads * c.head_dim / tp, max(c.num_kv_heads / tp, 1) * c.head_dim


def layer(job: Job, backward: bool) -> dict[str, float]:
    """Return the seconds of a layer in one direction, by part: the mean of all layers."""
    return job.mean(lambda kind: _layer_of(kind, backward))


def _layer_of(job: Job, backward: bool) -> dict[str, float]:
    """Return the seconds of a layer in one direction, by part, where all layers are alike."""
    c, plan, n = job.config, job.plan, job.tokens
    times, width, tp = 2 if backward else 1, c.hidden_size, plan.tp
    queries, keys = _heads(job)
    products = _products(job)
    # A ring computes cp pieces of a square each, and adds up their results in float32.
    length = job.seq_len / plan.cp
    attention = job.machine.device.seconds_of_attention(
        job.microbatch * plan.cp, c.num_heads / tp, length, length, c.head_dim, job.wide,
        backward=backward, fused=job.flash,
    )  # fmt: skip
    attention *= job.software.attention if job.flash else 1
    attention += _touch(job, 12 * times * (plan.cp - 1) * n * (queries + (times - 1) * keys))
    if backward and plan.checkpointing == "selective" and not job.flash:
        attention *= 1.5
    parts = {"compute": times * (products.seconds + _between(job, products)) + attention}
    if backward:
        parts["compute"] += _sum_up(job, job.parameters.layer)
    parts |= dict.fromkeys(AXES, 0.0)
    if tp > 1:
        cut = c.moe is None or job.experts_cut == tp
        parts["tp"] = (1 + cut) * job.collective("all_reduce", 2 * n * width, 1, tp)
        if (plan.tp_overlap or job.software.beside) and job.spread(1, tp) == 1:
            # Of tp hops in a node, all but one run beside a part of a product.
            parts["tp"] -= min((1 - 1 / tp) * parts["tp"], times * products.seconds)
    if plan.cp > 1:
        # A ring of messages travels beside attention.
        nodes = 1 + (job.spread(plan.tp * plan.ep, plan.cp) > 1)
        # Keys and values in 16 bits; and in backward their gradients, in float32.
        num_bytes = (12 if backward else 4) * n * keys
        hop = message(job.machine, num_bytes, nodes, plan.tp * plan.ep)
        parts["cp"] = (plan.cp - 1) * max(0.0, hop - attention / plan.cp)
    if job.experts_over > 1 and c.moe is not None:
        parts["ep"] = 2 * _trip(job, products.own)
        if plan.dispatch == "paired":  # a forward, and a backward twice as long
            beside = 1.5 / times * parts["compute"]
            parts["ep"] -= min(PAIRED_HIDDEN * parts["ep"], beside)
    return parts | {"host": max(0.0, host(job) - sum(parts.values()))}


def _between(job: Job, products: _Products) -> float:
    """Return the seconds that a forward of a layer computes between its products."""
    plan, width = job.plan, job.config.hidden_size
    (queries, keys), hidden, touched = _heads(job), products.hidden, products.touched
    # Two norms, two residual sums of the stream, and the hidden layer. A Llama rotates queries and
    # keys, and multiplies by a gate. A GPT does neither, but may have masks of dropout, and biases:
    # the gradient of a bias sums the gradients of its outputs. Half is counted in each direction.
    touched += 10 * width / (plan.tp if plan.sequence_parallel else 1)
    touched += 4 * (queries + keys) + 5 * hidden if job.gated else 2 * hidden
    if not job.gated:
        touched += job.software.biases * (2 * width + (queries + 2 * keys + hidden) / 2)
    if not job.flash:  # its result is put in the order of tokens
        touched += 2 * queries
    if job.wide != job.dtype:  # operands are written in fewer bits, by rows and by columns
        touched += (1 + BYTES[job.dtype]) * (queries + 2 * width + hidden)
    return _touch(job, 2 * job.tokens * touched * job.software.passes)


def host(job: Job) -> float:
    """Return the seconds that a host needs to launch a layer, in one direction."""
    plan, software = job.plan, job.software
    far = plan.pp > 1 and plan.num_ranks > job.machine.gpus
    return software.host + math.log2(plan.tp) * (software.host_tp + software.host_across * far)


def _trip(job: Job, tokens: float) -> float:
    """Return the mean seconds in which the rows of `tokens` tokens go to experts, or back."""
    # To experts in 8 bits, and back in 16 (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).
    token = (1.5 if job.dtype == "fp8" else 2) * job.config.hidden_size * tokens
    # The whole tensor of an all-to-all is what one rank sends.
    rows = job.config.moe.top_k * token
    return job.collective("all_to_all", rows, job.experts_apart, job.experts_over)


def _sum_up(job: Job, numbers: float) -> float:
    """Return the seconds in which a microbatch adds its gradients to those of earlier ones.

    This is the mean of all microbatches. It is 0 under ZeRO 3, which has one shard of the sum.
    """
    m, software = job.plan.microbatches, job.software
    moved = ((m - 1) * software.added + software.first) / m
    return _touch(job, moved * (job.plan.zero < 3) * numbers)


def _touch(job: Job, num_bytes: float) -> float:
    device = job.machine.device
    return num_bytes / (device.memory_bandwidth * device.memory_efficiency)
