"""The first plan of a list that fits into memory.

A rank holds weights, gradients and optimizer state of its stage, and the activations of the
microbatches that it has begun. The two peak at different places of a pipeline: the first place
has begun the most microbatches, the last one has the head. All places must fit.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for activations of a pipeline.
"""

from functools import cache

import torch

from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.model.llama import LlamaConfig
from minipar.parallel.explain import Explanation, explain
from minipar.parallel.plan import Plan

LEVEL, MINUTES = "medium", 25
GOOD = "fits at every place of the pipeline, no earlier plan of the list does; None where none fits"
PRAISE = "Meta tensors and a sum: no process was started to find out."
SIZES = (1,)

PLANS = (  # of eight ranks, in the order in which they are wanted
    "dp=8,microbatches=4",
    "dp=8,zero=1,microbatches=4",
    "dp=4,cp=2,zero=1,microbatches=4",
    "dp=8,zero=2,microbatches=4",
    "dp=4,pp=2,zero=1,microbatches=4",
    "dp=2,pp=4,zero=1,microbatches=2",
    "dp=2,pp=4,zero=1,microbatches=4",
    "dp=2,tp=2,pp=2,zero=1,microbatches=4",
    "tp=2,pp=4,microbatches=4",
)


@cache
def _explanations(vocab_size: int) -> tuple[Explanation, ...]:
    config = LlamaConfig(vocab_size, 64, 160, num_layers=4, num_heads=4, num_kv_heads=2)
    return tuple(explain(Plan.parse(text), config) for text in PLANS)


