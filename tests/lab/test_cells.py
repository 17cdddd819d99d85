"""``%%ranks`` in a real kernel: what is shown, and that nothing ever hangs."""

import ast
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from IPython.core.error import UsageError

from minipar.lab.cells import CellError, Ranks, chosen_ranks
from tests.lab.kernel import Kernel
from tests.patience import busy, is_alive

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow  # many processes come and go here

ANEW = "All ranks were started anew, with empty namespaces"
NONE = "[None, None, None, None]"


def usable() -> float:
    """Seconds until a next cell has run, after anything that may happen."""
    return 5.0 * busy()


@pytest.fixture(scope="module")
def nb():
    """A notebook whose first cell was run: four ranks."""
    kernel = Kernel()
    first = kernel.run("from minipar.lab.cells import Ranks\nranks = Ranks(4, link='1gbe')\nranks")
    assert first.error == "" and first.stderr == ""
    assert first.value == "Ranks(4)  # gloo, emulated 1 GbE"
    yield kernel
    kernel.close()


def recovered(nb: Kernel, kept: str = "[42, 42, 42, 42]") -> float:
    """Run the next cell: the group works, the mesh is of the new group, `keepsake` as expected."""
    start = time.monotonic()
    good = nb.run("%%ranks\none = torch.ones(1)\ndist.all_reduce(one, group=mesh.world.group)")
    assert good.error == ""
    assert nb.run("[int(one) for one in ranks['one']]").value == "[4, 4, 4, 4]"
    assert nb.run("ranks['globals().get(\"keepsake\")']").value == kept
    return time.monotonic() - start


def keep(nb: Kernel) -> None:
    assert nb.run("ranks.put(keepsake=42)").error == ""


# ---------------------------------------------------------------------- what is shown
@pytest.mark.parametrize(
    ("cell", "text"),
    [
        # The last rank is the first to speak.
        (
            "\nimport time\ntime.sleep(0.1 * (3 - rank))\nprint('hi', rank)\nprint()\nrank * 10",
            "".join(f"[{r}] hi {r}\n[{r}]\n[{r}] {10 * r}\n" for r in range(4)),
        ),
        (
            " -r 0,1\nprint('a', end='', flush=True)\nprint('b')\nprint('two\\nlines', end='')",
            "[0] ab\n[0] two\n[0] lines\n[1] ab\n[1] two\n[1] lines\n",
        ),
        (" -r 1\n'quiet';  # not shown", ""),
        (" -r 1\n'; # a string'", "[1] '; # a string'\n"),
        (" -r 1,2\n!echo from $rank", "[1] from 1\n[2] from 2\n"),
        (" -r 0\nimport asyncio\nawait asyncio.sleep(0, 'done')", "[0] 'done'\n"),
    ],
)
def test_output_is_labelled_in_rank_order(nb, cell, text):
    shown = nb.run(f"%%ranks{cell}")
    assert shown.text == text and shown.stderr == shown.error == "" and shown.display == []


def test_the_first_rank_is_seen_while_it_runs(nb):
    """Output that is held back until the end of the cell would fail."""
    shown = nb.run("%%ranks\nimport time\nprint('now')\ntime.sleep(2)\nprint('later')")
    assert shown.arrived[0] < shown.seconds - 0.7


