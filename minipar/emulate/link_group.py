"""The backend ``link``: a `torch.distributed` process group over gloo with a clock of its own.

Gloo moves the data; a thread per lane then sleeps until the link of `minipar.emulate.link` would
have carried the data. If ranks make different calls, a `Mismatch` says which rank called what.
"""

import json
import math
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partialmethod
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from minipar.comm import clock
from minipar.comm.collectives import stands_for, wire_bytes
from minipar.emulate import device, link, strict
from minipar.emulate.operations import tensors as tensors_in


def register() -> None:
    """Make the backend ``link`` known to `torch.distributed`; a second call does nothing."""
    if "link" not in dist.Backend.backend_list:
        dist.Backend.register_backend("link", LinkGroup, extended_api=True, devices=["cpu"])


# ---------------------------------------------------------------------- who called when
Part = Sequence[float]
"""One rank's part of an operation: time of the call, seconds on the wire, bytes of a message."""
Cell = tuple[int, int, int]
"""(is_recv, rank, peer) of a message that `rank` sends to `peer`, or receives from `peer`.
(0, rank, rank) is for the collectives of `rank`."""


class Calls:
    """The times of all calls of one process group, in memory that its ranks share.

    A rank posts before gloo starts the operation, and reads after gloo has ended it. By then, all
    other ranks of the call have posted. Shared memory costs microseconds, gloo milliseconds.
    """

    SLOTS, FIELDS = 1024, 4  # calls that one rank may be ahead of another; numbers per call

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        if rank == 0:
            with tempfile.NamedTemporaryFile(prefix="minipar-link-", delete=False) as file:
                store.set("calls", file.name)
        path = store.get("calls").decode()  # a local file: all ranks of a link are on this machine
        shape = 2, size, size, self.SLOTS, self.FIELDS
        table = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.float64)
        self._table, self._posted = table.numpy().reshape(shape), Counter[Cell]()
        if store.add("calls opened", 1) == size:
            os.unlink(path)  # all ranks have mapped the file, so they no longer need its name

    def post(self, cell: Cell, mine: Part, others: Sequence[Cell]) -> Callable[[], list[Part]]:
        """Post this rank's part of the cell's next operation.

        Return a function: it returns this part, and the parts that `others` have posted so far.
        """
        self._posted[cell] += 1
        number = self._posted[cell]
        slot = number % self.SLOTS
        self._table[cell][slot, 1:] = mine
        self._table[cell][slot, 0] = number  # written last: now the other numbers are valid

        def posted() -> list[Part]:
            rows = [self._table[other][slot].tolist() for other in others]
            return [mine, *(row[1:] for row in rows if row[0] == number)]

        return posted


# ---------------------------------------------------------------------- one operation
class Mismatch(RuntimeError):
    """The ranks of a group did not all call the same thing. The group stays usable."""


class LinkWork(dist.Work):
    """One operation of a `LinkGroup`, from this rank's call at `t_issue` to its end at `t_end`.

    The link carries the data from `t_start` on. `waits` has the times at which this rank called
    `wait`, or `is_completed` returned True. Times are in seconds of `time.monotonic`. `num_bytes`
    counts the bytes that this rank sends, as `collectives.wire_bytes` does. `peer` is the group's
    rank at the other end of a message.
    """

    peer: int | None = None

    def __init__(
        self, verb: str, num_bytes: int, t_issue: float, hold: strict.Handle, result: list[Tensor]
    ) -> None:
        super().__init__()
        self.verb, self.num_bytes = verb, num_bytes
        self.t_issue, self.t_start, self.t_end = t_issue, None, None
        self.waits: list[float] = []
        self._hold, self._result, self._error = hold, result, None
        self._done, self.ended = threading.Event(), Future()

    def finish(self, error: Exception | None) -> None:
        """Mark as done; wake the threads that wait."""
        self._error, self.t_end = error, self.t_end or time.monotonic()
        self._hold.travelling = None  # it has arrived
        for observe in link.observers:
            observe(self)
        self._done.set()
        self.ended.set_result(None)

    @property
    def times(self) -> tuple[float, float]:
        """Return start and end on the wire, once done."""
        return self.t_start or self.t_issue, self.t_end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done, or until the timeout of the group; raise the operation's error."""
        self.waits.append(time.monotonic())
        while not self._done.wait(0.1):  # in slices, so that Python handles signals
            pass
        self.result()
        clock.reach(self.t_end)
        return True

    def is_completed(self) -> bool:
        # After True, the caller may read the result, as if it had waited.
        return self._done.is_set() and (self._error is not None or self.wait())

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        self._hold.settle(self._error)
        return self._result

    def get_future(self) -> Future:
        # With Future.set_exception, C++ sees the exception as a *value*: DDP reads a tensor from it
        # and crashes. Only a callback that raises makes the future fail in C++ too.
        return self.ended.then(lambda _: self.result())


