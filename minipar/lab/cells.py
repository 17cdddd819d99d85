"""One notebook, many ranks: ``%%ranks`` runs a cell on all of them, and nothing ever hangs.

    ranks = Ranks(4, link="1gbe")          # once, in an ordinary cell

    %%ranks                                # all of them, or a few: %%ranks -r 0,2
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    x                                      # shown as IPython shows it, behind the rank's number

    ranks["x"]                             # the x of every rank, in a list
    ranks.put(lr=0.1)                      # the other way round

Every rank keeps a namespace of its own from cell to cell; ``rank``, ``world_size``, ``mesh``,
``device``, ``torch`` and ``dist`` are in it. Output appears behind ``[rank]``: the first
rank's while it runs, the others' in rank order once all are done. So the output is the same each
time.

The ranks are those of `minipar.ranks.launch`, with a shell in each (`minipar.lab.shell`). Whatever
a cell does, the notebook is usable again within seconds: an error, ranks that disagree or wait for
what no rank sends, the stop button, a killed process. One line then says what must be run again.
"""

import linecache
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from minipar.comm.mesh import check_sizes
from minipar.emulate import link as links
from minipar.lab import shell
from minipar.lab.shell import RankShell
from minipar.ranks import launch, processes, worker
from minipar.ranks.backends import check_ranks
from minipar.ranks.launch import RankError
from minipar.sim import emulate


class CellError(worker.InWords, RuntimeError):
    """A cell failed on some ranks. The message is their tracebacks."""


class Interrupted(worker.InWords, KeyboardInterrupt):
    """The stop button was pressed while ranks were at work."""


class TimedOut(worker.InWords, TimeoutError):
    """A cell took longer than `time_limit` allows."""


class Watched(launch.Ranks):
    """Ranks that are stopped, within seconds, when all ranks that still run wait in vain.

    They know the cells of the notebook: the traceback of an error shows lines of cells.
    """

    def __init__(
        self, size: int, *, sink: launch.OutputSink = launch.prefixed, **options: Any
    ) -> None:
        self._stuck: dict[int, list[tuple[float, str, str]]] = {}  # per rank: when, verb, place
        self._num_done, self._listener = 0, sink
        super().__init__(size, sink=self._note, **options)

    def _start(self) -> None:
        super()._start()
        launch.Ranks.run_each(self, shell.watch, [()] * self.size)

    def run_each(self, fn: Callable, args_of: list[tuple | None], **kwargs: Any) -> list[Any]:
        """Run as `launch.Ranks` does; the traceback of an error shows the notebook's own lines."""
        cells = notebook_cells()
        args_of = [None if args is None else (cells, fn, *args) for args in args_of]
        return super().run_each(shell.call, args_of, **kwargs)

    def _supervise(self, *args: Any) -> launch.Call:
        """Supervise as `launch.Ranks` does; what ranks said in the call before is forgotten."""
        self._stuck, self._num_done = {}, 0
        return super()._supervise(*args)

    def _press(self, job: launch.Call) -> None:
        """Press as `launch.Ranks` does; stop ranks if all that are left wait in vain."""
        super()._press(job)
        if self._num_done != len(job.results):  # the rank that ended may have freed others
            self._stuck, self._num_done = {}, len(job.results)
        recent = time.monotonic() - 1.5
        # Two reports are needed: one report may have been under way when the wait ended.
        stuck = {r for r, said in self._stuck.items() if said[1:] and said[-1][0] > recent}
        if not job.waiting or job.failures or job.stopped or not job.waiting <= stuck:
            return
        others = sorted(job.results) or sorted({*range(self.size)} - job.asked)
        they = "finished by now" if job.results else "not asked"
        why = f"{they}: rank {', '.join(map(str, others))}" if others else "all ranks wait"
        for rank in job.waiting:
            _, verb, place = self._stuck[rank][-1]
            what = f"rank {rank} of {self.size}", "Stuck", f"waits in {verb}, in vain ({why})"
            job.failures[rank] = worker.Failure(*what, report=what[-1] + place)
        self._stop(job)

    def _note(self, rank: int, kind: str, content: Any) -> None:
        if kind == "stuck":
            self._stuck.setdefault(rank, []).append((time.monotonic(), *content))
        else:
            self._listener(rank, kind, content)


