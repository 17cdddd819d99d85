"""A cost model in ten lines: the seconds of a step by part, held against the planner's.

Compute, the sums of tensor parallelism, the bubble, and the gradients that nothing hides. Norms,
launches, the optimizer and messages between stages are left out.
Source: `minipar/sim/cost.py`; Narayanan et al. 2021 (arXiv 2104.04473), section 2, for pipelines.
"""

from dataclasses import replace

import torch

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.parallel.plan import Plan
from minipar.sim import cost, hardware
from minipar.sim.asked import model_config

LEVEL, MINUTES = "hard", 35
GOOD = "each part that is 2 % of a step or more is within 15 % of the planner's"
PRAISE = "Ten lines, and you can rank plans on the back of an envelope."
SIZES = (1,)

SHARE = 0.15
PARTS = ("compute", "tp", "bubble", "dp")
PLANS = (  # of each: the network, the plan, and the tokens of a sequence
    ("h100-ndr", "dp=8,tp=8,microbatches={m}", 8192),
    ("h100-ndr", "dp=8,tp=4,pp=2,microbatches={m}", 8192),
    ("h100-ndr", "tp=8,pp=4,microbatches={m}", 8192),
    ("h100-100gbe", "dp=32,tp=8,microbatches={m}", 8192),
    (
        "h100-100gbe",
        "dp=16,tp=8,pp=4,schedule=interleaved_1f1b,stages_per_rank=2,microbatches={m}",
        8192,
    ),
    ("h100-100gbe", "dp=8,tp=2,pp=4,microbatches={m}", 8192),
    ("h100-ndr", "tp=8,pp=4,microbatches={m}", 65_536),  # attention is a quarter, or more
)


def given(size, random):
    """Triples (model, plan, speeds), and what the planner says of each."""
    cases = []
    for network, text, tokens in PLANS:
        name = ("llama-3-70b", "llama-3-405b")[int(torch.randint(2, (), generator=random))]
        m = 4 * 2 ** int(torch.randint(3, (), generator=random))
        cases.append(ask(name, network, text.format(m=m), tokens))
    return [(cases,)] * size


def ask(name, network, text, tokens):
    """Return (model, plan, speeds) as the exercise gives them, and the planner's seconds."""
    config, machine = model_config(name), hardware.load(network)
    plan = Plan.parse(f"{text},precision=bf16")
    plan = replace(plan, sequence_parallel=plan.tp > 1)
    job = cost.Job(config, plan, machine, hardware.software("any"), tokens)
    model = {
        "tokens": job.seq_len,
        "width": config.hidden_size,
        "layers": config.num_layers,
        "parameters": config.num_layers * config.layer_parameters(0)
        + config.vocab_size * config.hidden_size,
    }
    alone = cost.seconds(replace(job, plan=Plan(precision="bf16")))["compute"]
    speeds = {
        "flops": _flops(model) / alone,
        "tp": ring_speed(machine, 1, plan.tp),
        "dp": ring_speed(machine, plan.tp, plan.dp),
        "exposed": job.software.exposed,
    }
    sizes = {axis: getattr(plan, axis) for axis in ("dp", "tp", "pp", "microbatches")}
    return model, sizes | {"stages": job.chunks}, speeds, cost.seconds(job)


def _flops(model) -> float:
    """FLOPs of a sequence, forward and backward."""
    tokens = model["tokens"]
    attention = 6 * model["layers"] * model["width"] * tokens**2
    return 6 * model["parameters"] * tokens + attention