def test_errors_pictures_and_tables_have_streams_of_their_own(nb):
    assert nb.run("%%ranks -r 0,1\nimport sys\nprint('to err', file=sys.stderr)").stderr == (
        "[0] to err\n[1] to err\n"
    )
    html = nb.run("%%ranks -r 0,1\nfrom IPython.display import HTML\nHTML(f'<b>{rank}</b>')")
    assert html.text == "[0]\n[1]\n"
    assert [shown["text/html"] for shown in html.display] == ["<b>0</b>", "<b>1</b>"]
    figure = nb.run("%%ranks -r 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert len(figure.display) == 1 and figure.display[0]["image/png"].startswith("iVBOR")
    assert "image/png" in nb.run("%%ranks -r 3\nmesh").display[0]  # meshes draw themselves


def test_the_namespace_persists_and_holds_what_is_promised(nb):
    nb.run("%%ranks\ncount = rank\ndef twice(x): return 2 * x")
    assert nb.run("%%ranks -r 2\ncount += 5").error == ""
    assert nb.run("ranks['twice(count)']").value == "[0, 2, 14, 6]"
    nb.run("width = 8\ndef thrice(x): return 3 * x\n\nranks.put(width=width, thrice=thrice)")
    assert nb.run("ranks['thrice(width)']").value == "[24, 24, 24, 24]"
    nb.run("def six_times(x): return 2 * thrice(x)\n\nfrom minipar.lab import own")
    assert "def thrice(x): return" in nb.run("own.written(six_times, 'six_times')").value
    names = nb.run("ranks['(rank, world_size, str(device), mesh.dp.size, dist.get_rank())']").value
    assert ast.literal_eval(names) == [(r, 4, "cpu", 4, r) for r in range(4)]


def test_values_travel_both_ways(nb):
    nb.run("ranks.put(lr=0.5, table={'a': [1, 2]})")
    assert nb.run("ranks['table[\"a\"][1] * lr']").value == "[1.0, 1.0, 1.0, 1.0]"
    nb.run("%%ranks\nw = torch.full((2,), float(rank), requires_grad=True) * 1")
    assert nb.run("[(w.sum().item(), w.requires_grad) for w in ranks['w']]").value == (
        "[(0.0, False), (2.0, False), (4.0, False), (6.0, False)]"
    )
    missing = nb.run("ranks['no_such_name']").error
    assert missing.endswith("\nNameError: name 'no_such_name' is not defined")
    assert missing.count("NameError") == 1 and "minipar" not in missing


def test_the_shell_of_a_rank_has_help_and_no_keyboard(nb):
    assert "Docstring" in nb.run("%%ranks -r 0\ntorch.ones?").text
    for cell in ("input()", "breakpoint()\nx = 1"):  # both end at once instead of hanging
        error = nb.run(f"%%ranks -r 0\n{cell}").error
        assert "EOFError" in error or "BdbQuit" in error


def test_one_rank_can_be_debugged_where_there_is_a_keyboard(nb):
    """The code of the host's page; here `breakpoint` only notes that it was called."""
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    code = page.partition("**A debugger on one rank.**")[2].partition("```python\n")[2]
    code, _, _ = code.partition("```")
    assert "breakpoint()" in code
    nb.run("import sys\nstops = []\nsys.breakpointhook = lambda: stops.append(1)")
    assert nb.run("def my_ring(tensor, axis): return axis.rank, axis.size").error == ""
    assert nb.run(code + "\nstops, found").value == "([1], (2, 4))"


def test_the_link_changes_between_cells_and_stays_with_new_ranks(nb):
    label = "set(ranks['__import__(\"minipar.emulate.link\", fromlist=[1]).current().name'])"
    nb.run("ranks.use('nvlink4')")
    nb.run("%%ranks\nimport os\nif rank == 1: os._exit(1)")
    assert nb.run(label).value == "{'NVLink 4'}"
    assert "no link 'nvlnk4'" in nb.run("ranks.use('nvlnk4')").error
    assert nb.run(label).value == "{'NVLink 4'}"
    nb.run("ranks.use('1gbe')")


def test_a_flood_is_cut_off_and_the_limit_is_told_at_once(nb):
    """Without a cap the front end is at it for minutes; a message per line would be 800 of them."""
    nb.run("ranks.time_limit = 1.0")
    shown = nb.run("%%ranks\nwhile True: print('hello')")
    nb.run("ranks.time_limit = None")
    assert shown.error.startswith("Stopped. ranks 0, 1, 2, 3: not done after 1 s")
    assert shown.seconds < 1 + usable()
    for r in range(4):
        lines = [line for line in shown.text.splitlines() if line.startswith(f"[{r}]")]
        assert lines[:-1] == [f"[{r}] hello"] * 200
        assert re.fullmatch(rf"\[{r}\] \.\.\. [\d,]+ more lines", lines[-1])
    assert len(shown.arrived) < 300


# ---------------------------------------------------------------------- errors
def test_slips_are_answered_in_a_line(nb):
    put = "Ranks know names of %%ranks cells, and those of ranks.put(x=x)"
    assert put in nb.run("%%ranks\nours").error
    assert nb.run("%%ranks\nexit()").error.splitlines()[-1].startswith("SystemExit")
    untold = "TypeError: the result cannot be sent back: cannot pickle 'generator' object"
    assert nb.run("ranks['(_ for _ in ())']").error.endswith(untold)
    assert "-r 4: the ranks are 0 to 3; write 0,2" in nb.run("%%ranks -r 4\n1").stderr
    assert "unrecognized arguments: --lives" in nb.run("%%ranks --lives\n1").stderr
    for name, why in (("ranks", "pickle"), ("quit", "pickle")):
        nb.run(f"def slip():\n    return {name}")
        shown = nb.run("ranks.run(slip)").error
        assert "TypeError: the function, something that it mentions, or an argument" in shown
        assert why in shown.splitlines()[-1]


def test_a_rank_has_its_own_number_after_every_cell(nb):
    """Mutant: after this loop all are rank 3, in silence."""
    assert nb.run("%%ranks -r 0,3\nfor rank in range(4): pass").error == ""
    assert nb.run("ranks['rank']").value == "[0, 1, 2, 3]"


def test_a_group_that_a_cell_destroys_is_made_again(nb):
    keep(nb)
    shown = nb.run("%%ranks\ndist.all_reduce(torch.ones(1))\ndist.destroy_process_group()")
    assert shown.error == "" and shown.text.startswith("The process group was made anew, all vari")
    twice = nb.run("%%ranks\ndist.init_process_group('gloo')").error
    assert "default process group twice" in twice
    assert recovered(nb) < usable()


def test_a_traceback_is_the_ranks_own_with_the_lines_of_the_notebook(nb):
    keep(nb)
    number = int(re.search(r"Cell In\[(\d+)\]", nb.run("1 / 0").error)[1]) + 1  # of the next cell
    shown = nb.run(
        "%%ranks\ndef f(x):\n    return 1 / x\n\nif rank in (1, 3):\n    f(0)\ndist.barrier()"
    )
    assert shown.error_name == "CellError"
    assert shown.error.startswith("ranks 1, 3 of 4:") and shown.error.count("Zero") == 1
    # Line 1 is that of the magic, as line numbers count there.
    assert f"Cell In[{number}], line 6, in <module>\n    f(0)\n" in shown.error
    assert f"Cell In[{number}], line 3, in f\n    return 1 / x\n" in shown.error
    assert "launch.py" not in shown.error and "interactiveshell" not in shown.error
    assert "Stopped" not in shown.error  # ranks 0 and 2 were freed, that is no news
    assert shown.text == (
        "The process group was made anew, all variables are kept: "
        "re-run the cells that built models or groups on it.\n"
    )
    assert recovered(nb) < usable()


def test_an_error_of_all_ranks_is_shown_once_and_costs_nothing(nb):
    before = nb.run("ranks.remade").value
    for code in ("1 / 0", "x = = 1", "raise SystemExit"):
        shown = nb.run(f"%%ranks\n{code}")
        assert shown.error.startswith("all 4 ranks alike:") and shown.seconds < usable()
        assert "made anew" not in shown.text
    assert "SyntaxError: invalid syntax" in nb.run("%%ranks\nx = = 1").error
    assert nb.run("ranks.remade").value == before


def test_different_calls_are_reported_with_who_called_what(nb):
    keep(nb)
    shapes = nb.run("%%ranks\ndist.all_reduce(torch.ones(2 + (rank == 1)))")
    assert "ranks 0, 2, 3 called all_reduce" in shapes.error and "(3,)" in shapes.error
    assert "c10d" not in shapes.error  # the traceback ends at the learner's own line
    verbs = nb.run("%%ranks\ndist.barrier() if rank == 2 else dist.all_reduce(torch.ones(1))")
    assert "rank 2 called barrier" in verbs.error
    assert shapes.seconds < usable() and verbs.seconds < usable()
    assert "made anew" not in shapes.text + verbs.text
    assert recovered(nb) < usable()
    # Functions of the notebook fail with their own lines, whichever cells they are in.
    nb.run("def half(x):\n    y = x - 1\n    return 1 / y")
    nb.run("def call_half(x):\n    return half(x)\nranks.put(call_half=call_half)")
    for call in ("ranks.run(call_half, 1)", "%%ranks\ncall_half(1)"):
        shown = nb.run(call).error
        assert "line 2, in call_half\n    return half(x)" in shown
        assert "line 3, in half\n    return 1 / y" in shown
        assert "/tmp/" not in shown and "launch.py" not in shown
    assert nb.run("ranks.run(half, 2)").value == "[1.0, 1.0, 1.0, 1.0]"
    assert nb.run("ranks.run(half)").error.splitlines()[1].startswith("TypeError: half() missing")
    shown = nb.run("def leave():\n    raise SystemExit\nranks.run(leave)").error
    assert "line 2, in leave\n    raise SystemExit" in shown and "launch.py" not in shown


def test_new_ranks_that_cannot_be_leave_those_that_run(nb):
    """Mutant: those before are ended first, and all variables are lost."""
    nb.run("%%ranks\nkept = rank")
    for asked in ("backend='nope'", "1000000, backend='link'", "backend='gloo', device='h100'"):
        assert "ValueError" in nb.run(f"Ranks({asked})").error
    assert nb.run("ranks['kept']").value == "[0, 1, 2, 3]"


# ---------------------------------------------------------------------- nothing hangs
@pytest.mark.timed
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "if rank: dist.all_reduce(torch.ones(1))\nelse:\n    while True: pass",
    ],
    ids=["loop", "all_reduce"],
)
def test_the_stop_button(nb, code):
    """A pool that waits for its ranks, or a rank that is stuck in C++, would hang."""
    keep(nb)
    shown = nb.run(f"%%ranks\nprint('before')\n{code}", stop_after=0.5)
    assert shown.error_name == "Interrupted" and shown.error == "Interrupted."
    assert shown.text.startswith("".join(f"[{r}] before\n" for r in range(4)) + "The process")
    assert "all variables are kept" in shown.text
    assert shown.seconds - 0.5 + recovered(nb) < usable()


