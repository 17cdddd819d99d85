"""Run C: three ranks wait for the fourth; cut the model differently.

The last stage has the head as well, which for a large vocabulary takes as long as several layers.
All ranks then go at the pace of the last one, however many microbatches there are.
Source: Llama 3 (2407.21783), section 3.3.2, takes one layer each from the first and last stage.
"""

from dataclasses import replace

import torch

from minipar.lab.cases import told_apart, whole_numbers
from minipar.lab.exercises import Case, fails
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel.pipeline import runtime, schedules
from minipar.sim import emulate

SECONDS = 60  # two runs on emulated GPUs
LEVEL, MINUTES = "hard", 30
GOOD = "stages of neighbouring layers, and the slowest stage is as fast as possible"
PRAISE = "No rank is waited for longer than it must be."

BUGS = {
    "too few microbatches": "That bubble stands at both ends of a step. Here three ranks wait in "
    "its middle, too, and as often as there are microbatches.",
    "a warm-up that is too short": "With too few microbatches under way the last rank would run "
    "dry, too. It never waits.",
    "a slow network": "Messages are hairlines in both pictures: ranks wait for work, not for "
    "bytes that travel.",
    "stages of unequal length": "",
    "a slow GPU": "Then its layers would take longer than those of others. They are as long: rank "
    "3 has a bar more.",
}

LAYERS, RANKS = 12, 4


def given(size, random):
    """Costs of the embedding, of each layer and of the head, and how many stages: some models."""
    models = [([0.0, *[1.0] * LAYERS, 3.0], RANKS)]
    for layers, stages in ((12, 4), (16, 4), (17, 5), (24, 8)):
        costs = (0.5 + torch.rand(layers + 2, generator=random, dtype=torch.float64)).tolist()
        costs[0], costs[-1] = 0.2 * costs[0], 2.5 * costs[-1]
        models.append((costs, stages))
    return [(models,)] * size


def run(answer, axis, models):
    """Return the cuts; if they will do, the steps before and after as well."""
    found = [whole_numbers(answer(list(costs), stages)) for costs, stages in models]
    if any(map(_refused, found, models)):
        return found, None, None
    return found, *(_film(cut, axis) for cut in ([LAYERS // RANKS] * RANKS, found[0]))


def _film(cut, axis):
    """A step of a Llama on emulated GPUs, 1F1B with 6 microbatches; its head is worth 3 layers."""
    axis = replace(axis, name="pp")  # as which it is drawn
    config = LlamaConfig(3072, 32, 96, num_layers=LAYERS, num_heads=4, num_kv_heads=4)
    model = Llama(config)
    pipeline = runtime.apply(model, axis, schedules.make("1f1b", p=axis.size, m=6), cut=cut)
    rows = torch.arange(65)[None]

    def step():
        pipeline.run(model, [], [(rows[:, :-1], rows[:, 1:])] * 6)
        pipeline.finish_backward()
        model.zero_grad()

    step()  # on the pool as it is, to warm up
    gpu = emulate.device("h100/20", magnify=32)
    return emulate.film(step, model, axis, device=gpu, wire="ib-ndr")


def _stages(cut, costs):
    """What each stage costs."""
    embedding, *layers, head = costs
    found, at = [], 0
    for count in cut:
        found.append(sum(layers[at : at + count]))
        at += count
    found[0] += embedding
    found[-1] += head
    return found


def _least(costs, stages):
    """The cost of the slowest stage of the best cut: all ends of all stages are tried, in turn."""
    embedding, *layers, head = costs
    best = {0: 0.0}  # of the first i layers
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        longer = {}
        for end in [len(layers)] if last else range(len(layers) + 1):
            for start, before in best.items():
                if start < end or (first or last) and start == end:
                    cost = sum(layers[start:end]) + embedding * first + head * last
                    longer[end] = min(longer.get(end, float("inf")), max(before, cost))
        best = longer
    return best[len(layers)]


def _refused(cut, model):
    """(check, sentence) of the first that is not met, or None."""
    costs, stages = model
    layers = len(costs) - 2
    shown = f"{layers} layers, {stages} stages"
    if not isinstance(cut, list) or not all(type(count) is int for count in cut):
        return "cut", f"{shown}: expected a list of whole numbers, got {str(cut)[:60]}"
    if len(cut) != stages or sum(cut) != layers or min(cut) < 0 or 0 in cut[1:-1]:
        return "cut", (
            f"{shown}: {cut} is no cut; {stages} counts that add up to {layers}, none of them 0 "
            "but the first and the last"
        )
    slowest, least = max(_stages(cut, costs)), _least(costs, stages)
    if slowest > least * (1 + 1e-9):
        texts = told_apart(slowest, least)
        return "balance", f"{shown}: the slowest stage costs {texts[0]}; {texts[1]} is possible"
    return None


def check_cut(case: Case) -> None:
    case.expect_accepted(_refused, "cut")


def check_balance(case: Case) -> None:
    case.expect_accepted(_refused, "balance")


def drawn(case: Case):
    from minipar.lab import draw  # takes long to import, and no rank needs it

    _, before, after = case.results[0]
    return draw.before_after({"As it was": before, "Yours": after})


def solution(costs, num_stages):
    embedding, *layers, head = costs

    def within(limit):
        """A cut without a stage above the limit, or None: fill each stage as far as it goes."""
        cut, at = [], 0
        for stage in range(num_stages):
            room = limit - embedding * (stage == 0) - head * (stage == num_stages - 1)
            count, inner = 0, 0 < stage < num_stages - 1
            must_leave = max(0, num_stages - 2 - stage)  # a layer for each inner stage to come
            while at < len(layers) - must_leave and layers[at] <= room + 1e-12:
                room -= layers[at]
                at, count = at + 1, count + 1
            if room < -1e-12 or inner and not count:
                return None
            cut.append(count)
        return cut if at == len(layers) else None

    sums = {
        sum(layers[i:j]) + first * embedding + last * head
        for i in range(len(layers) + 1)
        for j in range(i, len(layers) + 1)
        for first, last in ((i == 0, False), (False, j == len(layers)), (False, False))
    }
    return next(cut for limit in sorted(sums) if (cut := within(limit)))


@fails(
    "balance",
    "As many layers on every rank: the last one has the head as well.",
)
def wrong_leaves_it_as_it_was(costs, num_stages):
    layers = len(costs) - 2
    return [layers * (s + 1) // num_stages - layers * s // num_stages for s in range(num_stages)]


@fails(
    "balance",
    "A stage ends where it first passes the mean: what is left over falls to the last one.",
)
def wrong_fills_up_to_the_mean(costs, num_stages):
    """Each stage ends where it has its share; rounding adds up."""
    embedding, *layers, head = costs
    mean, cut, spent = sum(costs) / num_stages, [], embedding
    for cost in layers:
        if not cut or spent >= mean and len(cut) < num_stages:
            cut.append(0)
            spent = spent if len(cut) == 1 else 0.0
        cut[-1] += 1
        spent += cost
    return (
        cut + [0] * (num_stages - len(cut))
        if len(cut) >= num_stages - 1
        else [
            len(layers) - num_stages + 1,
            *[1] * (num_stages - 1),
        ]
    )


@fails(
    "cut",
    "The counts have to add up to the layers; the head and the embedding are not counted.",
)
def wrong_counts_the_head(costs, num_stages):
    return solution([0.0, *costs, 0.0], num_stages)
