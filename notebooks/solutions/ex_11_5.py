"""Place experts on two nodes, so that few rows cross between them.

With as many experts on each node, which ones go where is free, and what counts is the difference:
an expert saves most on the node whose tokens want it more than the other's do.
"""

import torch

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 20
GOOD = "half of the experts on each node, and not one row more than must cross"
PRAISE = "Placing costs nothing while training: names of experts are only names."
SIZES = (1,)

EXPERTS = 8


def given(size, random):
    """Rows [2, E] that the tokens of each node send to each expert.

    Node 0 wants six experts more than node 1 does: it cannot have them all.
    """
    rows = torch.randint(1, 500, (2, EXPERTS), generator=random)
    rows[0, 2:] += 1000
    return [(rows,)] * size


def run(answer, axis, rows):
    return torch.as_tensor(answer(rows)).tolist()


def crossing(rows, node):
    """Rows that leave their node, if expert e is on node[e]."""
    return sum(int(rows[1 - where, e]) for e, where in enumerate(node))


def check_halves(case: Case) -> None:
    node = case.results[0]
    if len(node) != EXPERTS or sorted(node) != [0] * (EXPERTS // 2) + [1] * (EXPERTS // 2):
        raise CheckFailed(f"expected node 0 or 1 for {EXPERTS} experts, half of each; got {node}")


def check_crossing(case: Case) -> None:
    (rows,) = case.given[0]
    gain = (rows[0] - rows[1]).sort().values[EXPERTS // 2 :].sum()
    least = int(rows[0].sum() - gain)
    found = crossing(rows, case.results[0])
    if found > least:
        raise CheckFailed(f"{found} rows cross between the nodes; {least} would do")


def solution(rows):
    node = torch.ones(rows.shape[1], dtype=torch.int64)
    node[(rows[0] - rows[1]).topk(rows.shape[1] // 2).indices] = 0
    return node


@fails(
    "crossing",
    "Placed by number: look at which node sends each expert more rows.",
)
def wrong_takes_them_as_numbered(rows):
    return torch.arange(rows.shape[1]) * 2 // rows.shape[1]


@fails(
    "halves",
    "One node has more than its half of the experts.",
)
def wrong_lets_each_go_where_it_is_wanted(rows):
    """Fewest rows of all, and one node may have all experts."""
    return [0] * rows.shape[1]


@fails(
    "crossing",
    "The load is even, but many rows cross: compare rows[0] with rows[1].",
)
def wrong_balances_the_load(rows):
    """As many rows on each node, however far they come."""
    order = rows.sum(0).argsort(descending=True)
    node = torch.zeros(rows.shape[1], dtype=torch.int64)
    node[order[1::2]] = 1
    return node
