"""The standing group of ranks: results, output, every way to fail, and every way to end.

The functions named after a fault run on four ranks. Each leaves the others in the worst place: in a
collective that the failing rank never joins.
"""

import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from minipar.comm import collectives as comm
from minipar.comm.mesh import Mesh
from minipar.ranks import worker
from minipar.ranks.launch import Call, RankError, Ranks
from minipar.ranks.worker import Failure
from tests.patience import is_alive, until, within

pytestmark = pytest.mark.slow  # many processes come and go here

ALONE = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
"""What a script in an interpreter of its own needs."""
RECOVERY = 5.0  # seconds in which a failed call must have returned, with the group mended


@pytest.fixture(scope="module")
def pool():
    with Ranks(4, sink=lambda *_: None) as pool:
        yield pool


def rank() -> int:
    return dist.get_rank()


def total() -> float:
    """1 + 2 + 3 + 4 = 10 along all ranks: the group works."""
    return comm.all_reduce(torch.tensor(rank() + 1.0), Mesh(dp=4).dp).item()


def assert_works(pool: Ranks) -> None:
    assert pool.run(total) == [10] * 4


# ---------------------------------------------------------------------- calls and results


def test_any_function_travels(pool):
    captured = torch.arange(3.0)

    class Local:
        def __init__(self, x: float) -> None:
            self.x = x

    def closure(y: float) -> Local:
        return Local(captured.sum().item() + y)

    assert [local.x for local in pool.run(closure, 2.0)] == [5.0] * 4
    assert pool.run(lambda local: local.x + rank(), Local(1)) == [1, 2, 3, 4]
    assert [type(local) for local in pool.run(Local, 7)] == [Local] * 4  # comes back as it went
    big = torch.randn(1_000_000)  # more than a pipe holds
    for result in pool.run(lambda x: -x, big):
        assert torch.equal(result, -big)


def test_what_was_imported_is_not_for_ranks_to_collect(pool):
    """A collection would take a third of a second, and copy 70 MB for each rank.

    Mutant: nothing is frozen before ranks are forked.
    """
    assert min(pool.run(gc.get_freeze_count)) > 100_000


def test_dataloader_workers_inside_a_rank(pool):
    """And a rank that is killed is missed at once, though its workers still hold its pipe."""

    def load(die: bool) -> list[list[int]]:
        loader = torch.utils.data.DataLoader(
            range(8), batch_size=4, num_workers=2, persistent_workers=True
        )
        batches = [batch.tolist() for batch in loader]
        if die and rank() == 1:
            if os.fork() == 0:  # workers look after their parent every few seconds
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if die:
            total()
        return batches

    usual = multiprocessing.get_start_method()  # not the fork server, which imports torch anew
    assert pool.run(lambda: multiprocessing.get_start_method()) == [usual] * 4
    assert pool.run(load, False) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 4
    with within(RECOVERY), pytest.raises(RankError, match="SIGKILL"):
        pool.run(load, True)
    assert_works(pool)


def test_threads_take_turns(pool):
    """Catches: answers without the number of their call (30 of 30 went to another thread)."""

    def ask(thread: int) -> None:
        for i in range(25):
            mine = thread, i
            assert pool.run(lambda mine: (time.sleep(0.001), mine)[1], mine) == [mine] * 4

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, range(6)))


# ---------------------------------------------------------------------- what user code leaves


def start_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def test_what_ranks_have_started_ends_with_them(pool):
    children = pool.run(start_a_child)
    assert all(map(is_alive, children))
    with pytest.raises(RankError):
        pool.run(killed)
    until(lambda: not any(map(is_alive, children)), 3)
    assert not any(map(is_alive, children))
    assert_works(pool)


