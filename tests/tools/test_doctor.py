"""The page of `minipar doctor`: what is wrong is red, with its cure; exit code 1."""

import os
import re
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from minipar.cli import main
from minipar.comm.mesh import Mesh
from minipar.tools import doctor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quiet(monkeypatch):
    """A machine on which all is well, whatever this one has."""
    monkeypatch.setattr(doctor, "free_bytes", lambda ranks: 8 * 10**9)
    monkeypatch.setattr(doctor, "_gloo_address", lambda: "10.1.2.3")
    monkeypatch.setattr(doctor, "_interface_of", lambda address: "eth7")
    monkeypatch.setattr(doctor, "_outward", lambda: ["eth7"])
    monkeypatch.setattr(doctor, "_pool", lambda: [doctor.Line("ok", "4 ranks", "work")])
    monkeypatch.setattr(doctor, "_gpus", lambda: [])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))


def called(capsys, *words) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main.main(["doctor", *words])
    return stop.value.code, capsys.readouterr().out


def test_all_is_well_in_plain_letters(quiet, capsys):
    code, out = called(capsys)
    assert code == 0 and "Nothing is red." in out and "\x1b" not in out and "FAIL" not in out
    assert re.search(r"^ok +gloo +would listen at 10.1.2.3 \(eth7\)$", out, re.M)


@pytest.mark.parametrize(
    ("where", "what", "bad", "cure"),
    [
        (doctor, "free_bytes", lambda ranks: 10**8, "memory .*end other programs"),
        (resource, "getrlimit", lambda which: (100, 4096), "open files .*ulimit -n 4096"),
        (doctor, "_pool", lambda: [doctor.Line("FAIL", "4 ranks", "no")], "4 ranks"),
    ],
)
def test_what_is_wrong_is_red_and_exit_code_1(quiet, capsys, monkeypatch, where, what, bad, cure):
    monkeypatch.setattr(where, what, bad)
    code, out = called(capsys)
    assert code == 1 and "1 of" in out
    assert re.search(rf"^FAIL +{cure}", out, re.M), out


def test_colours_on_a_terminal_unless_they_are_not_wanted(monkeypatch):
    lines = [doctor.Line("ok", "a", "b"), doctor.Line("FAIL", "c", "d")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mok" in doctor.page(lines) and "\x1b[1;31mFAIL" in doctor.page(lines)
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" not in doctor.page(lines)


def test_debians_127_0_1_1_is_named_with_its_cure(quiet, monkeypatch):
    """Mutant: any address counts as one that others can reach."""
    monkeypatch.setattr(doctor, "_gloo_address", lambda: "127.0.1.1")
    line = doctor._gloo()
    assert line.mark == "note" and "127.0.1.1" in line.says
    assert "export GLOO_SOCKET_IFNAME=eth7" in line.says
    monkeypatch.setattr(doctor, "_outward", lambda: [])
    assert "no other network" in doctor._gloo().says
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9")
    assert doctor._gloo().mark == "FAIL"


def test_ranks_are_timed_and_their_sum_is_looked_at(ranks):
    for seconds, small, large in ranks(2).run(doctor.probe, 2):
        assert 0 < small < large < seconds < 10


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("has ended")])
def test_ranks_that_do_not_start_are_red(monkeypatch, error):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(doctor, "Ranks", fails)
    assert [line.mark for line in doctor._pool()] == ["FAIL"]


def test_a_file_is_no_folder_of_runs(tmp_path):
    """Mutant: the folder that the file is in can be written, so all is well."""
    (tmp_path / "runs").touch()
    for out, mark in (("runs", "FAIL"), ("runs/in", "FAIL"), ("new", "ok"), (".", "ok")):
        assert doctor._writable(tmp_path / out).mark == mark


def test_every_notebook_has_its_minutes(monkeypatch):
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\((\d\d[a-z]?)_\w+\.ipynb\) \|", text))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    (line,) = doctor._notebooks()
    assert set(re.findall(r"(\d\d[a-z]?) [a-z ]+ \d+", line.says)) == names
    assert "00 map 25," in line.says and line.mark == "ok"
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    assert doctor._notebooks()[0].mark == "note" and "longer" in doctor._notebooks()[0].says


def _look_at_hosts(folder: str) -> list:
    world = Mesh(dp=2).world
    lines = [*doctor._of_hosts(world), doctor._together(world)]
    mine = Path(folder) / str(world.rank) if "apart" in folder else Path(folder)
    return [*lines, doctor._shared(mine, world)]


@pytest.mark.slow
def test_under_torchrun_hosts_must_share_the_folder_of_runs(ranks, tmp_path):
    """Mutant: each rank looks at what it has written itself."""
    for folder, mark in ((tmp_path / "runs", "ok"), (tmp_path / "apart", "FAIL")):
        for lines in ranks(2).run(_look_at_hosts, str(folder)):
            assert [line.mark for line in lines if line.what == "run folder"] == [mark]
            assert sum(line.what == "2 ranks" for line in lines) == 1
            assert "on 1 of" in next(line.says for line in lines if line.what == "2 ranks")
    assert not os.path.exists(tmp_path / "runs")


def test_nccl_would_take_infiniband_first(monkeypatch):
    """Mutants: InfiniBand last; one that is down, that leads nowhere, or speaks no IP."""
    has_ip = [SimpleNamespace(family=socket.AF_INET)]
    found = dict.fromkeys(("docker0", "eth1", "ib1", "ib0", "lo"), has_ip)
    states = {name: SimpleNamespace(isup=name != "ib1") for name in (*found, "eth0")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [], **found})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert doctor._outward() == ["ib0", "eth1"]
