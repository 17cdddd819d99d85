"""Devices and backends where there are GPUs: torch's answers are stood in for on a CPU."""

import os
import re
import socket
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minipar.comm import collectives, gloo
from minipar.comm.mesh import Mesh
from minipar.observe import timeline
from minipar.ranks import backends
from tests.on_ranks import on_ranks


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_the_gpu_follows_from_the_place_on_the_host(four_gpus, monkeypatch):
    """Mutant: by rank. Rank 5 of hosts with two ranks and four GPUs would use GPU 1 here, and
    another where its backend was set: NCCL hangs.
    """
    monkeypatch.setenv("RANK", "5")
    for local, expected in ((1, "cuda:1"), (6, "cuda:2")):  # the second shares its GPU
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert backends.compute_device() == torch.device(expected)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "link")
    assert backends.compute_device() == torch.device("cpu")


def test_nccl_needs_a_gpu_per_rank(four_gpus):
    assert backends.pick_backend(4) == "nccl" and backends.pick_backend(5) == "gloo"
    backends.check_ranks(4, "nccl")
    with pytest.raises(ValueError, match="5 ranks but 4 GPUs; use gloo"):
        backends.check_ranks(5, "nccl")


@pytest.fixture
def held_port():
    """A port that another program holds, and where it says nothing, for as long as we live.

    A rank that was answered while Python ends would abort this process.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        os.dup(other.fileno())
        yield str(other.getsockname()[1])


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        (
            {"RANK": "2", "MASTER_PORT": "9"},
            ValueError,
            "RANK=2 with WORLD_SIZE=2: ranks are 0 to 1",
        ),
        (
            {"RANK": "-1", "MASTER_PORT": "9"},
            ValueError,
            "RANK=-1 with WORLD_SIZE=2: ranks are 0 to 1",
        ),
        ({"WORLD_SIZE": "two"}, ValueError, "'two'"),
        ({"MASTER_PORT": "99999999"}, ValueError, "port must have value from 0 to 65535"),
        ({"MASTER_PORT": "abc"}, ValueError, "'abc'"),
        ({}, ConnectionError, "the 2 ranks do not meet at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
        ({"RANK": "1", "MASTER_PORT": "9"}, ConnectionError, "MASTER_PORT=9 within 1 s: "),
    ],
)
def test_what_a_launcher_got_wrong_is_one_clear_line(monkeypatch, held_port, changed, error, says):
    """Rank 0 finds its port in use; rank 1 that nobody listens there."""
    known = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held_port}
    for name, value in (known | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=re.escape(says)) as raised, backends.joined("gloo", 1):
        pass
    assert "\n" not in str(raised.value) and not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("SLURM_STEP_ID=0 SLURM_NTASKS=2", "SLURM_NTASKS=2: srun started 2 tasks, and nothing"),
        ("SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS=2: srun started 2"),
        ("OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=4: mpirun started 4 tasks"),
        ("SLURM_NTASKS=2", None),  # of a job: this is its script, not one of its tasks
        ("SLURM_STEP_ID=0 SLURM_NTASKS=1", None),
    ],
)
def test_tasks_without_a_rank_would_each_train_alone(monkeypatch, given, says):
    for name in backends.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for pair in given.split():
        monkeypatch.setenv(*pair.split("="))
    if says is None:
        assert not backends.under_torchrun()
        return
    with pytest.raises(ValueError, match=says):
        backends.under_torchrun()
    for name in backends.VARIABLES:
        monkeypatch.setenv(name, "1")
    assert backends.under_torchrun()


@pytest.fixture
def alone(monkeypatch):
    """One rank of torchrun whose process group is of paper; yields what is done to it."""
    calls = []
    known = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(backends, "pick_backend", lambda size: "nccl")
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    usual = dist.init_process_group

    def init(carriers, **where):
        calls.append(carriers)
        usual("gloo", **where)

    def abort():
        calls.append("abort")
        dist.destroy_process_group()

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    return calls


def test_after_an_error_nccl_is_aborted_and_gloo_carries_the_host(alone):
    """Destroying waits for collectives in flight: for ever, if another rank has left."""
    with backends.joined("auto"):
        pass
    assert alone == ["cpu:gloo,cuda:nccl"] and not dist.is_initialized()
    with pytest.raises(KeyError), backends.joined("auto"):
        raise KeyError
    assert alone[1:] == ["cpu:gloo,cuda:nccl", "abort"] and not dist.is_initialized()
    with pytest.raises(KeyError), backends.joined("gloo"):
        raise KeyError
    assert alone[3:] == ["gloo"] and not dist.is_initialized()


def test_a_lost_connection_is_one_line(alone):
    """Mutant: pages of gloo and torch, above our line."""
    with pytest.raises(ConnectionError) as raised, backends.joined("gloo"):
        raise RuntimeError("[gloo/pair.cc:5] Timed out waiting for recv\nframe #0\nframe #1")
    assert str(raised.value) == "lost the other ranks: [gloo/pair.cc:5] Timed out waiting for recv"
    assert raised.value.__suppress_context__
    with pytest.raises(RuntimeError, match="shapes"), backends.joined("gloo"):
        raise RuntimeError("shapes cannot be multiplied")


def _messages(staged: bool) -> list[float]:
    axis, usual, seen = Mesh(ring=4).ring, gloo.staged, []

    def stand_in(tensor, axis):
        seen.append(tensor.numel())
        return tensor.clone() if staged else usual(tensor, axis)

    with mock.patch.object(gloo, "staged", stand_in):
        mine, way = torch.full((3,), float(axis.rank)), (1 + axis.rank) % 4
        ring = collectives.exchange(
            [(mine, way)], [(torch.empty(3), axis.rank - 1 & 3)], axis, async_op=True
        )
        found = ring.wait()[0].tolist()
        other = axis.rank ^ 1
        if axis.rank < other:
            collectives.send(mine, axis, other)
        else:
            found += collectives.recv(torch.empty(3), axis, other).tolist()
    assert len(seen) == 3  # no message passes by
    return found


def test_ranks_that_share_a_gpu_send_messages_through_the_host(ranks):
    assert ranks(4).run(_messages, True) == ranks(4).run(_messages, False)


@on_ranks(2)
def test_recording_does_not_wait_for_a_gpu():
    """A thread that waits for NCCL's work would stop the stream on which the model computes."""
    axis, started, start = Mesh(ring=2).ring, [], threading.Thread.start
    sends = [(torch.ones(3), 1 - axis.rank)]
    with pytest.MonkeyPatch.context() as patch, timeline.record() as spans:
        patch.setattr(dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl")
        patch.setattr(threading.Thread, "start", lambda t: started.append(t) or start(t))
        collectives.exchange(sends, [(torch.empty(3), 1 - axis.rank)], axis)
    assert [span.name for span in spans] == ["exchange"] and not started


def test_ranks_that_torchrun_starts_again_see_no_address_of_the_dead(alone, monkeypatch):
    shared, usual = dist.HashStore(), dist.init_process_group

    def init(carriers, store, **where):
        assert not store.check(["address"])
        store.set("address", "of this start")
        usual(carriers, store=store, **where)

    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", init)
    for start in "0", "1":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        with backends.joined("gloo"):
            pass