def test_ranks_join_again_after_destroy_process_group(pool):
    """The last line of every tutorial. Catches: a pool that is of no use until `restart`."""
    remade, pids = pool.remade, pool.pids
    with within(RECOVERY):
        pool.run(lambda: dist.destroy_process_group())
        assert_works(pool)
        pool.run(lambda: dist.destroy_process_group() if rank() == 2 else None)
        assert_works(pool)
    assert pool.remade == remade + 2 and pool.pids == pids

    def joins_for_itself() -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    pool.run(joins_for_itself)  # a group, but not ours
    assert_works(pool)
    with pytest.raises(RankError, match="default process group twice"):
        pool.run(lambda: dist.init_process_group("gloo"))
    assert_works(pool)


# ---------------------------------------------------------------------- output
def test_output_goes_through_the_sink(pool, monkeypatch):
    heard = []
    monkeypatch.setattr(pool, "sink", lambda *what: heard.append((*what, time.monotonic())))

    def talk() -> float:
        print("one", rank())
        said = time.monotonic()
        time.sleep(0.3)
        print("error", file=sys.stderr)
        worker.say("figure", {"rank": rank()})
        print("no newline", end="")
        return said

    for r, said in enumerate(pool.run(talk)):
        (*line, when), *rest = (what for who, *what in heard if who == r)
        assert line == ["stdout", f"one {r}\n"]
        assert when < said + 0.3  # while the rank was still running
        said_later = ("stderr", "error\n"), ("figure", {"rank": r}), ("stdout", "no newline")
        assert [(stream, text) for stream, text, _ in rest] == [*said_later]


def test_a_sink_that_fails_ends_the_call(pool, monkeypatch):
    """Catches: an OSError of the sink that is taken for the end of a rank (then: waits forever)."""

    def full(*_: object) -> None:
        raise BrokenPipeError("nobody reads")

    with monkeypatch.context() as patch, within(RECOVERY):
        patch.setattr(pool, "sink", full)
        with pytest.raises(BrokenPipeError, match="nobody reads"):
            pool.run(lambda: print("hello"))
    assert_works(pool)


# ---------------------------------------------------------------------- failures
def raises_before_all_reduce() -> None:
    Mesh(dp=2, tp=2)
    if rank() == 1:
        raise ValueError("my own mistake")
    total()


def raises_while_others_cannot_be_stopped() -> None:
    Mesh(dp=2, tp=2)
    if rank() == 1:
        raise ValueError("my own mistake")
    while rank() == 2:
        with suppress(BaseException):
            time.sleep(60)
    dist.new_group([0, 3])  # waits for all at the store


def raises_while_another_holds_the_interpreter() -> None:
    Mesh(dp=2, tp=2)
    if rank() == 1:
        raise ValueError("my own mistake")
    if rank() == 2:
        re.match(r"(a+)+$", "a" * 60 + "b")  # years in C, deaf to signals


RAISES = [
    raises_before_all_reduce,
    raises_while_others_cannot_be_stopped,
    raises_while_another_holds_the_interpreter,
]


def test_a_group_is_mended_unless_all_failed_alike_and_kept_their_connections():
    """Mutants: one is as good as all; a lost connection is none."""
    one, broken = (Failure("", "E", "", "", broken=lost) for lost in (False, True))
    for failures, is_alike in ([one], False), ([one, one], True), ([one, broken], False):
        call = Call(2, {0, 1}, seconds=9.0)
        for rank, failure in enumerate(failures):
            call.answered(rank, failure, True)
        assert call.has_broken_group != is_alike


def a_runtime_error_of_my_own() -> None:
    Mesh(dp=4)
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_an_error_of_the_code_is_none_of_the_connection(pool):
    with pytest.raises(RankError) as error:
        pool.run(a_runtime_error_of_my_own)
    assert not any(failure.broken for failure in error.value.failures.values())


