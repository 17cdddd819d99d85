"""Meeting: the ranks of torchrun find each other in its store before they connect.

Every rank lays down a card: its host, its process, the address at which gloo will listen, and a
word made up for this very start. Rank 0 reads the cards out as a roster; a rank that finds its own
card there looks whether it can reach the others, and answers; when all have answered, rank 0 lets
them go. A card left by a process that was killed is replaced by that of its successor, and then
rank 0 reads them out again. So the ranks agree on a number of this meeting, by which all find the
same part of the store, even if each torchrun counts its restarts for itself.

What would keep gloo from connecting, for minutes and without a word, is found here, and told to all
ranks: a rank that does not come, a host that others cannot reach. A host whose own name leads to
its loopback, as in /etc/hosts of Debian, talks over the interface that leads to the others instead.

The store believes what it is told by any process that can connect to it: what comes from there is
JSON, and never unpickled. In torch: `torch.distributed.elastic.rendezvous`.
Proved by: tests/hosts/test_two_agents.py, tests/observe/test_watchdog.py.
"""

import ipaddress
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import psutil
import torch.distributed as dist

from minipar.observe.timeline import boot_id

PAUSE = 0.05  # seconds between two looks into the store
CONNECT_SECONDS = 5.0  # until a host counts as out of reach


@dataclass(frozen=True)
class Card:
    """What a rank tells of itself."""

    host: str
    pid: int
    machine: str  # equal on ranks that share a network stack
    address: str  # at which gloo will listen
    route: str  # own address on the way to MASTER_ADDR
    port: int  # at which this rank listens during the meeting
    word: str  # of this start alone
    gpu: str = ""  # identity of the GPU that it will use


def meet(
    store: dist.Store, rank: int, size: int, timeout: float, gpu: str = ""
) -> tuple[int, list[Card]]:
    """Return the number of this meeting, and the cards of all ranks; a collective.

    Raises `ValueError` on all ranks where one cannot work with the others, and `TimeoutError` where
    one does not come within `timeout` seconds.
    """
    limit = time.monotonic() + timeout
    address, route = gloo_address(), _route(os.environ["MASTER_ADDR"])
    reachable = route if is_loopback(address) else address
    family = socket.AF_INET6 if ":" in reachable else socket.AF_INET
    with socket.create_server((reachable, 0), family=family) as listening:
        port = listening.getsockname()[1]
        node, word = platform.node(), secrets.token_hex(8)
        card = Card(node, os.getpid(), _machine(), address, route, port, word, gpu)
        mine = json.dumps(asdict(card))
        _forget_absence(store, rank)
        store.set(f"card {rank}", mine)
        answered, read_out = -1, None
        number, cards = 0, []
        while True:
            if rank == 0:
                read_out = _read_out(store, size, read_out)
            if store.add("meetings", 0) != number:  # it is long: not fetched each time
                number, cards = _roster(store)
            if len(cards) == size and cards[rank] == mine:
                if number != answered:
                    found = [Card(**json.loads(text)) for text in cards]
                    store.set(f"answer {number} {rank}", obstacle(found, rank))
                    answered = number
                answers = [f"answer {number} {other}" for other in range(size)]
                if rank == 0 and store.check(answers):
                    said = [answer.decode() for answer in store.multi_get(answers)]
                    store.set(f"go {number}", json.dumps(said))
                if store.check([f"go {number}"]):
                    break
            if absence := _absence(store):
                raise ValueError(absence[1])
            if time.monotonic() > limit:
                missing = [str(r) for r in range(size) if not store.check([f"card {r}"])]
                who = f"ranks {', '.join(missing)} of {size}" if missing else "one of the ranks"
                raise TimeoutError(f"{who} did not come within the {timeout:g} s of --timeout")
            time.sleep(PAUSE)
    for problem in json.loads(store.get(f"go {number}")):
        if problem:
            raise ValueError(problem)
    return number, found


