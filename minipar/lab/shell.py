"""The rank's side of ``%%ranks``: an IPython shell in every rank, with output that travels.

The functions of this file run inside of the ranks of `minipar.lab.cells`, called like any other
function: `run_cell` runs a cell in the rank's namespace, `prepare` puts ``rank``, ``mesh`` and the
like into it. What a cell prints goes through the standard output of the rank; what it displays,
figures and tables, is sent by `worker.say`; what goes wrong becomes the text of a traceback in
which only the learner's own lines are left.
"""

import dis
import linecache
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from types import CodeType, FrameType, TracebackType
from typing import Any

import IPython
import torch
import torch.distributed as dist
from IPython.core import page
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from minipar.comm import collectives
from minipar.comm.mesh import Mesh
from minipar.emulate import device as devices
from minipar.emulate import link, link_group
from minipar.ranks import backends, launch, worker
from minipar.ranks.worker import Stopped

PLUMBING = (
    *(
        os.path.dirname(module.__file__) + os.sep
        for module in (torch, IPython, launch, link, collectives)
    ),
    os.path.join(os.path.dirname(__file__), "memory.py"),
)
"""Folders and a file. Their frames tell a learner nothing: the line that called them does."""
PATIENCE = 2.0  # seconds after which a rank that waits for the others says so


# ---------------------------------------------------------------------- the shell
class _Publisher(DisplayPublisher):
    """Sends what `display` is given to the notebook."""

    def publish(self, data: dict, metadata: dict | None = None, *_: Any, **__: Any) -> None:
        """Print text, within the limits of printing; send pictures and tables by themselves."""
        if set(data) == {"text/plain"}:
            print(data["text/plain"])
        else:
            worker.say("display", (data, metadata or {}))


class _LastValue(DisplayHook):
    """Sends the value of a cell's last expression to the notebook."""

    def start_displayhook(self) -> None:
        """Write neither a prompt, nor a line that ends it."""

    write_output_prompt = finish_displayhook = start_displayhook

    def write_format_data(self, format_dict: dict, md_dict: dict | None = None) -> None:
        self.shell.display_pub.publish(format_dict, md_dict)


class RankShell(InteractiveShell):
    """The IPython of one rank. A traceback is kept instead of printed: the notebook shows it."""

    displayhook_class = Type(_LastValue)
    display_pub_class = Type(_Publisher)
    traceback_text: str | None = None
    ask_exit = sys.exit  # for exit(), which ends the cell

    def enable_gui(self, gui: str | None = None) -> None:
        pass  # a rank has no windows

    def showtraceback(self, *args: Any, exception_only: bool = False, **kwargs: Any) -> None:
        worker.shield()  # being stopped while the error is put into words would lose the words
        error = sys.exc_info()[1]
        if not isinstance(error, Stopped):
            if isinstance(error, NameError):
                error.add_note("Ranks know names of %%ranks cells, and those of ranks.put(x=x)")
            _cut_plumbing(error)
            super().showtraceback(*args, **kwargs)

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
        self.traceback_text = self.InteractiveTB.stb2text(stb)


def _cut_plumbing(error: BaseException) -> None:
    """Take the frames of `PLUMBING` but the first out of a traceback, and causes that lie there."""
    first, *others = _links(error)
    kept = [first, *(tb for tb in others if not _is_plumbing(tb.tb_frame))]
    for tb, following in zip_longest(kept, kept[1:]):
        tb.tb_next = following
    cause = error.__context__
    if cause is not None and all(_is_plumbing(tb.tb_frame) for tb in _links(cause)):
        error.__context__ = None


def _links(error: BaseException) -> Iterator[TracebackType]:
    """Yield the traceback of an error, link by link, from the frame that caught it."""
    tb = error.__traceback__
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _is_plumbing(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PLUMBING)


def _shell() -> RankShell:
    """Return the shell of this rank; the first call makes it."""
    if not RankShell.initialized():
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        shell = RankShell.instance(config=Config(HistoryManager={"enabled": False}))
        shell.run_line_magic("matplotlib", "inline")
        warnings.filterwarnings("ignore", "To exit: use")  # there is nothing that could be left
        shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # for torch.ones?
        from minipar.lab import draw

        draw.register()  # meshes and timelines draw themselves here too
    return RankShell.instance()


# ---------------------------------------------------------------------- who waits for whom
def watch() -> None:
    """Begin to tell the notebook, about twice a second, where this rank waits in vain, if it does.

    Only the notebook sees whether all ranks do: then it need not sit out the timeout.
    """
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(0.5)
        _look()