@pytest.mark.parametrize("fault", RAISES, ids=lambda fault: fault.__name__)
def test_who_raises_is_shown_alone_and_the_group_goes_on(pool, fault):
    with within(RECOVERY), pytest.raises(RankError) as error:
        pool.run(fault)
    assert list(error.value.failures) == [1]  # nobody's consequences
    shown = str(error.value)
    assert shown.startswith("a rank failed\nrank 1 of 4 (dp=0, tp=1):\nTraceback")
    assert shown.endswith("ValueError: my own mistake")
    assert shown.count("Traceback") == 1
    assert fault.__name__ in shown and "ranks/launch.py" not in shown  # frames of the function only
    with within(1.0):
        assert_works(pool)


def killed() -> None:
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    total()


def left() -> None:
    if rank() == 2:
        os._exit(3)
    total()


def killed_slowly() -> None:
    """As a process whose GPU's memory is given back last. Mutant: stopped before it is gone."""
    if rank() == 2:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr:
                with socket.socket(fileno=os.dup(connection.fd)) as end:
                    end.shutdown(socket.SHUT_WR)
        time.sleep(0.8)
        os.kill(os.getpid(), signal.SIGKILL)
    total()


DEATHS = {
    killed: "signal 9 (SIGKILL)",
    killed_slowly: "signal 9 (SIGKILL)",
    left: "exit 3",
}


@pytest.mark.parametrize("fault", DEATHS, ids=lambda fault: fault.__name__)
def test_who_dies_is_shown_alone_and_all_start_anew(pool, fault):
    """Catches: the broken connections of the others shown as failures."""
    how = DEATHS[fault]
    pids = pool.pids
    with within(RECOVERY), pytest.raises(RankError) as error:
        pool.run(fault)
    assert list(error.value.failures) == [2]
    failure = error.value.failures[2]
    assert failure.message == f"the process ended by {how}"
    assert str(error.value) == f"a rank failed\nrank 2 of 4:\n{failure.message}"
    assert not set(pids) & set(pool.pids)
    assert not any(map(psutil.pid_exists, pids))  # no zombie
    with within(1.0):
        assert_works(pool)


def test_all_ranks_raise_alike(pool):
    """Then they are still in step: the group, and the objects that hold it, live on."""

    def fail() -> None:
        comm.barrier(Mesh(dp=4).dp)
        raise KeyError(f"of rank {rank()}" if rank() == 3 else "same")

    before = pool.remade
    both = r"ranks 0, 1, 2 of 4:\n(.|\n)*rank 3 of 4 \(dp=3\)"
    with pytest.raises(RankError, match=both) as error:
        pool.run(fail)
    assert list(error.value.failures) == [0, 1, 2, 3]
    assert str(error.value).count("Traceback") == 2  # one per message, not one per rank
    assert pool.remade == before
    assert_works(pool)


def test_sys_exit_is_a_failure(pool):
    with within(RECOVERY), pytest.raises(RankError, match="SystemExit: 3"):
        pool.run(lambda: sys.exit(3) if rank() == 1 else total())
    assert_works(pool)


def test_what_cannot_travel_is_named(pool):
    """There and back."""
    lock = threading.Lock()
    for call in lambda: pool.run(rank, x=lock), lambda: pool.run(lambda: lock):
        with pytest.raises(TypeError, match="cannot be sent to the ranks: cannot pickle"):
            call()
    with pytest.raises(RankError, match="cannot pickle .*lock") as error:
        pool.run(lambda: threading.Lock() if rank() == 2 else 1)
    assert list(error.value.failures) == [2]
    assert_works(pool)


# ---------------------------------------------------------------------- interrupts
def hang_in_all_reduce() -> None:
    if rank() != 0:
        total()
    comm.recv(torch.empty(1), Mesh(dp=4).dp, 1)


def hang_in_sleep() -> None:
    time.sleep(60)


def hang_in_a_loop() -> None:
    while True:
        pass


def hang_in_a_loop_of(_: object) -> None:
    hang_in_a_loop()


def hang_talking() -> None:
    while True:
        print("bla" * 10_000)  # messages that a careless interrupt would cut in two