def ring_speed(machine, distance, size) -> float:
    """Return the bytes/s of a ring over `size` ranks, of which neighbours are `distance` apart."""
    near = machine.inside.bandwidth * machine.inside.share
    local = max(1, min(size, machine.gpus // distance))  # of the ring's ranks, those in a node
    if local == size:
        return near
    between = machine.between
    port = between.bandwidth * between.share / (machine.gpus if between.shared else 1)
    return min(near, local * port)


def run(answer, axis, cases):
    """The parts of each case."""
    return [{k: float(v) for k, v in answer(*map(dict, case[:3])).items()} for case in cases]


def _check(case: Case, part: str) -> None:
    for (model, plan, _, truth), found in zip(case.given[0][0], case.results[0], strict=True):
        if part not in found:
            raise CheckFailed(f"{part!r} is missing; got {', '.join(found)}")
        want = truth[part]
        if want < 0.02 * sum(truth.values()) and found[part] < 0.04 * sum(truth.values()):
            continue
        off = found[part] / want - 1 if want else float("inf")
        if not abs(off) <= SHARE:
            raise CheckFailed(
                f"{plan}, {model['tokens']:,} tokens: {part} takes {want:.3g} s by the planner, "
                f"{found[part]:.3g} s by you; within {SHARE:.0%} is asked for"
            )


def check_compute(case: Case) -> None:
    _check(case, "compute")


def check_tp(case: Case) -> None:
    _check(case, "tp")


def check_bubble(case: Case) -> None:
    _check(case, "bubble")


def check_dp(case: Case) -> None:
    _check(case, "dp")


def solution(model, plan, speeds):
    T, D, m = model["tokens"], model["width"], plan["microbatches"]
    dp, tp, pp = plan["dp"], plan["tp"], plan["pp"]
    mine, layers = model["parameters"] / tp / pp, model["layers"] / pp
    compute = (6 * mine * T + 6 * layers * D * T**2 / tp) / speeds["flops"]  # of a microbatch
    summed = 4 * layers * 2 * (tp - 1) / tp * 2 * T * D / speeds["tp"]  # four all-reduces a layer
    bubble = (pp - 1) / plan["stages"] * (compute + summed)
    reduce = 2 * (dp - 1) / dp * 4 * mine / speeds["dp"]
    hidden = (1 - speeds["exposed"]) * min(reduce, 2 / 3 * (compute + summed))
    return {"compute": m * compute, "tp": m * summed, "bubble": bubble, "dp": reduce - hidden}


def _with(part, change):
    """The solution with one part changed, by a function of the model, the plan and the speeds."""
    return lambda *given: solution(*given) | {part: change(solution(*given)[part], *given)}


@fails(
    "compute",
    "A third of the FLOPs: backward takes twice as many as forward, 6 per parameter and token.",
)
def wrong_computes_forward_alone(*given):
    return _with("compute", lambda found, *_: found / 3)(*given)


@fails(
    "compute",
    "Each rank computes everything: tp and pp divide the work.",
)
def wrong_divides_nothing(*given):
    return _with("compute", lambda found, model, plan, _: found * plan["tp"] * plan["pp"])(*given)


@fails(
    "compute",
    "One microbatch of several: a step has all of them.",
)
def wrong_computes_one_microbatch(*given):
    return _with("compute", lambda found, model, plan, _: found / plan["microbatches"])(*given)


@fails(
    "tp",
    "Half of the sums: there are two all-reduces in a layer's forward, and two in its backward.",
)
def wrong_sums_forward_alone(*given):
    return _with("tp", lambda found, *_: found / 2)(*given)


@fails(
    "tp",
    "Twice the bytes: activations travel in bf16, and a ring sends 2 (n - 1)/n of them.",
)
def wrong_sends_four_bytes_of_a_number(*given):
    return _with("tp", lambda found, *_: 2 * found)(*given)


@fails(
    "bubble",
    "No bubble: a pipeline of p ranks waits for p - 1 microbatches, less with several stages.",
)
def wrong_has_no_bubble(*given):
    return _with("bubble", lambda *_: 0.0)(*given)


@fails(
    "bubble",
    "The bubble does not grow with microbatches: it is p - 1 of them, always.",
)
def wrong_lets_the_bubble_grow(*given):
    return _with("bubble", lambda found, model, plan, _: found * plan["microbatches"])(*given)


@fails(
    "bubble",
    "Several stages on a rank divide the bubble: each slot of time is as much shorter.",
)
def wrong_forgets_the_stages(*given):
    return _with("bubble", lambda found, model, plan, _: found * plan["stages"])(*given)


@fails(
    "dp",
    "All gradients are exposed: most travel beside the last backward.",
)
def wrong_hides_nothing(model, plan, speeds):
    """All of the reduction waits."""
    whole = speeds | {"exposed": 1.0}
    return solution(model, plan, speeds) | {"dp": solution(model, plan, whole)["dp"]}


@fails(
    "dp",
    "Gradients of the whole model: a rank has those of its own part, 1/(tp pp).",
)
def wrong_reduces_the_whole_model(model, plan, speeds):
    """As much is hidden as beside the last backward of this rank."""
    found, dp = solution(model, plan, speeds), plan["dp"]
    reduce = 2 * (dp - 1) / dp * 4 * model["parameters"] / speeds["dp"]
    beside = 2 / 3 * (found["compute"] + found["tp"]) / plan["microbatches"]
    return found | {"dp": reduce - (1 - speeds["exposed"]) * min(reduce, beside)}


@fails(
    "dp",
    "Two bytes for a gradient: they are summed in float32.",
)
def wrong_reduces_two_bytes(*given):
    return _with("dp", lambda found, *_: found / 2)(*given)


@fails(
    "compute",
    "Attention is missing: a long text spends more on it than on its matrices.",
)
def wrong_forgets_attention(model, plan, speeds):
    matrices = 6 * model["parameters"] / plan["tp"] / plan["pp"] * model["tokens"]
    seconds = plan["microbatches"] * matrices / speeds["flops"]
    return solution(model, plan, speeds) | {"compute": seconds}