class Ranks(Watched):
    """Ranks behind a notebook, for ``%%ranks``. Starting new ones ends those from before.

    Args:
        size: number of ranks.
        link: what connects them: a name such as "1gbe" (`minipar.emulate.link.LINKS`), a `Link` or
            a `Topology`. `use` changes it later.
        mesh: sizes of the axes of ``mesh`` on the ranks; all in one axis ``dp`` if not given.
        backend: "link", on which the notebooks are the same everywhere, GPU or not; or "gloo", or
            "nccl" for real GPUs.
        device: what every rank computes on by declaration: "h100/100" is slowed 100 times, and the
            link with it, while recorded times are an H100's; see `minipar.emulate.device`.
        magnify: how many times as wide a model, and as long a sequence, that device is to see.
        options: of `minipar.ranks.launch.Ranks`.

    Raises `ValueError` for a size, link, mesh, backend or device that cannot be.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        link: Any = "none",
        mesh: dict[str, int] | None = None,
        backend: str = "link",
        device: str | None = None,
        magnify: float = 1.0,
        **options: Any,
    ) -> None:
        global _current
        self._mesh = {"dp": size} if mesh is None else dict(mesh)
        check_sizes(self._mesh, size)
        self._transcript: _Transcript | None = None
        if backend != "link" and (link != "none" or device is not None):
            raise ValueError(f"a link or a device needs backend='link', not {backend!r}")
        check_ranks(size, backend)  # now: a refusal must not end the ranks that run
        # The notebook's own formulas use that link as well.
        self.backend, self.link = backend, links.use(link)
        self.device = device and emulate.device(device, magnify)
        if _current is not None:
            _current.close()
        processes.warm_up(shell.__name__, "minipar.lab.draw", "matplotlib_inline.backend_inline")
        super().__init__(size, sink=self._hear, backend=backend, **options)
        self._prepare()
        _current = self
        register_magic()

    def cell(self, code: str, on: list[int] | None = None, *, number: int = 1) -> None:
        """Run `code` in the namespaces of the ranks `on` (None: all), as ``%%ranks`` does.

        Raises `CellError`.
        """
        ranks = range(self.size)
        args = [(code, number) if rank in (on or ranks) else None for rank in ranks]
        self.run_each(shell.run_cell, args)

    def __getitem__(self, expression: str) -> list[Any]:
        """Evaluate an expression on every rank: ``ranks["loss"]``; tensors come to the CPU."""
        return self.run(shell.evaluate, expression)

    def put(self, **values: Any) -> None:
        """Set variables on every rank."""
        self.run(shell.put, values)

    def use(self, wire: Any) -> None:
        """Change the emulated link, from now on: ``ranks.use("100gbe")``."""
        if self.backend != "link":
            raise ValueError(f"there is a link to change with backend='link', not {self.backend!r}")
        wire = links.use(wire)
        self.run(links.use, wire)
        self.link = wire

    def run_each(self, fn: Callable, args_of: list[tuple | None], **kwargs: Any) -> list[Any]:
        """Run as `launch.Ranks` does; renew the namespaces if the process group is new."""
        with self.lock:
            remade, pids = self.remade, self.pids
            first = next((rank for rank, args in enumerate(args_of) if args is not None), 0)
            self._transcript = _Transcript(first)
            try:
                return super().run_each(fn, args_of, **kwargs)
            except RankError as error:
                raise CellError("\n\n".join(error.reports())) from None
            except KeyboardInterrupt:
                raise Interrupted("Interrupted.") from None
            except TimeoutError as error:
                raise TimedOut(f"Stopped. {error}.") from None
            finally:
                self._transcript.close()
                self._transcript = None
                self._recover(remade, pids)

    def __repr__(self) -> str:
        wire = f"gloo, {self.link.label}" if self.backend == "link" else f"backend {self.backend}"
        device = "" if self.device is None else f"emulated {self.device}; "
        return f"Ranks({self.size})  # {'closed' if self.closed else device + wire}"

    # ------------------------------------------------------------------ after a failure
    def _prepare(self) -> None:
        super().run_each(shell.prepare, [(self._mesh, self.link, self.device)] * self.size)

    def _recover(self, remade: int, pids: list[int]) -> None:
        """Bring the namespaces in line with the process group; say which cells to run again."""
        if self.closed or self.remade == remade:
            return
        self._prepare()
        if pids == self.pids:
            print(
                "The process group was made anew, all variables are kept: "
                "re-run the cells that built models or groups on it."
            )
        else:
            print(
                "All ranks were started anew, with empty namespaces: "
                "re-run the cells that defined what you need, from the first on."
            )

    def _hear(self, rank: int, kind: str, content: Any) -> None:
        if self._transcript is not None:  # else they are being prepared
            self._transcript.hear(rank, kind, content)


class _Transcript:
    """Lines that ranks print in one call: rank by rank, the first rank's at once."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._held: list[tuple[int, str, Any]] = []  # what the others said: rank, kind, content
        self._line: tuple[int, str] | None = None  # rank and stream of a line that has not ended

    def hear(self, rank: int, kind: str, content: Any) -> None:
        if rank == self._first:
            self._show(rank, kind, content)
        else:
            self._held.append((rank, kind, content))

    def close(self) -> None:
        for held in sorted(self._held, key=itemgetter(0)):  # of a rank, in the order of its words
            self._show(*held)
        self._end_line()

    def _show(self, rank: int, kind: str, content: Any) -> None:
        if kind == "display":
            self._write(rank, "stdout", "\n")
            display(content[0], raw=True, metadata=content[1])
        else:
            self._write(rank, kind, content)

    def _write(self, rank: int, stream: str, text: str) -> None:
        out = getattr(sys, stream)
        for line in text.replace("\r\n", "\n").splitlines(keepends=True):
            if self._line != (rank, stream):
                self._end_line()
                out.write(f"[{rank}]" if line == "\n" else f"[{rank}] ")
            out.write(line)
            self._line = None if line[-1] == "\n" else (rank, stream)

    def _end_line(self) -> None:
        if self._line is not None:
            print(file=getattr(sys, self._line[1]))
            self._line = None