def hang_showing() -> None:
    while True:  # more than the pipe holds: this rank waits in nearly every moment
        worker.say("figure", "bla" * 100_000)


@contextmanager
def interrupt_after(seconds: float):
    """Send this process one SIGINT, as Ctrl-C does."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


HANGS = [hang_in_all_reduce, hang_in_sleep, hang_in_a_loop, hang_talking, hang_showing]


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_interrupt_while_ranks_hang(pool, hang):
    pids, handler = pool.pids, signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with within(RECOVERY), interrupt_after(0.3), pytest.raises(KeyboardInterrupt):
            pool.run(hang)
        with within(1.0):
            assert_works(pool)
    assert pool.pids == pids  # nobody was killed for it: variables are kept
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupt_before_the_call_has_begun(pool):
    """A busy rank takes the call up after the word to stop it: the word is not lost."""

    class Late:
        def __reduce__(self):
            return time.sleep, (1.0,)  # the rank unpickles for a second

    pids = pool.pids
    with within(RECOVERY), interrupt_after(0.3), pytest.raises(KeyboardInterrupt):
        pool.run(hang_in_a_loop_of, Late())
    assert_works(pool)
    assert pool.pids == pids


def test_a_time_limit_names_the_ranks_that_are_late(pool, monkeypatch):
    says = "ranks 0, 1, 2, 3: not done after 3"
    with monkeypatch.context() as patch, within(3 + RECOVERY):
        patch.setattr(pool, "time_limit", 3.0)  # on a busy machine, ranks begin late
        with pytest.raises(TimeoutError, match=says):
            pool.run(hang_in_all_reduce)
    assert_works(pool)


# ---------------------------------------------------------------------- starting and ending
def test_bad_arguments_start_nothing():
    with pytest.raises(ValueError, match=r"0 ranks: a group needs at least 1 rank"):
        Ranks(0)
    with pytest.raises(ValueError, match="backend='mpi' is unknown; use one of gloo, nccl, link"):
        Ranks(2, backend="mpi")


def test_trap_08_twenty_starts_and_ends_in_a_row(capfd):
    """Every round makes all processes, connections and the meeting point anew."""
    for _ in range(20):
        with Ranks(4) as pool:
            assert_works(pool)
    assert capfd.readouterr() == ("", "")


LEAVE = """
import gc, os, socket, sys
from minipar.ranks.backends import joined, under_torchrun
from minipar.comm.mesh import Mesh
import torch, torch.distributed as dist
def one(rank):
    assert not under_torchrun()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")  # as torchrun does
    assert under_torchrun()
    with joined("gloo", timeout=20):
        mesh, tensor = Mesh(dp=2), torch.ones(1)
        dist.all_reduce(tensor, group=mesh.dp.group)
        assert tensor.item() == 2 and mesh.label == f"rank {rank} of 2 (dp={rank})"
    assert not dist.is_initialized()
    sys.exit(0)  # the whole way out of the interpreter, where the races are
