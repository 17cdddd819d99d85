"""Spot the recipe that cannot work, and say by which rule.

Most published recipes that fail do so by arithmetic: GPUs that are not the product of the axes,
heads that cannot be shared out, a batch that no microbatch divides, weights that no stage can hold.
Source: torchtitan, pull request 4016, which mends such recipes; Shoeybi et al. 2019
(arXiv 1909.08053), section 3, for heads.
"""

import torch

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "the first rule that is broken, of all recipes; 'works' where none is"
PRAISE = "Six lines of arithmetic, and no cluster was booked in vain."
SIZES = (1,)

RULES = ("ranks", "heads", "layers", "batch", "sequence", "memory", "works")
GOOD_ONE = dict(
    gpus=512, dp=16, tp=8, pp=4, cp=1, heads=64, kv_heads=8, layers=80, seq=8192,
    global_batch=512, microbatch=1, parameters=70.6e9, zero=1, memory=62e9,
)  # fmt: skip
BROKEN = {
    "ranks": dict(dp=8),
    "heads": dict(tp=16, dp=8, heads=24),  # 24 query heads
    "kv heads": dict(tp=16, dp=8, kv_heads=6, heads=48),  # divides the queries' heads only
    "layers": dict(pp=128, dp=1, tp=4),
    "batch": dict(microbatch=3),
    "sequence": dict(cp=4, dp=4, seq=8196),  # 2 cp pieces, in zigzag
    "memory": dict(tp=1, pp=4, dp=128),
    "gradients": dict(tp=1, pp=8, dp=64, zero=1, memory=48e9),  # its optimizer alone is cut
}


def given(size, random):
    """Recipes: some that work, some with one flaw, some with two."""
    recipes = [dict(GOOD_ONE)]
    for change in BROKEN.values():
        recipes += [GOOD_ONE | change, GOOD_ONE | change | dict(memory=3e9)]
        layers = int(torch.randint(80, 120, (), generator=random))
        recipes.append(GOOD_ONE | change | dict(layers=layers))
    more = 2 ** int(torch.randint(0, 3, (), generator=random))
    recipes += [
        GOOD_ONE | dict(tp=16, pp=2, kv_heads=8, heads=64),  # a key/value head on two ranks
        GOOD_ONE | dict(gpus=512 * more, dp=16 * more, global_batch=512 * more),
        GOOD_ONE | dict(tp=2, pp=16),
        GOOD_ONE | dict(cp=2, dp=8, zero=0, memory=80e9),  # all of 16 bytes, over tp and pp
        GOOD_ONE | dict(cp=2, dp=8, memory=15.5e9),  # 12 of the bytes over dp and cp: 14.9 GB
        GOOD_ONE | dict(cp=2, dp=8, memory=12e9),  # and no others over them, which were 9.9 GB
    ]
    return [(recipes,)] * size


def run(answer, axis, recipes):
    """The verdict on each recipe."""
    return [answer(dict(recipe)) for recipe in recipes]


def check_words(case: Case) -> None:
    for verdict in case.results[0]:
        if verdict not in RULES:
            raise CheckFailed(f"a verdict is one of {', '.join(RULES)}; got {verdict!r}")


def check_verdicts(case: Case) -> None:
    for recipe, verdict in zip(case.given[0][0], case.results[0], strict=True):
        want = _verdict(recipe)
        if verdict != want:
            changed = {k: v for k, v in recipe.items() if GOOD_ONE[k] != v} or "nothing changed"
            raise CheckFailed(f"{changed}: expected {want!r}, got {verdict!r}")