def _read_out(store: dist.Store, size: int, before: list[str] | None) -> list[str] | None:
    """Rank 0: read the cards out, if they are all there and not those of `before`."""
    keys = [f"card {rank}" for rank in range(size)]
    if not store.check(keys):
        return before
    cards = [*map(bytes.decode, store.multi_get(keys))]
    if cards != before:
        store.set("roster", json.dumps([store.add("meetings", 1), cards]))
    return cards


def _roster(store: dist.Store) -> tuple[int, list[str]]:
    return json.loads(store.get("roster")) if store.check(["roster"]) else (0, [])


# ---------------------------------------------------------------------- a rank that cannot come
def excuse(store: dist.Store, rank: int, problem: str) -> None:
    """Tell the ranks that wait for this one why it will not come; the first to say so is heard."""
    text = f"rank {rank} on {platform.node()}: {problem}"
    store.compare_set("absent", "", json.dumps([rank, text]))


def _absence(store: dist.Store) -> list | None:
    """Return the rank that will not come and its excuse; None if there is none."""
    return json.loads(store.get("absent") or "null") if store.check(["absent"]) else None


def _forget_absence(store: dist.Store, rank: int) -> None:
    """This rank is here after all: started again."""
    if (absence := _absence(store)) and absence[0] == rank:
        store.set("absent", "")  # not deleted: a rank that has just seen the key would wait for it


# ---------------------------------------------------------------------- can they connect?
def obstacle(cards: Sequence[Card], rank: int) -> str:
    """Return what keeps this rank from the others, or ""; gloo may be given another interface."""
    mine = cards[rank]
    first = {card.machine: card for card in reversed(cards)}  # rank of each machine
    others = [card for card in first.values() if card.machine != mine.machine]
    if not others:
        return ""
    speaks = first[mine.machine] is mine
    if is_loopback(mine.address):
        ways = [mine.route, *(_route(card.route) for card in others)]
        name = next((interface_of(way) for way in ways if not is_loopback(way)), "")
        if not name:
            return (
                f"host {mine.host} would listen at {mine.address}, its loopback, which "
                f"{others[0].host} cannot reach; name its interface by GLOO_SOCKET_IFNAME, one of "
                f"{interfaces()}, or mend /etc/hosts"
            )
        os.environ["GLOO_SOCKET_IFNAME"] = name
        if speaks:
            print(
                f"minipar: the name of host {mine.host} leads to its loopback {mine.address}; "
                f"gloo talks over {name} instead (GLOO_SOCKET_IFNAME={name})",
                flush=True,
            )
    for card in others if speaks else []:
        where = card.route if is_loopback(card.address) else card.address
        try:
            if not is_loopback(where):  # else that host finds its way itself, as above
                socket.create_connection((where, card.port), CONNECT_SECONDS).close()
        except OSError as error:
            return (
                f"host {mine.host} does not reach {card.host} at {where}: {error}; is it a "
                f"firewall? GLOO_SOCKET_IFNAME names the interface to use, here one of "
                f"{interfaces()}"
            )
    return ""


def gloo_address() -> str:
    """Return the address at which gloo will listen: of GLOO_SOCKET_IFNAME, or of the host's name.

    Raises `ValueError` for an interface that is not there.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        for entry in psutil.net_if_addrs().get(name, []):
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return entry.address
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={name}: host {platform.node()} has no such interface with an "
            f"address; use one of {interfaces()}"
        )
    with suppress(OSError):
        for family, *_, address in socket.getaddrinfo(socket.gethostname(), 0, type=1):
            with suppress(OSError), socket.socket(family) as own:  # is it one of this host's?
                own.bind(address)
                return address[0]
    return "127.0.0.1"


def _route(target: str) -> str:
    """Return this host's own address on the way to `target`. Sends nothing."""
    family, *_, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def interface_of(address: str) -> str:
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if address in [e.address for e in own]), "")


def interfaces() -> str:
    return ", ".join(name for name, state in psutil.net_if_stats().items() if state.isup)


def _machine() -> str:
    parts = [platform.node(), boot_id()]
    with suppress(OSError):  # Linux: another network namespace is another machine
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return " ".join(parts)