@pytest.mark.timed
def test_a_time_limit_presses_the_button_by_itself(nb):
    """Without a rendering of its own, the error would show frames of ours instead of a line."""
    keep(nb)
    nb.run("ranks.time_limit = 1")
    shown = nb.run("%%ranks\nwhile rank == 1: pass\ndist.barrier()")
    nb.run("ranks.time_limit = None")
    assert shown.error_name == "TimedOut" and "\n" not in shown.error
    assert shown.error == "Stopped. ranks 0, 1, 2, 3: not done after 1 s."
    assert "all variables are kept" in shown.text
    assert recovered(nb) < usable()


@pytest.mark.timed
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "if rank != 2:\n    dist.barrier()",
            "waits in barrier, in vain (finished by now: rank 2)",
        ),
        ("%%ranks -r 1,2\ndist.barrier()", "waits in barrier, in vain (not asked: rank 0, 3)"),
        ("dist.recv(torch.ones(1), (rank + 1) % 4)", "waits in recv, in vain (all ranks wait)"),
    ],
)
def test_waiting_in_vain_is_noticed_long_before_the_timeout(nb, code, says):
    """A pool that only knows of errors would sit out the 20 s of the process group."""
    keep(nb)
    shown = nb.run(code if code.startswith("%%") else f"%%ranks\n{code}")
    assert says in shown.error and "Cell In[" in shown.error and "    dist." in shown.error
    assert shown.seconds + recovered(nb) < 2 * usable()  # of which 3 s make sure


