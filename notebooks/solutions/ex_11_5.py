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

EXPERTS, TABLES = 8, 20


def given(size, random):
    """Tables of rows [2, E] that the tokens of each node send to each expert.

    Node 0 wants six experts more than node 1 does: it cannot have them all.
    """
    tables = torch.randint(1, 500, (TABLES, 2, EXPERTS), generator=random)
    tables[:, 0, 2:] += 1000
    return [(tables,)] * size


def run(answer, axis, tables):
    """The places in each table."""
    return [torch.as_tensor(answer(rows.clone())).tolist() for rows in tables]


def crossing(rows, node):
    """Rows that leave their node, if expert e is on node[e]."""
    return sum(int(rows[1 - int(where), e]) for e, where in enumerate(node))


def check_halves(case: Case) -> None:
    for node in case.results[0]:
        if len(node) != EXPERTS or sorted(node) != [0] * (EXPERTS // 2) + [1] * (EXPERTS // 2):
            raise CheckFailed(
                f"expected node 0 or 1 for {EXPERTS} experts, half of each; got {node}"
            )


def check_crossing(case: Case) -> None:
    for rows, node in zip(*case.given[0], case.results[0], strict=True):
        gain = (rows[0] - rows[1]).sort().values[EXPERTS // 2 :].sum()
        least = int(rows[0].sum() - gain)
        found = crossing(rows, node)
        if found > least:
            raise CheckFailed(
                f"{found} rows cross between the nodes with {node}; {least} would do. "
                f"The rows of node 0 are {rows[0].tolist()}, of node 1 {rows[1].tolist()}"
            )


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
    "Node 0 has what it wants most: what counts is how much more than node 1 it wants it.",
)
def wrong_asks_one_node_alone(rows):
    node = torch.ones(rows.shape[1], dtype=torch.int64)
    node[rows[0].topk(rows.shape[1] // 2).indices] = 0
    return node


@fails(
    "crossing",
    "Rows are saved one by one: take the difference of rows[0] and rows[1], not their ratio.",
)
def wrong_divides_what_it_should_subtract(rows):
    node = torch.ones(rows.shape[1], dtype=torch.int64)
    node[(rows[0] / rows[1]).topk(rows.shape[1] // 2).indices] = 0
    return node


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


@fails(
    "crossing",
    "The nodes are swapped: an expert belongs on the node that sends it more rows.",
)
def wrong_swaps_the_nodes(rows):
    return [1 - node for node in solution(rows)]