gc.collect()
gc.freeze()  # what the children inherit need not be taken apart by each of them
for round in range(10):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            one(rank)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], codes
print("10 rounds")
"""


def test_trap_08_ranks_leave_in_order():
    """10 rounds of `joined`: no SIGABRT on the way out, no noise on stderr."""
    env = os.environ | ALONE | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    how = dict(capture_output=True, env=env, timeout=100, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", LEAVE], **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10 rounds\n", "")


def test_trap_08_two_pools_at_once(pool, ranks):
    """Catches: a fixed port, or a meeting point with a fixed name."""
    other = ranks(2)

    def in_turn(of: Ranks) -> list:
        return [
            of.run(lambda: comm.all_reduce(torch.ones(1), Mesh(dp=dist.get_world_size()).dp).item())
            for _ in range(10)
        ]

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(in_turn, (pool, other))) == [[[4] * 4] * 10, [[2, 2]] * 10]


def test_closing():
    """`close` twice, after use, in a `with`; everything that was started is gone."""
    with Ranks(1, sink=None) as small:
        assert small.run(lambda: Mesh().size) == [1]
        pids = small.pids
        # By another thread, in the middle of a call, which must not mend what ends on purpose.
        threading.Timer(0.3, small.close).start()
        with within(RECOVERY), pytest.raises(RuntimeError, match="these ranks have ended"):
            small.run(time.sleep, 60)
    assert small.closed and small.pids == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    small.close()
    with pytest.raises(RuntimeError, match="these ranks have ended; start new ones"):
        small.run(rank)


def test_ranks_are_told_apart_from_the_fork_server(monkeypatch, capfd):
    """Each pool has the environment, folder and streams of its start. Mutant: the server's."""
    monkeypatch.setenv("TOLD", "yes")
    with Ranks(2, sink=None) as two:
        seen = two.run(lambda: (os.environ["TOLD"], os.getcwd()))
        assert seen == [("yes", os.getcwd())] * 2
        two.run(lambda: os.write(1, b"hello\n"))  # at once, whoever else writes
        assert capfd.readouterr().out == "hello\n" * 2


# ---------------------------------------------------------------------- programs of their own
UNGUARDED = """
from minipar.ranks.launch import Ranks
import torch, torch.distributed as dist
print("once")
class Local:
    number = 7
def work(x):
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), Local.number + x
with Ranks(2) as ranks:
    print(ranks.run(work, 1))
"""


def test_a_program_needs_no_guard(tmp_path):
    """Mutant: each rank runs the file again, and starts ranks itself."""
    (tmp_path / "program.py").write_text(UNGUARDED, encoding="utf-8")
    how = dict(cwd=tmp_path, env=os.environ | ALONE, capture_output=True, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], timeout=200, **how)
    assert (done.stdout, done.stderr) == ("once\n[(2.0, 8), (2.0, 8)]\n", "")


PARENT = """
import os, re, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
from minipar.ranks import processes
from minipar.ranks.launch import Ranks
processes.METHOD, end = sys.argv[1:]
ranks = Ranks(4, sink=None)
print(*ranks.pids, flush=True)
def busy():
    subprocess.Popen(["sleep", "600"])
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)
    if dist.get_rank() == 1:
        time.sleep(600)
    if dist.get_rank() == 2:
        torch.ones(3000, 3000).matrix_power(1 << 60)  # minutes in C
    while True:
        pass
def later():
    time.sleep(1)
    print("busy", flush=True)
    if end == "exception":
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=later, daemon=True).start()
ranks.run(busy)
"""


@pytest.fixture
def parent(method, end):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | ALONE)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, method, end], **pipes)
    yield parent
    parent.kill()
    parent.wait()
    parent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank that is deaf lives on")
@pytest.mark.parametrize(
    ("method", "end"),
    [("forkserver", "SIGKILL"), ("forkserver", "exception"), ("spawn", "SIGKILL")],
)
def test_nothing_survives_the_parent(parent, method, end):
    """With a rank in a collective, one asleep, one in C and one in a busy loop; nor do the fork
    server, Python's resource tracker and what the ranks have started."""
    pids = [int(pid) for pid in parent.stdout.readline().decode().split()]
    assert len(pids) == 4
    assert parent.stdout.readline() == b"busy\n"
    if end == "SIGKILL":  # else they may have ended by now
        ranks = [psutil.Process(pid) for pid in pids]
        until(lambda: sum(len(rank.children()) for rank in ranks) == 4, 10)
        pids = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert len(pids) >= 4 + 4 + 1
        parent.kill()
    parent.wait(60)
    until(lambda: not any(map(is_alive, pids)), 5)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:  # leave nothing behind even if this test fails
        os.kill(pid, signal.SIGKILL)
    assert left == []