def _verdict(recipe) -> str:
    r = recipe
    ranks, mine = r["dp"] * r["tp"] * r["pp"] * r["cp"], r["parameters"] / (r["tp"] * r["pp"])
    shared = r["kv_heads"] % r["tp"] and r["tp"] % r["kv_heads"]
    state = 6 * mine + 12 * mine / (r["dp"] * r["cp"] if r["zero"] else 1)
    broken = {
        "ranks": ranks != r["gpus"],
        "heads": r["heads"] % r["tp"] or shared,
        "layers": r["pp"] > r["layers"],
        "batch": r["global_batch"] % (r["dp"] * r["microbatch"]),
        "sequence": r["cp"] > 1 and r["seq"] % (2 * r["cp"]),
        "memory": state > r["memory"],
    }
    return next((rule for rule, is_broken in broken.items() if is_broken), "works")


def solution(recipe):
    r = recipe
    if r["dp"] * r["tp"] * r["pp"] * r["cp"] != r["gpus"]:
        return "ranks"
    keys_shared = r["kv_heads"] % r["tp"] == 0 or r["tp"] % r["kv_heads"] == 0
    if r["heads"] % r["tp"] or not keys_shared:
        return "heads"
    if r["pp"] > r["layers"]:
        return "layers"
    if r["global_batch"] % (r["dp"] * r["microbatch"]):
        return "batch"
    if r["cp"] > 1 and r["seq"] % (2 * r["cp"]):
        return "sequence"
    mine = r["parameters"] / (r["tp"] * r["pp"])
    over = r["dp"] * r["cp"] if r["zero"] else 1
    return "memory" if mine * (2 + 4) + mine * 12 / over > r["memory"] else "works"


def _with(**other):
    """The verdict on a recipe that is read wrongly."""
    return lambda recipe: solution(recipe | {k: f(recipe) for k, f in other.items()})


@fails(
    "words",
    "Yes or no: the answer is one of the words that the text lists.",
)
def wrong_says_yes_or_no(recipe):
    return solution(recipe) == "works"


@fails(
    "verdicts",
    "Every recipe works, it says: some of them cannot.",
)
def wrong_is_never_in_doubt(recipe):
    return "works"


@fails(
    "verdicts",
    "Key/value heads are counted as many as query heads: there are fewer.",
)
def wrong_forgets_keys_and_values(recipe):
    """They have fewer heads than queries."""
    return _with(kv_heads=lambda r: r["heads"])(recipe)


@fails(
    "verdicts",
    "Each rank gets a key/value head of its own: two ranks may hold the same one.",
)
def wrong_wants_a_key_head_for_every_rank(recipe):
    """Two ranks may hold the same one."""
    return "heads" if recipe["kv_heads"] % recipe["tp"] else solution(recipe)


@fails(
    "verdicts",
    "All is cut over all GPUs: ZeRO 1 cuts the optimizer's state alone along dp.",
)
def wrong_cuts_everything_over_all_gpus(recipe):
    """ZeRO 1 cuts the optimizer's state; weights and gradients stay whole along dp."""
    verdict = _with(memory=lambda r: 1e18)(recipe)
    needs = 18 * recipe["parameters"] / recipe["gpus"]
    return "memory" if verdict == "works" and needs > recipe["memory"] else verdict


@fails(
    "verdicts",
    "The batch is divided by microbatches alone: dp divides it first.",
)
def wrong_divides_the_batch_by_microbatches_alone(recipe):
    return _with(dp=lambda r: 1, gpus=lambda r: r["tp"] * r["pp"] * r["cp"])(recipe)


@fails(
    "verdicts",
    "As many pieces as ranks: zigzag gives every rank two.",
)
def wrong_cuts_sequences_in_as_many_pieces_as_ranks(recipe):
    """Zigzag gives every rank two."""
    return _with(seq=lambda r: 2 * r["seq"])(recipe)


@fails(
    "verdicts",
    "The ranks of cp share the optimizer's bytes, too: they hold the same weights.",
)
def wrong_cuts_over_dp_alone(recipe):
    verdict = _with(memory=lambda r: 1e18)(recipe)
    mine = recipe["parameters"] / (recipe["tp"] * recipe["pp"])
    needs = mine * (6 + 12 / (recipe["dp"] if recipe["zero"] else 1))
    return "memory" if verdict == "works" and needs > recipe["memory"] else verdict
