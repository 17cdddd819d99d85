"""Two hosts and a real, shaped link between them: what the emulated link promises, TCP keeps.

The links of `minipar.emulate.link` stand for what is left for data: `namespaces.GOODPUT` of the
rate.
"""

import socket

import pytest
import torch

from minipar.comm import collectives as comm
from minipar.comm.mesh import Axis, Mesh
from minipar.emulate.link import Link, seconds
from tests.comm.same import fastest
from tests.hosts.namespaces import ADDRESSES, CARD, GOODPUT, PORT, two_hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no shaped link: {why_not()}"),
]

MEGABITS = 50
LATENCY = 200e-6  # of a veth pair and a Python process that wakes up


def wire(megabits: float) -> Link:
    return Link(f"{megabits:g} Mbit", LATENCY, megabits * 1e6 / 8 * GOODPUT)


@pytest.fixture(scope="module")
def hosts():
    # As Debian writes it: gloo would listen at the loopback but for GLOO_SOCKET_IFNAME.
    known_as = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
    with two_hosts(MEGABITS, known_as) as made:
        yield made


def one_way(tensor: torch.Tensor, axis: Axis) -> None:
    """From the first rank of the axis to the second."""
    if axis.rank == 0:
        comm.send(tensor, axis, 1)
    else:
        comm.recv(torch.empty_like(tensor), axis, 0)


# ---------------------------------------------------------------------- a rank on each host
def time_verbs(sizes: list[int]) -> dict[str, dict[str, float]]:
    axis = Mesh(dp=2).dp
    peer, took = 1 - axis.rank, {}
    for num_bytes in sizes:
        tensor = torch.ones(num_bytes // 4)
        into = torch.empty_like(tensor)
        calls = {
            "send": lambda t=tensor: one_way(t, axis),
            "exchange": lambda t=tensor, into=into: comm.exchange(
                [(t, peer)], [(into, peer)], axis
            ),
            "all_reduce": lambda t=tensor: comm.all_reduce(t, axis),
            "reduce_scatter": lambda t=tensor: comm.reduce_scatter(t, axis),
            "all_to_all": lambda t=tensor: comm.all_to_all(t, axis),
        }
        took[str(num_bytes)] = {verb: fastest(call, axis, tries=3) for verb, call in calls.items()}
    return took


@pytest.mark.timed
def test_collectives_take_what_the_formula_says(hosts):
    """Mutant: sends before receives, and what goes both ways takes twice as long."""
    (took, _) = hosts.run(time_verbs, [1_000_000, 4_000_000])
    for num_bytes, verbs in took.items():
        for verb, found in verbs.items():
            formula = "send" if verb == "exchange" else verb
            model = seconds(formula, int(num_bytes), 2, wire(MEGABITS))
            print(f"{verb:15}{num_bytes:>9} B  {1e3 * model:6.0f} ms, really {1e3 * found:6.0f} ms")
            assert 0.9 * model < found < 1.25 * model, (verb, num_bytes, model, found)


# ---------------------------------------------------------------------- two torchruns
def test_two_hosts_train(hosts, tmp_path):
    """By the interface that GLOO_SOCKET_IFNAME names."""
    run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    run += ["--master-addr", ADDRESSES[0], "--master-port", PORT]
    train = ["-m", "minipar", "train", "--mesh", "dp=2", "--steps", "1", "--timeout", "60"]
    train += ["--data", __file__, "--seq-len", "32", "--batch-size", "2", "--sample-tokens", "0"]
    train += ["--out", str(tmp_path)]
    words = [[*run, "--node-rank", str(n), *train] for n in range(2)]
    nodes = [hosts.start(n, *words[n], GLOO_SOCKET_IFNAME=CARD) for n in range(2)]
    said = hosts.finish(nodes, seconds=100)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "validation loss" in said[0], said[0]
