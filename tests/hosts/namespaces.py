"""Two hosts on one machine: network namespaces, joined by a veth pair that `tc tbf` shapes.

Needs root, `ip` and `tc`; `why_not` says what is missing. All addresses live inside of the
namespaces: the interfaces and the /etc/hosts of the machine itself are left alone. What belongs to
the hosts carries the number of this process in its name, and goes when the block ends.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minipar.ranks import backends
from tests.patience import busy

GOODPUT = 1448 / 1514
"""What is left of a link for data: 66 bytes of each full Ethernet frame are headers."""

NAMES = [f"minipar-{os.getpid()}-{host}" for host in range(2)]
ADDRESSES, PORT, CARD = ["10.77.0.1", "10.77.0.2"], "29500", "card"


def why_not() -> str:
    """Return why there can be no hosts here; empty if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)}"
    probe = subprocess.run(["ip", "netns", "add", NAMES[0]], capture_output=True, encoding="utf-8")
    subprocess.run(["ip", "netns", "del", NAMES[0]], capture_output=True)
    return probe.stderr.strip()


class Hosts:
    """Hosts 0 and 1, each with one network card."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []

    def tell(self, host: int, command: str) -> None:
        """Run `command` on a host, to its end."""
        subprocess.run(["ip", "netns", "exec", NAMES[host], *command.split()], check=True)

    def start(self, host: int, *command: str, **env: str) -> subprocess.Popen:
        """Start Python with arguments on a host; stdout and stderr come by one pipe."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", NAMES[host], sys.executable, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.processes.append(process)
        return process

    def finish(self, processes: list[subprocess.Popen], seconds: float) -> list[str]:
        """Wait for all, for `seconds` of a quiet machine; return what each has printed.

        Raises `AssertionError` with all of it where one does not end.
        """
        said = [b""] * len(processes)
        limit = time.monotonic() + seconds * busy()
        for number, process in enumerate(processes):
            try:
                said[number] = process.communicate(timeout=max(0.1, limit - time.monotonic()))[0]
            except subprocess.TimeoutExpired as late:
                process.kill()
                said[number] = late.stdout or b""
        texts = [text.decode(errors="replace") for text in said]
        late = [n for n, process in enumerate(processes) if process.poll() in (None, -9)]
        told = "\n".join(f"---- {number}\n{text}" for number, text in enumerate(texts))
        assert not late, f"{late} did not end within {seconds * busy():.0f} s:\n{told}"
        return texts

    def run(self, function: Any, *args: Any, per_host: int = 1) -> list[Any]:
        """Call a function of a module on `per_host` ranks of each host; return their results.

        Arguments and results travel as JSON.
        """
        what = ["-m", "tests.hosts.namespaces", function.__module__, function.__name__]
        where = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": CARD}
        where["WORLD_SIZE"] = str(2 * per_host)
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                self.start(
                    rank // per_host, *what, json.dumps(args), folder, RANK=str(rank), **where
                )
                for rank in range(2 * per_host)
            ]
            said = self.finish(ranks, seconds=90)
            assert not any(rank.returncode for rank in ranks), "\n".join(said)
            files = [Path(folder, str(rank)) for rank in range(2 * per_host)]
            return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@contextmanager
def two_hosts(megabits: float, hosts_file: str = "") -> Iterator[Hosts]:
    """Make two hosts, joined at `megabits` per second; `hosts_file`: their /etc/hosts."""
    hosts, folders = Hosts(), [Path("/etc/netns", name) for name in NAMES]  # `ip netns exec` looks
    try:
        for name, folder in zip(NAMES, folders, strict=True):
            if hosts_file:
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(hosts_file, encoding="utf-8")
            subprocess.run(["ip", "netns", "add", name], check=True)
        veth = f"link add {CARD} netns {NAMES[0]} type veth peer name {CARD} netns {NAMES[1]}"
        subprocess.run(["ip", *veth.split()], check=True)
        for host, address in enumerate(ADDRESSES):
            hosts.tell(host, f"ip address add {address}/24 dev {CARD}")
            hosts.tell(host, "ip link set lo up")
            hosts.tell(host, f"ip link set {CARD} up")
            shape = f"rate {megabits}mbit burst 16kb latency 50ms"
            hosts.tell(host, f"tc qdisc add dev {CARD} root tbf {shape}")
        yield hosts
    finally:
        for name, folder in zip(NAMES, folders, strict=True):
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, encoding="utf-8"
            )
            for process in inside.stdout.split():
                os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
        for process in hosts.processes:
            process.wait()


if __name__ == "__main__":  # what a rank does: join, call, and leave its result in a file
    module, function, args, folder = sys.argv[1:]
    with backends.joined("gloo", timeout=60):
        result = getattr(importlib.import_module(module), function)(*json.loads(args))
        Path(folder, os.environ["RANK"]).write_text(json.dumps(result), encoding="utf-8")