def test_what_ranks_said_before_a_call_does_not_stop_it(nb):
    """Ranks that were stuck make their group anew: they wait in no collective any more."""
    keep(nb)
    nb.run("import time\nfrom minipar.ranks import launch")
    nb.run("said = {rank: [(time.monotonic() + 9, 'barrier', '')] * 2 for rank in range(4)}")
    nb.run("ranks._num_done, ranks._stuck = 0, said")
    assert nb.run("launch.Ranks.run_each(ranks, time.sleep, [(1.0,)] * 4)").value == NONE
    assert recovered(nb) < usable()


def test_waiting_for_a_slow_rank_or_link_is_not_in_vain(nb):
    """A watch that is too quick would stop what only takes its time."""
    late = nb.run("%%ranks\nimport time\nif rank == 3: time.sleep(4)\ndist.barrier()\nrank")
    assert late.error == "" and late.text == "[0] 0\n[1] 1\n[2] 2\n[3] 3\n"
    nb.run("from minipar.emulate.link import LINKS\nranks.use(LINKS['1gbe'].scaled(60))")
    slow = nb.run(
        "%%ranks\nx = torch.ones(800_000)\n"
        "works = [dist.all_reduce(x, async_op=True) for _ in range(2)]\n"
        "works[-1].wait()"
    )
    nb.run("ranks.use('1gbe')")
    assert slow.error == "" and 4.5 < slow.seconds < 4.6 + usable()  # twice 2.3 s; 3 s make sure