def given(size, random):
    """Triples (explanations, layer_bytes, budget)."""
    cases = []
    for vocab_size in (64, 8192):  # a small head, and one that outweighs layers
        for least, most in ((20, 200), (100_000, 400_000)):  # activations that hardly count, or do
            # A multiple of every plan's tp * cp: then it is the same where an answer rounds.
            layer_bytes = 2 * int(torch.randint(least // 2, most // 2, (), generator=random))
            explained = _explanations(vocab_size)
            places = [_places(one, layer_bytes) for one in explained]
            budgets = {max(found) for found in places} | {min(map(max, places)) - 1}
            for found in places:  # less than the fullest place, more than another one or the mean
                budgets.add((found[0] + max(found)) // 2)
                budgets.add((sum(found) // len(found) + max(found)) // 2)
            cases += [(list(explained), layer_bytes, budget) for budget in sorted(budgets)]
    return [(cases,)] * size


def run(answer, axis, cases):
    """The plan chosen in each case."""
    return [answer(*case) for case in cases]


def _places(explained: Explanation, layer_bytes: int) -> list[int]:
    """Bytes on a rank, for each place on pp."""
    plan, found = explained.plan, []
    for place in range(plan.pp):
        begun = min(plan.pp - place, plan.microbatches)
        activations = begun * _layers(explained, place) * layer_bytes // (plan.tp * plan.cp)
        found.append(sum(explained.bytes_on(place).values()) + activations)
    return found


def _layers(explained: Explanation, place: int) -> int:
    """How many layers a place of the pipeline has."""
    return sum("q_proj" in row.name and place in row.stage_ranks for row in explained.rows)


def check_fits(case: Case) -> None:
    for (explained, layer_bytes, budget), chosen in _answers(case):
        if chosen is None:
            continue
        found = [one for one in explained if one.plan == chosen]
        if not found:
            raise CheckFailed(
                f"the `plan` of one of the explanations, or None; got {str(chosen)[:60]}"
            )
        places = _places(found[0], layer_bytes)
        if max(places) > budget:
            raise CheckFailed(
                f"{chosen} needs {max(places):,} bytes at place {places.index(max(places))} of pp, "
                f"and the budget is {budget:,} (layer_bytes={layer_bytes:,})"
            )


def check_first(case: Case) -> None:
    for (explained, layer_bytes, budget), chosen in _answers(case):
        for one in explained:
            if one.plan == chosen:
                break
            need = max(_places(one, layer_bytes))
            if need <= budget:
                raise CheckFailed(
                    f"{one.plan} comes earlier than {chosen} and fits: {need:,} of {budget:,} "
                    f"bytes (layer_bytes={layer_bytes:,})"
                )


def _answers(case: Case):
    return zip(case.given[0][0], case.results[0], strict=True)


def solution(explained, layer_bytes, budget):
    for one in explained:
        plan, peak = one.plan, 0
        for place in range(plan.pp):
            mine = [row for row in one.rows if place in row.stage_ranks]
            state = sum(sum(row.num_bytes.values()) for row in mine)
            layers = sum("q_proj" in row.name for row in mine)
            begun = min(plan.pp - place, plan.microbatches)
            activations = begun * layers * layer_bytes // (plan.tp * plan.cp)
            peak = max(peak, state + activations)
        if peak <= budget:
            return plan
    return None


def _first_that_fits(explained, budget, need):
    return next((one.plan for one in explained if need(one) <= budget), None)


@fails(
    "fits",
    "The first plan was taken, whether it fits or not.",
)
def wrong_takes_the_first(explained, layer_bytes, budget):
    return explained[0].plan


@fails(
    "first",
    "None came back, although a plan fits.",
)
def wrong_never_finds_one(explained, layer_bytes, budget):
    return None


@fails(
    "fits",
    "The optimizer's state is not counted.",
)
def wrong_forgets_the_optimizer(explained, layer_bytes, budget):
    def need(one):
        held = [one.bytes_on(place) for place in range(one.plan.pp)]
        return max(state["weights"] + state["gradients"] for state in held)

    return _first_that_fits(explained, budget, need)


@fails(
    "fits",
    "Only the first place was looked at: the last one has the head.",
)
def wrong_looks_at_the_first_place(explained, layer_bytes, budget):
    """It has begun the most microbatches, but it has no head."""
    return _first_that_fits(explained, budget, lambda one: _places(one, layer_bytes)[0])


@fails(
    "fits",
    "Only the last place was looked at: the first holds more microbatches.",
)
def wrong_looks_at_the_last_place(explained, layer_bytes, budget):
    """It has the head, but one microbatch at a time."""
    return _first_that_fits(explained, budget, lambda one: _places(one, layer_bytes)[-1])


@fails(
    "fits",
    "The mean of the places was taken: the fullest one decides.",
)
def wrong_takes_the_mean_of_places(explained, layer_bytes, budget):
    def need(one):
        places = _places(one, layer_bytes)
        return sum(places) / len(places)

    return _first_that_fits(explained, budget, need)


def _need_with(begun, cut=lambda plan: plan.tp * plan.cp):
    """What the fullest place needs, with so many microbatches begun, of so many cuts each."""

    def need(one, layer_bytes):
        plan = one.plan
        return max(
            sum(one.bytes_on(place).values())
            + begun(plan, place) * _layers(one, place) * layer_bytes // cut(plan)
            for place in range(plan.pp)
        )

    return need


@fails(
    "fits",
    "One microbatch per place was counted: 1F1B has begun more.",
)
def wrong_forgets_what_is_in_flight(explained, layer_bytes, budget):
    """One microbatch at a time, as without a pipeline."""
    need = _need_with(lambda plan, place: 1)
    return _first_that_fits(explained, budget, lambda one: need(one, layer_bytes))


@fails(
    "first",
    "All microbatches were counted, as in GPipe: 1F1B has begun fewer.",
)
def wrong_keeps_all_microbatches(explained, layer_bytes, budget):
    """As GPipe does: 1F1B begins a backward as soon as it can."""
    need = _need_with(lambda plan, place: plan.microbatches)
    return _first_that_fits(explained, budget, lambda one: need(one, layer_bytes))


@fails(
    "first",
    "A place has begun no more microbatches than there are: min(pp - r, microbatches).",
)
def wrong_begins_more_than_there_are(explained, layer_bytes, budget):
    need = _need_with(lambda plan, place: plan.pp - place)
    return _first_that_fits(explained, budget, lambda one: need(one, layer_bytes))


@fails(
    "first",
    "Context parallelism cuts activations, too: divide them by cp as by tp.",
)
def wrong_forgets_that_cp_cuts(explained, layer_bytes, budget):
    need = _need_with(
        lambda plan, place: min(plan.pp - place, plan.microbatches), lambda plan: plan.tp
    )
    return _first_that_fits(explained, budget, lambda one: need(one, layer_bytes))
