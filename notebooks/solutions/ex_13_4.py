"""A plan under a budget: the cheapest offer that is done in time, even if the prediction is off.

A prediction comes with an error. An offer that meets the deadline only if everything is as fast as
predicted is no offer, and the cheapest hour is not the cheapest run.
"""

import torch

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 20
GOOD = "fits, is in time with the error against it, and costs least of those; None if there is none"
PRAISE = "A margin is what an error is published for."
SIZES = (1,)


def given(size, random):
    """Triples (offers, training tokens, deadline in days)."""
    cases = []
    for number in range(60):
        offers = []
        for name in range(6):
            r = torch.rand(4, generator=random, dtype=torch.float64).tolist()
            offers.append(
                dict(
                    name=f"offer {name}",
                    gpus=2 ** (5 + int(6 * r[0])),
                    dollars=1 + 3 * r[1],  # of a GPU for an hour
                    tokens_per_second=300 + 700 * r[2],  # of a GPU, as predicted
                    needs=30 + 60 * r[3],  # GB of a GPU
                    memory=62.0,
                )
            )
        days = torch.tensor([_days(one, 1e12, 1.15) for one in offers])
        deadline = float(days.median() * (1 + 0.2 * torch.rand((), generator=random)))
        fitting = [one for one in offers if _fits(one)]
        if number % 3 == 0 and fitting:  # the cheapest is late if it is slower than predicted
            deadline = _days(min(fitting, key=lambda o: _cost(o, 1e12)), 1e12, 1.07)
        cases.append((offers, 1e12, deadline))
    hopeless = [dict(one, needs=70.0) for one in cases[0][0]]
    return [([*cases, (hopeless, 1e12, 1e6)],)] * size


def run(answer, axis, cases):
    """The name of the offer that is taken in each case, or None."""
    return [answer([dict(one) for one in offers], *rest) for offers, *rest in cases]


def _days(offer, tokens, slower=1.0) -> float:
    return slower * tokens / (offer["gpus"] * offer["tokens_per_second"]) / 86_400


def _cost(offer, tokens) -> float:
    return _days(offer, tokens) * 24 * offer["gpus"] * offer["dollars"]


def _answers(case: Case):
    for (offers, tokens, days), name in zip(case.given[0][0], case.results[0], strict=True):
        by_name = {one["name"]: one for one in offers}
        if name is not None and name not in by_name:
            raise CheckFailed(f"the name of an offer, or None; got {name!r}")
        yield offers, tokens, days, by_name.get(name)


def check_fits(case: Case) -> None:
    for _, _, _, one in _answers(case):
        if one and one["needs"] > one["memory"]:
            raise CheckFailed(f"{one['name']} needs {one['needs']:.0f} of {one['memory']:.0f} GB")


def check_in_time(case: Case) -> None:
    for _, tokens, days, one in _answers(case):
        if one and _days(one, tokens, 1.15) > days:
            raise CheckFailed(
                f"{one['name']} takes {_days(one, tokens):.1f} days as predicted, "
                f"{_days(one, tokens, 1.15):.1f} if it is 15 % slower; there are {days:.1f}"
            )


def check_cheapest(case: Case) -> None:
    for offers, tokens, days, one in _answers(case):
        good = [o for o in offers if o["needs"] <= o["memory"] and _days(o, tokens, 1.15) <= days]
        best = min(good, key=lambda o: _cost(o, tokens), default=None)
        if best is not None and (one is None or _cost(one, tokens) > _cost(best, tokens) + 1e-6):
            taken = f"${_cost(one, tokens):,.0f}" if one else "nothing was taken"
            raise CheckFailed(
                f"{best['name']} fits, is in time and costs ${_cost(best, tokens):,.0f}; {taken}"
            )


def solution(offers, tokens, days, error=0.15):
    best, least = None, float("inf")
    for offer in offers:
        hours = tokens / (offer["gpus"] * offer["tokens_per_second"]) / 3600
        cost = hours * offer["gpus"] * offer["dollars"]
        in_time = hours * (1 + error) <= 24 * days
        if offer["needs"] <= offer["memory"] and in_time and cost < least:
            best, least = offer["name"], cost
    return best


def _pick(offers, is_good, key):
    return min(filter(is_good, offers), key=key, default={"name": None})["name"]


def _fits(one):
    return one["needs"] <= one["memory"]


@fails(
    "fits",
    "The plan does not fit: look at memory before speed.",
)
def wrong_forgets_memory(offers, tokens, days):
    """What does not fit has no speed."""
    return _pick(offers, lambda o: _days(o, tokens, 1.15) <= days, lambda o: _cost(o, tokens))


@fails(
    "in_time",
    "It is in time only if the prediction holds: leave room for its error.",
)
def wrong_trusts_the_prediction(offers, tokens, days):
    """In time if all goes as predicted, and late in half of the cases."""
    return _pick(
        offers, lambda o: _fits(o) and _days(o, tokens) <= days, lambda o: _cost(o, tokens)
    )


@fails(
    "cheapest",
    "This is the fastest: a cheaper one is in time, too.",
)
def wrong_takes_the_fastest(offers, tokens, days):
    return _pick(
        offers, lambda o: _fits(o) and _days(o, tokens, 1.15) <= days, lambda o: _days(o, tokens)
    )


@fails(
    "cheapest",
    "This has the cheapest hour: count the hours that it needs.",
)
def wrong_takes_the_cheapest_hour(offers, tokens, days):
    """A slow GPU needs more hours."""
    return _pick(
        offers, lambda o: _fits(o) and _days(o, tokens, 1.15) <= days, lambda o: o["dollars"]
    )


@fails(
    "cheapest",
    "Nothing is taken, and something fits.",
)
def wrong_takes_nothing(offers, tokens, days):
    return None
