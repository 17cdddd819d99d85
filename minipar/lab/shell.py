"""The rank's side of ``%%ranks``: an IPython shell in every rank, with output that travels.

The functions of this file run inside of the ranks of `minipar.lab.cells`, called like any other
function: `run_cell` runs a cell in the rank's namespace, `prepare` puts ``rank``, ``mesh`` and the
like into it. What a cell prints goes through the standard output of the rank; what it displays,
figures and tables, is sent by `worker.say`; what goes wrong becomes the text of a traceback in
which only the learner's own lines are left (`call`).
"""

import linecache
import math
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from IPython.core import page
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from minipar.comm.mesh import Mesh
from minipar.emulate import device as devices
from minipar.emulate import link, link_group
from minipar.ranks import backends, worker

LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),  # of torch, where it is another folder
    str(Path(__file__).parents[1]),  # minipar
)
"""Folders whose frames tracebacks leave out: the learner's line that called them says enough."""
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
    """The IPython of one rank. It says nothing of errors: `call` does."""

    displayhook_class = Type(_LastValue)
    display_pub_class = Type(_Publisher)
    ask_exit = sys.exit  # for exit(), which ends the cell

    def enable_gui(self, gui: str | None = None) -> None:
        pass  # a rank has no windows

    def showtraceback(self, *_: Any, **__: Any) -> None:
        worker.shield()  # a stop while the report is written would lose the report

    showsyntaxerror = showindentationerror = showtraceback


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

    Only the notebook sees whether all ranks wait in vain: then it does not wait for the timeout.
    """
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(0.5)
        _look()


def _look() -> None:
    """Look once. A loop would keep the frames, and their tensors, for half a second more."""
    main = threading.main_thread().ident
    stack = [*traceback.walk_stack(sys._current_frames()[main])]  # from the innermost call on
    waits = [i for i, (f, _) in enumerate(stack) if f.f_code is link_group.LinkWork.wait.__code__]
    if not waits:
        return
    work = stack[waits[0]][0].f_locals["self"]
    waited = time.monotonic() - max(work.waits, default=math.inf)  # none yet: it begins to wait
    groups = list(dist.distributed_c10d._world.pg_map)
    moves = any(isinstance(group, link_group.LinkGroup) and group.moving for group in groups)
    if work.t_start is None and waited > PATIENCE and not moves:
        places = [
            f"\n{_titles.get(at.filename, at.filename)}, line {at.lineno}\n    {at.line}"
            for at in traceback.StackSummary.extract(stack[waits[0] :])
            if _is_own(at.filename)
        ]
        worker.say("stuck", (work.verb, "".join(places[:1])))


# ---------------------------------------------------------------------- called by the notebook
_facts: dict[str, int] = {}  # names that are the same in every cell, whatever the one before did


def run_cell(code: str, number: int) -> None:
    """Run a cell in this rank's namespace; `number` is what tracebacks call it."""
    shell = _shell()
    shell.execution_count, python = number, shell.transform_cell(code)
    _titles[shell.compile.get_code_name(code, python, number)] = f"Cell In[{number}]"
    # Where IPython looks for a semicolon at the end; its own storing takes long after an error.
    shell.history_manager.input_hist_parsed.append(python)
    result = shell.run_cell(code, store_history=False)
    worker.shield()
    shell.user_ns.update(_facts)  # as after: for rank in range(4)
    error = result.error_before_exec or result.error_in_exec
    if isinstance(error, NameError):
        error.add_note("Ranks know names of %%ranks cells, and those of ranks.put(x=x)")
    if error is not None:
        raise error


def prepare(sizes: dict[str, int], wire: link.Link | link.Topology, emulated: Any) -> None:
    """Put into the namespace what every cell may rely on, for the current process group."""
    link.use(wire)
    devices.use(emulated)
    device = backends.compute_device()
    _facts.update(rank=dist.get_rank(), world_size=dist.get_world_size())
    _shell().user_ns.update(_facts, device=device, mesh=Mesh(**sizes), torch=torch, dist=dist)


def put(values: dict[str, Any]) -> None:
    """Set variables of the namespace."""
    _shell().user_ns.update(values)


def evaluate(expression: str) -> Any:
    """Return the value of an expression; a tensor comes without its graph, on the CPU."""
    value = eval(expression, _shell().user_ns)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- functions of the notebook
def code_of(answer: Any) -> CodeType | None:
    """Return the code of a function, or of a class's ``__init__``; None where there is none."""
    made = getattr(answer, "__init__", None)
    return getattr(answer, "__code__", None) or getattr(made, "__code__", None)


_titles: dict[str, str] = {}  # of cells, by the name that Python has for their files


def call(
    cells: Mapping[str, tuple[str, list[str]]], fn: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Return ``fn(*args, **kwargs)``; the traceback of an error shows only the learner's own lines.

    `cells` has the title and the lines of each cell of the notebook, by file name.
    """
    for filename, (title, lines) in cells.items():
        linecache.cache[filename] = len(lines), None, lines, filename
        _titles[filename] = title
    try:
        return fn(*args, **kwargs)
    except (Exception, SystemExit) as error:
        if not hasattr(error, "report"):
            error.report = _report(error)
        raise


def _report(error: BaseException) -> str:
    shown = traceback.TracebackException.from_exception(error)
    shown.__cause__ = shown.__context__ = None
    shown.stack[:] = [line for line in shown.stack if _is_own(line.filename)]
    text = "".join(shown.format() if shown.stack else shown.format_exception_only()).rstrip()
    for filename, title in _titles.items():
        text = text.replace(f'File "{filename}"', title)
        short = "/".join(filename.split("/")[-2:])  # as a race names it
        text = re.sub(rf"{re.escape(short)}:(\d+)", rf"{title}, line \1", text)
    return text


def _is_own(filename: str) -> bool:
    """True if a file is none of the libraries: it is a cell, or a module of the learner."""
    return not filename.startswith(LIBRARIES)