@pytest.mark.parametrize("end", ["os._exit(0)", ""])
def test_a_rank_that_ends(nb, end):
    """In a cell, or between two of them."""
    keep(nb)
    if not end:
        os.kill(ast.literal_eval(nb.run("ranks.pids").value)[2], signal.SIGKILL)
    shown = nb.run(f"%%ranks\nimport os\nif rank == 2: {end or 'pass'}\ndist.barrier()")
    assert (
        not end or shown.error.startswith("rank 2 of 4") and "the process ended by" in shown.error
    )
    assert shown.text.splitlines()[-1] == (
        f"{ANEW}: re-run the cells that defined what you need, from the first on."
    )
    assert shown.seconds + recovered(nb, NONE) < usable()


def test_the_mesh_is_made_again(nb):
    """A mesh of the old group would hang or fail."""
    nb.run("ranks = Ranks(4, mesh={'dp': 2, 'tp': 2})")
    use = "%%ranks\nx = torch.tensor([1.0 + rank])\ndist.all_reduce(x, group=mesh.tp.group)\nint(x)"
    for end in ("raise ValueError", "os._exit(1)"):
        nb.run(f"%%ranks\nimport os\nif rank == 0: {end}\ndist.barrier()")
        assert nb.run(use).text == "[0] 3\n[1] 3\n[2] 7\n[3] 7\n"


# ---------------------------------------------------------------------- start and end
def test_new_ranks_end_the_old_ones_and_all_end_with_the_kernel(nb):
    """All are forked from one server: mutant, a second import of torch. A kernel that is killed:
    ranks/test_launch.py."""

    def below() -> list[int]:
        kernel = psutil.Process(nb.manager.provisioner.pid)
        return [child.pid for child in kernel.children(recursive=True)]

    def start() -> list[int]:
        made = "from minipar.lab.cells import Ranks\nranks = Ranks(2, mesh={'tp': 2})\nranks.pids"
        assert nb.run(made).error == ""
        popen = "ranks.run(lambda: __import__('subprocess').Popen(['sleep', '600']).pid)"
        assert nb.run(popen).error == ""
        return below()

    told = "import os\nos.environ['TOLD'] = 'yes'\nranks = type(ranks)(2)\n"
    assert nb.run(told + "ranks.run(os.getenv, 'TOLD')").value == "['yes', 'yes']"
    old, all_before = ast.literal_eval(nb.run("ranks.pids").value), below()
    second = start()
    assert gone(old, 3) and set(all_before) - set(second) == set(old)  # the server is the same
    assert nb.run("ranks['mesh.tp.size']").value == "[2, 2]"
    bad = nb.run("Ranks(2, mesh={'tp': 3})")
    assert "mesh tp=3 needs 3 ranks but there are 2" in bad.error
    assert below() == second
    nb.client.execute("%%ranks\nwhile True: pass")
    time.sleep(0.5)
    nb.restart()
    assert gone(second, 3)
    nb.run("import minipar.lab.cells")
    bare = nb.run("%%ranks\nprint(1)").stderr
    assert "%%ranks: no ranks are running; run the first cell, or  ranks = Ranks(4)" in bare


def gone(pids: list[int], seconds: float) -> bool:
    limit = time.monotonic() + seconds * busy()
    while time.monotonic() < limit:
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.05)
    return False


# ---------------------------------------------------------------------- without a kernel
def test_a_race_in_a_cell_is_caught_with_its_line():
    """Mutant: a cell is told apart by the path of its code."""
    head = "from minipar.comm.collectives import all_reduce\nfrom minipar.emulate import strict\n"
    head += "x = torch.ones(3)\nwith strict.watching():\n    "
    call, tensor = "all_reduce(x, mesh.dp, out=x, async_op=True)", r"float32 \(3,\)"
    with Ranks(2) as ranks:
        for number, code, says in (
            (3, f"work = {call}\n    x.zero_()\n    work.wait()", rf"its tensor of {tensor} was"),
            (4, f"{call};", rf"never waited for: all_reduce at Cell In\[4\], line 5, {tensor}"),
            (5, f"{call}\n    1 / 0", "division by zero"),
        ):
            with pytest.raises(CellError, match=says):
                ranks.cell(head + code, number=number)


def test_ranks_are_chosen_by_number():
    assert chosen_ranks("0,2", 4) == [0, 2]
    assert chosen_ranks("3, 1, 2", 4) == [1, 2, 3]
    for wrong in ("4", "0-3", "a", "", "-1", "1,,2"):
        with pytest.raises(UsageError, match="the ranks are 0 to 3"):
            chosen_ranks(wrong, 4)
