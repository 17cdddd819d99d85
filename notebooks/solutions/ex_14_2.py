"""Run B: red in a steady rhythm, forward and backward; number its processes again.

The launcher started the processes by turns, one per host, as `mpirun --map-by node` and Slurm's
cyclic distribution do. Neighbouring ranks are then on different hosts, and the axis that talks most
lies on the slowest link. Nothing fails, and the loss is the same.
Source: Narayanan et al. 2021 (2104.04473), section 3.2: tensor parallelism inside of a node.
"""

import torch
import torch.distributed as dist

from minipar.comm.mesh import Axis, make_group
from minipar.emulate.link import LINKS, Topology
from minipar.lab.cases import whole_numbers
from minipar.lab.exercises import Case, fails
from minipar.model.llama import Llama, LlamaConfig
from minipar.parallel import ddp, tensor
from minipar.sim import emulate

SECONDS = 60  # two runs on emulated GPUs
LEVEL, MINUTES = "hard", 20
GOOD = "every rank once, each tensor-parallel group on one host, and an error where none can be"
PRAISE = "The same work on the same machines, and only the numbers have changed."

BUGS = {
    "no overlap": "Overlap hides gradients. These sums cannot wait: the next matrix needs each of "
    "them, in the forward pass as well.",
    "buckets that leave in the opposite order": "Buckets hold gradients, and a forward pass has "
    "none. Half of the red stands in the forward pass.",
    "tensor parallelism across nodes": "",
    "a slow rank": "All four rows have the same rhythm: nobody computes longer than the others.",
    "a slow network": "The last gradients cross between nodes in the healthy picture, over the "
    "same link. It is not slower here; other things travel over it.",
}


def given(size, random):
    """Hosts of the processes in the order in which they were started, and tp: several clusters."""

    def lot(count):
        return int(torch.randint(count, (), generator=random))

    clusters = []
    for nodes, each, tp in ((2, 2, 2), (2, 8, 8), (4, 8, 4), (3, 4, 2)):
        names = [f"node{1 + lot(90)}{letter}" for letter in "abcd"[:nodes]]
        by_turns = names * each
        shuffled = [by_turns[i] for i in torch.randperm(nodes * each, generator=random).tolist()]
        clusters += [(by_turns, tp), (shuffled, tp)]
    uneven = [*["left"] * 5, *["right"] * 3]
    clusters.append(([uneven[i] for i in torch.randperm(8, generator=random).tolist()], 2))
    larger = [*["left"] * 4, *["right"] * 2]  # uneven as well, and tp=2 divides both
    clusters.append(([larger[i] for i in torch.randperm(6, generator=random).tolist()], 2))
    return [(clusters,)] * size


def run(answer, axis, clusters):
    """Return the numbers of each cluster; if they will do, the steps before and after as well."""
    found = []
    for hosts, tp in clusters:
        try:
            found.append(whole_numbers(answer(list(hosts), tp)))
        except ValueError as error:
            found.append(f"ValueError: {error}")
    if any(map(_refused, found, clusters)):
        return found, None, None
    hosts = ["a", "b", "a", "b"]
    yours = whole_numbers(answer(hosts, 2))
    return found, *(_film(numbers, axis) for numbers in ([0, 1, 2, 3], yours))


def _film(numbers, axis):
    """A step of a Llama on two nodes of two GPUs; process i, which gets numbers[i], runs by turns.

    Our ranks 0 and 1 are on the first node: they are processes 0 and 2.
    """
    place = {numbers[process]: slot for slot, process in enumerate((0, 2, 1, 3))}
    pairs = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}
    own = {}
    for name, groups in pairs.items():
        for logical in groups:
            slots = sorted(place[rank] for rank in logical)
            ranks = tuple(axis.ranks[s] for s in slots)
            group = make_group(name, ranks)
            if axis.rank in slots:
                own[name] = Axis(name, slots.index(axis.rank), 2, ranks, group)
    model = Llama(LlamaConfig(128, 32, 96, num_layers=6, num_heads=4, num_kv_heads=4))
    cut = tensor.apply(model, own["tp"])
    data = ddp.apply(model, own["dp"], average=False)
    rows = torch.arange(257)[None] % 128

    def step():
        model.token_loss(model(rows[:, :-1]), rows[:, 1:]).backward()
        data.finish_backward()
        cut.finish_backward()
        model.zero_grad()

    step()
    gpu = emulate.device("h100/20", magnify=32)
    wire = Topology(2, 2, LINKS["nvlink4"], LINKS["100gbe"])
    filmed = emulate.film(step, model, axis, device=gpu, wire=wire)
    for one in own.values():
        dist.destroy_process_group(one.group)
    return filmed


