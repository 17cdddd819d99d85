"""How the ranks of torchrun meet: in threads here, around a store without a network."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from minipar.ranks import meeting
from minipar.ranks.meeting import Card, meet, obstacle


@pytest.fixture(autouse=True)
def master(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what `obstacle` sets is undone
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(meeting, "PAUSE", 0.01)


def card(rank: int, host: str, address: str, route: str, port: int = 9) -> Card:
    return Card(host, 100 + rank, host, address, route, port, str(rank))


def meet_all(store, size: int, timeout: float = 20.0) -> list:
    """What `meet` returns or raises on each rank."""

    def work(rank: int) -> object:
        try:
            return meet(store, rank, size, timeout)
        except (ValueError, TimeoutError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def test_all_agree_on_a_new_number_each_time():
    """Cards of ranks that were killed lie in the store. Mutant: they are taken for the new."""
    store, size = dist.HashStore(), 3
    for rank in range(size):
        store.set(f"card {rank}", json.dumps(asdict(card(rank, "dead", "127.0.0.1", "127.0.0.1"))))
    numbers = []
    for _ in range(3):
        found = meet_all(store, size)
        assert len({number for number, _ in found}) == 1
        assert all(len({c.word for c in cards}) == size for _, cards in found)
        assert all("dead" not in [c.host for c in cards] for _, cards in found)
        numbers.append(found[0][0])
    assert numbers == sorted(set(numbers))


def test_a_rank_that_waits_does_not_fetch_all_cards_again(monkeypatch):
    """They are as many as ranks, for each of which the store sends them. Mutant: each time."""
    store, size, fetched = dist.HashStore(), 3, []
    usual = meeting._roster
    monkeypatch.setattr(meeting, "_roster", lambda own: fetched.append(own) or usual(own))
    said = meeting.obstacle

    def late(cards: list[Card], rank: int) -> str:
        time.sleep(0.5 * (rank == 2))  # 50 looks into the store
        return said(cards, rank)

    monkeypatch.setattr(meeting, "obstacle", late)
    meet_all(store, size)
    assert size <= len(fetched) <= 3 * size


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="^ranks 1, 2 of 3 did not come within the 0.2 s of"):
        meet(store, 0, 3, 0.2)


def test_a_rank_that_cannot_come_is_heard_at_once_and_may_come_later():
    store = dist.HashStore()
    meeting.excuse(store, 1, "no text at /data")
    with pytest.raises(ValueError, match="^rank 1 on .*: no text at /data$"):
        meet(store, 0, 2, 20.0)
    found = [f for f in meet_all(store, 2, timeout=1.0) if not isinstance(f, ValueError)]
    assert len(found) in (0, 1, 2)  # rank 0 may have looked before rank 1 was there
    assert not isinstance(meet_all(store, 2)[0], ValueError)


def test_an_excuse_may_be_taken_back_while_others_read_it():
    """Mutant: its key is deleted, and a rank that has just seen it waits for a timeout."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    meeting.excuse(store, 1, "no text at /data")

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            found = store.check(keys)
            meeting._forget_absence(store, 1)  # before the answer has arrived
            return found

    with pytest.raises(TimeoutError, match="^ranks 1 of 2 did not come"):
        meet(Slow(), 0, 2, 0.2)
    meeting.excuse(store, 1, "still no text")
    with pytest.raises(ValueError, match="still no text"):
        meet(store, 0, 2, 20.0)


# ---------------------------------------------------------------------- Debian's /etc/hosts
def own_interface() -> tuple[str, str]:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not meeting.is_loopback(entry.address):
                return name, entry.address
    pytest.skip("needs an interface besides the loopback")


def test_a_name_that_leads_to_the_loopback_is_cured_by_the_interface(monkeypatch, capsys):
    """As does 127.0.1.1 in /etc/hosts. Mutant: gloo listens where no other host can reach it."""
    name, address = own_interface()
    with socket.create_server((address, 0)) as other:  # stands for the other host
        port = other.getsockname()[1]
        cards = [
            card(0, "one", "127.0.1.1", address),
            card(1, "two", address, address, port),
            card(2, "two", address, address, port),
        ]
        assert obstacle(cards, 0) == ""
    assert meeting.os.environ["GLOO_SOCKET_IFNAME"] == name
    assert meeting.gloo_address() == address
    assert f"leads to its loopback 127.0.1.1; gloo talks over {name}" in capsys.readouterr().out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=eth77: host .* has no such inter"):
        meeting.gloo_address()


def test_the_first_host_finds_the_interface_by_the_way_to_the_others(monkeypatch):
    """There MASTER_ADDR is its own name, and leads to the loopback as well."""
    name, address = own_interface()
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 0.2)
    cards = [card(0, "one", "127.0.1.1", "127.0.1.1"), card(1, "two", "127.0.1.1", address)]
    obstacle(cards, 0)
    assert meeting.os.environ["GLOO_SOCKET_IFNAME"] == name
    both = [card(0, "one", "127.0.1.1", "127.0.1.1"), card(1, "two", "127.0.1.1", "127.0.1.1")]
    assert "name its interface by GLOO_SOCKET_IFNAME" in obstacle(both, 1)


def test_a_host_out_of_reach_is_named_on_all(monkeypatch):
    """Mutant: gloo tries for 12 minutes, whatever --timeout says."""
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 0.2)
    _, address = own_interface()
    cards = [card(0, "one", address, address), card(1, "two", address, address, port=1)]
    assert f"host one does not reach two at {address}: " in obstacle(cards, 0)
    alone = [card(rank, "one", "127.0.1.1", "127.0.1.1") for rank in range(2)]
    assert obstacle(alone, 1) == ""  # one machine may use its loopback
    store, usual = dist.HashStore(), meeting.obstacle
    monkeypatch.setattr(meeting, "obstacle", lambda cards, rank: "far" if rank == 1 else "")
    assert [str(error) for error in meet_all(store, 2)] == ["far", "far"]
    assert usual is obstacle