def _look() -> None:
    """Look once. In a loop, frames would live for half a second more, with all their tensors."""
    main = threading.main_thread().ident
    frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
    waits = [i for i, f in enumerate(frames) if f.f_code is link_group.LinkWork.wait.__code__]
    if not waits:
        return
    work, callers = frames[waits[0]].f_locals["self"], frames[waits[0] :]
    waited = time.monotonic() - work.waits[-1]
    groups = list(dist.distributed_c10d._world.pg_map)
    moves = any(isinstance(group, link_group.LinkGroup) and group.moving for group in groups)
    if work.t_start is None and waited > PATIENCE and not moves:
        own = next(frame for frame in callers if not _is_plumbing(frame))
        name, line = own.f_code.co_filename, own.f_lineno
        known = RankShell.instance().compile._filename_map if RankShell.initialized() else {}
        number = known.get(name)
        title = _titles.get(name, name) if number is None else f"Cell In[{number}]"
        said = f"{title}, line {line}\n    {linecache.getline(name, line).strip()}"
        worker.say("stuck", (work.verb, said))


# ---------------------------------------------------------------------- called by the notebook
_facts: dict[str, int] = {}  # names that are the same in every cell, whatever the one before did


def run_cell(code: str, number: int) -> None:
    """Run a cell in this rank's namespace; `number` is what tracebacks call it."""
    shell = _shell()
    shell.traceback_text, shell.execution_count = None, number
    # Where IPython looks for a semicolon at the end; its own storing takes long after an error.
    shell.history_manager.input_hist_parsed.append(shell.transform_cell(code))
    result = shell.run_cell(code, store_history=False)
    worker.shield()
    shell.user_ns.update(_facts)  # as after: for rank in range(4)
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        error.report = shell.traceback_text
        raise error


def prepare(sizes: dict[str, int], wire: link.Link | link.Topology, emulated: Any) -> None:
    """Put into the namespace what every cell may rely on, for the process group of now."""
    link.use(wire)
    devices.use(emulated)
    device = backends.compute_device()
    _facts.update(rank=dist.get_rank(), world_size=dist.get_world_size())
    _shell().user_ns.update(_facts, device=device, mesh=Mesh(**sizes), torch=torch, dist=dist)


def mesh_sizes() -> dict[str, int] | None:
    """Return the sizes of the namespace's ``mesh``; None if there is none."""
    mesh = _shell().user_ns.get("mesh")
    return mesh.sizes if isinstance(mesh, Mesh) else None


def put(values: dict[str, Any]) -> None:
    """Set variables of the namespace."""
    _shell().user_ns.update(values)


def evaluate(expression: str) -> Any:
    """Return the value of an expression; a tensor comes without its graph, on the CPU."""
    try:
        value = eval(expression, _shell().user_ns)
    except Exception as error:
        error.report = f"{type(error).__name__}: {error}"
        raise
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- functions of the notebook
def code_of(answer: Any) -> CodeType | None:
    """Return the code of a function, or of a class's ``__init__``; None where there is none."""
    made = getattr(answer, "__init__", None)
    return getattr(answer, "__code__", None) or getattr(made, "__code__", None)


def globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names that are looked up outside of functions, whatever function they are in."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_of(inner)


@dataclass(frozen=True)
class Source:
    """The cell in which a function was written: it travels along, for the sake of tracebacks."""

    filename: str
    title: str  # "Cell In[3]"
    lines: tuple[str, ...]

    @staticmethod
    def of(function: Callable, titles: dict[str, int]) -> "Source | None":
        """Return the source of `function` if its file is in `titles`, which has the cells."""
        filename = getattr(code_of(function), "co_filename", None)
        if filename not in titles:
            return None
        title = f"Cell In[{titles[filename]}]"
        return Source(filename, title, tuple(linecache.getlines(filename)))


_titles: dict[str, str] = {}  # of the cells with functions that ran here, by file name


def call_from(source: Source, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``; the traceback of an error shows only lines of `source`."""
    linecache.cache[source.filename] = len(source.lines), None, source.lines, source.filename
    _titles[source.filename] = source.title
    try:
        return fn(*args, **kwargs)
    except (Exception, SystemExit) as error:
        shown = traceback.TracebackException.from_exception(error)
        shown.__cause__ = shown.__context__ = None
        shown.stack[:] = [line for line in shown.stack if line.filename == source.filename]
        text = "".join(shown.format() if shown.stack else shown.format_exception_only()).rstrip()
        error.report = text.replace(f'File "{source.filename}"', source.title)
        raise