def _refused(numbers, cluster):
    """(check, sentence) of the first that is not met, or None."""
    hosts, tp = cluster
    shown = f"{len(hosts)} processes, tp={tp}"
    if any(hosts.count(host) % tp for host in hosts):
        if not isinstance(numbers, str):
            return "impossible", (
                f"{shown}: there are hosts of {sorted({hosts.count(h) for h in hosts})} processes; "
                "that cannot be, so raise ValueError"
            )
        return None
    if not isinstance(numbers, list) or sorted(map(str, numbers)) != sorted(
        map(str, range(len(hosts)))
    ):
        said = numbers if isinstance(numbers, str) else f"got {str(numbers)[:60]}"
        return "numbers", f"{shown}: expected each of 0 to {len(hosts) - 1} once; {said}"
    for first in range(0, len(hosts), tp):
        used = {hosts[numbers.index(rank)] for rank in range(first, first + tp)}
        if len(used) > 1:
            return "nodes", (
                f"{shown}: ranks {first} to {first + tp - 1} are one tensor-parallel group, on "
                f"{len(used)} hosts"
            )
    return None


def check_numbers(case: Case) -> None:
    case.expect_accepted(_refused, "numbers")


def check_nodes(case: Case) -> None:
    case.expect_accepted(_refused, "nodes")


def check_impossible(case: Case) -> None:
    case.expect_accepted(_refused, "impossible")


def drawn(case: Case):
    from minipar.lab import draw  # takes long to import, and no rank needs it

    _, before, after = case.results[0]
    return draw.before_after({"As it was": before, "Yours": after})


def solution(hosts, tp):
    for host in hosts:
        if hosts.count(host) % tp:
            raise ValueError(f"tp={tp} does not divide the {hosts.count(host)} processes of {host}")
    order = sorted(range(len(hosts)), key=lambda process: hosts.index(hosts[process]))
    numbers = [0] * len(hosts)
    for rank, process in enumerate(order):
        numbers[process] = rank
    return numbers


@fails(
    "nodes",
    "Numbered in the order of starting: neighbours are on different hosts.",
)
def wrong_leaves_it_as_it_was(hosts, tp):
    return list(range(len(hosts)))


@fails(
    "nodes",
    "That is which process each rank is. Asked is which rank each process gets: the inverse.",
)
def wrong_returns_the_processes(hosts, tp):
    return sorted(range(len(hosts)), key=lambda process: hosts.index(hosts[process]))


@fails(
    "nodes",
    "That is which process each rank is. Asked is which rank each process gets: the inverse.",
)
def wrong_returns_the_processes_by_name(hosts, tp):
    return sorted(range(len(hosts)), key=lambda process: hosts[process])


@fails(
    "numbers",
    "Numbers within each host: add those of the hosts before.",
)
def wrong_numbers_within_hosts(hosts, tp):
    return [hosts[:process].count(host) for process, host in enumerate(hosts)]


@fails(
    "impossible",
    "A host with 5 processes and tp=2: some group has to cross, and nobody is told.",
)
def wrong_says_nothing(hosts, tp):
    order = sorted(range(len(hosts)), key=lambda process: hosts.index(hosts[process]))
    return [order.index(process) for process in range(len(hosts))]


@fails(
    "numbers",
    "Hosts may differ in size: what has to hold is that tp divides the processes of each.",
)
def wrong_wants_hosts_of_one_size(hosts, tp):
    if len({hosts.count(host) for host in hosts}) > 1:
        raise ValueError("hosts of several sizes")
    return solution(hosts, tp)