# ---------------------------------------------------------------------- the magic
_current: Ranks | None = None  # the ranks that %%ranks speaks to


def chosen_ranks(text: str, size: int) -> list[int]:
    """Return the ranks that "0,2" names. Raises `UsageError` if there are none such."""
    chosen = {part.strip() for part in text.split(",")}
    if not chosen <= {str(rank) for rank in range(size)}:
        raise UsageError(f"%%ranks -r {text}: the ranks are 0 to {size - 1}; write 0,2")
    return sorted(map(int, chosen))


@magic_arguments()
@argument("-r", "--ranks", help="only these ranks, such as 0,2")
def _ranks_magic(line: str, cell: str) -> None:
    """Run the cell on all ranks."""
    asked, ranks = parse_argstring(_ranks_magic, line), _current
    if ranks is None or ranks.closed:
        raise UsageError("%%ranks: no ranks are running; run the first cell, or  ranks = Ranks(4)")
    on = chosen_ranks(asked.ranks, ranks.size) if asked.ranks else None
    # The magic's own line stays as a comment, so that line numbers are as in the notebook.
    head = "" if cell.lstrip().startswith("%%") else f"# %%ranks {line}".rstrip() + "\n"
    # IPython raises its counter before it runs the cell.
    ranks.cell(head + cell, on, number=max(get_ipython().compile._filename_map.values()))


def notebook_cells() -> dict[str, tuple[str, list[str]]]:
    """Return title and lines of each cell that was run here, by the file name that Python knows."""
    numbers = getattr(getattr(get_ipython(), "compile", None), "_filename_map", {})
    return {file: (f"Cell In[{n}]", linecache.getlines(file)) for file, n in numbers.items()}


def register_magic() -> None:
    """Make ``%%ranks`` known, in a notebook; elsewhere do nothing."""
    here = get_ipython()
    if here is not None and not isinstance(here, RankShell):
        here.register_magic_function(_ranks_magic, "cell", "ranks")


register_magic()  # so that %%ranks without ranks is answered, too