# ---------------------------------------------------------------------- the process group
class LinkGroup(dist.ProcessGroup):
    """A gloo group whose operations take as long as on the link in `use`."""

    def __init__(self, options: Any, _: Any = None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self.inner = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        # This gives the group a name, and a backend to calls that stay inside C++.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._calls = Calls(options.store, rank, size)
        self._lanes: dict[Any, queue.SimpleQueue] = {}
        self.moving: set[LinkWork] = set()  # what has started on the wire and has not ended yet
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def getBackendName(self) -> str:
        return "link"

    def shutdown(self) -> None:
        """End the threads. Operations that have not begun, or are asleep, raise `RuntimeError`."""
        with self._lock:
            self._stopped.set()
            for jobs in self._lanes.values():
                jobs.put(None)

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise RuntimeError("the process group was destroyed")

    # -------- lanes: a thread for collectives, and one per peer and direction for messages
    def _enqueue(
        self, lane: Any, work: LinkWork, move: Callable[[], list[Part]], latency: float = 0.0
    ) -> LinkWork:
        """Queue `work`: the thread of a lane moves its data, and sleeps as long as the link would.

        `move` returns the parts of all ranks. During the last seconds, `latency`, the link can
        carry the next operation.
        """
        with self._lock:
            self._raise_if_stopped()
            if lane not in self._lanes:
                jobs = self._lanes[lane] = queue.SimpleQueue()
                threading.Thread(target=self._work_off, args=(jobs,), daemon=True).start()
            self._lanes[lane].put((work, move, latency))
        return work

    def _work_off(self, jobs: queue.SimpleQueue) -> None:
        free = 0.0  # when the link can carry the next operation
        while (job := jobs.get()) is not None:
            work, move, latency = job
            try:
                self._raise_if_stopped()
                starts, seconds, _ = zip(*move(), strict=True)
                work.t_start = max(free, *starts)
                self.moving.add(work)
                end = work.t_start + max(seconds)
                free = end - latency
                while (left := end - time.monotonic()) > 0:
                    self._stopped.wait(left)
                    self._raise_if_stopped()
                work.t_end = end if device.current() else None  # even if the sleep was longer
                failed = None
            except Mismatch as error:
                failed = error
            except Exception as error:
                failed = RuntimeError(f"{work.verb} on rank {self.ranks[self.rank()]}: {error}")
            self.moving.discard(work)
            work.finish(failed)
            del work, move, job, failed  # an idle lane must not keep tensors alive

    # -------- collectives
    def _collective(self, verb: str, gloo: str, *args: Any, piece: int = 0) -> LinkWork:
        """Call gloo's method `gloo`, in the time of `verb` in the cost model.

        The last of `args` are gloo's options. ``args[piece]`` is the part of one rank: its shape is
        the same on all ranks. If a call is coalesced, arguments are lists: gloo is called once per
        pair, and the link carries all pairs as one transfer.
        """
        *args, opts = args
        is_coalesced = gloo.endswith("_base") and isinstance(args[0], list)
        pieces = tensors_in(args[piece : piece + 1])
        clock.catch_up()  # sleep until the device has computed the tensors
        rank, size, flows = self.rank(), self.size(), []
        if verb == "all_to_all":  # slices may be uneven
            flows = _flows(size, *args)
            sent, received = (sum(there) - there[rank] for there in flows)
            whole = max(sent, received) * size // max(size - 1, 1)
        else:
            is_split = verb in ("all_gather", "reduce_scatter", "gather", "scatter")
            whole = sum(tensor.nbytes for tensor in pieces) * (size if is_split else 1)
            sent = wire_bytes(verb, whole, size)
        dtype = str(pieces[0].dtype)[6:] if pieces else ""
        whole, sent = (device.counted(num_bytes, dtype) for num_bytes in (whole, sent))
        seconds = link.seconds(verb, whole, size, link.in_use().between(self.ranks))
        call = stands_for.get() or verb
        said = self._describe(call, pieces, opts) if link.checks else ""
        name = call.partition("(")[0]
        hold = strict.Handle(name, args, *self._read_and_written(verb, args, opts))
        t_issue, everyone = clock.now(), [(0, one, one) for one in range(size)]
        posted = self._calls.post(everyone[rank], (t_issue, seconds, 0), everyone)

        def move() -> list[Part]:
            if said:
                self._compare(said, flows)
            pairs = zip(*hold.travelling, strict=True) if is_coalesced else [hold.travelling]
            for work in [getattr(self.inner, gloo)(*pair, opts) for pair in pairs]:
                work.wait()  # not is_completed(), which gloo's reduce-scatter never reports
            return posted()

        work = LinkWork(name, sent, t_issue, hold, tensors_in(args[:1]))
        return self._enqueue("collectives", work, move)

    # torch's functional collectives call the coalesced methods. Other methods run on gloo directly.
    allreduce = partialmethod(_collective, "all_reduce", "allreduce")
    broadcast = partialmethod(_collective, "broadcast", "broadcast")
    reduce = partialmethod(_collective, "reduce", "reduce")
    gather = partialmethod(_collective, "gather", "gather", piece=1)
    scatter = partialmethod(_collective, "scatter", "scatter")
    allgather = partialmethod(_collective, "all_gather", "allgather", piece=1)
    all_gather_single = partialmethod(_collective, "all_gather", "_allgather_base", piece=1)
    all_gather_single_coalesced = all_gather_single
    reduce_scatter = partialmethod(_collective, "reduce_scatter", "reduce_scatter")
    reduce_scatter_single = partialmethod(_collective, "reduce_scatter", "_reduce_scatter_base")
    reduce_scatter_single_coalesced = reduce_scatter_single
    all_to_all_single = partialmethod(_collective, "all_to_all", "alltoall_base", piece=1)

    def barrier(self, opts: Any) -> LinkWork:
        return self._collective("barrier", "barrier", opts)

    def _read_and_written(self, verb: str, args: Sequence[Any], opts: Any) -> list[list]:
        """Return the tensors that an operation reads, and the tensors that it fills."""
        if verb in ("broadcast", "reduce"):  # in place, and one-sided
            fills = (verb == "reduce") == (opts.rootRank == self.rank())
            return [[], tensors_in(args)] if fills else [tensors_in(args), []]
        return [tensors_in(args[1:2]), tensors_in(args[:1])]

    def _describe(self, verb: str, pieces: list[Tensor], opts: Any) -> str:
        """Return this call in words: the same on all ranks if they agree."""
        kinds = [strict.kind(tensor) for tensor in pieces]
        if verb == "all_to_all":  # shapes may differ
            kinds = [kinds[0].split()[0]]
        operation = f"({opts.reduceOp.op.name.lower()})" if hasattr(opts, "reduceOp") else ""
        tensors = f" of {', '.join(kinds)}" if kinds else ""
        root = f" at rank {self.ranks[opts.rootRank]}" if hasattr(opts, "rootRank") else ""
        return verb + operation + tensors + root

    def _compare(self, call: str, flows: list[list[int]]) -> None:
        """Exchange what each rank is about to call; raise `Mismatch` unless all call the same."""
        width = 300 + 2 * self.size() * 20  # bytes, the same on all ranks
        mine = json.dumps([call[:240], flows]).ljust(width).encode()
        told = torch.empty(self.size() * width, dtype=torch.uint8)
        given = torch.tensor([*mine], dtype=torch.uint8)
        self.inner._allgather_base(told, given, c10d.AllgatherOptions()).wait()
        rows = (json.loads(bytes(row)) for row in told.view(-1, width).tolist())
        calls, flows = zip(*rows, strict=True)
        who = []
        for text in dict.fromkeys(calls):
            ranks = [str(self.ranks[i]) for i, other in enumerate(calls) if other == text]
            who.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} called {text}")
        if len(who) > 1:
            raise Mismatch(f"the ranks do not agree: {'; '.join(who)}")
        for src, dst in product(range(self.size()), repeat=2) if flows[0] else ():
            sent, expected = flows[src][0][dst], flows[dst][1][src]
            if sent != expected:
                raise self._wrong_size(src, dst, sent, expected)

    def _wrong_size(self, src: int, dst: int, sent: int, expected: int) -> Mismatch:
        there = f"rank {self.ranks[dst]}, which expects {expected} from it"
        return Mismatch(f"rank {self.ranks[src]} sends {sent} bytes to {there}")

    # -------- messages: handed to gloo in the caller, else two ranks that send first would hang
    def _message(self, verb: str, tensors: list[Tensor], peer: int, tag: int) -> LinkWork:
        if tag:
            raise ValueError(f"{verb}, {tag=}: an emulated link numbers messages without a tag")
        self._raise_if_stopped()
        clock.catch_up()  # sleep until the device has computed the tensors
        is_recv, rank = int(verb == "recv"), self.rank()
        num_bytes, dtype = tensors[0].nbytes, str(tensors[0].dtype)[6:]
        counted = device.counted(num_bytes, dtype)
        wire = link.in_use().between((self.ranks[rank], self.ranks[peer]))
        t_issue, seconds = clock.now(), link.seconds(verb, counted, 2, wire)
        here, there = (is_recv, rank, peer), (1 - is_recv, peer, rank)
        posted = self._calls.post(here, (t_issue, seconds, num_bytes), [there])
        sizes = [int(size) for *_, size in posted()]  # the rank that posts second sees both
        if link.checks and len(set(sizes)) > 1:
            src, dst = (peer, rank) if is_recv else (rank, peer)
            raise self._wrong_size(src, dst, *(sizes[::-1] if is_recv else sizes))
        hold = strict.Handle(verb, tensors, *(([], tensors) if is_recv else (tensors, [])))
        inner = getattr(self.inner, verb)(hold.travelling, peer, tag)

        def move() -> list[Part]:
            inner.wait()
            return posted()

        work = LinkWork(verb, wire_bytes(verb, counted, 2), t_issue, hold, tensors)
        work.peer = peer
        return self._enqueue((verb, peer), work, move, wire.latency)

    send = partialmethod(_message, "send")
    recv = partialmethod(_message, "recv")


def _flows(size: int, output: Tensor, given: Tensor, *splits: list[int]) -> list[list[int]]:
    """Return the bytes that an all-to-all sends to each rank, and those it expects from each."""
    flows = []
    for tensor, counts in zip((given, output), splits[::-1] or ((), ()), strict=True):
        row = tensor.element_size() * math.prod(tensor.shape[1:])
        flows.append([row * count for count in counts or [len(tensor) // size] * size])
    return flows
