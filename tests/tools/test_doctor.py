"""The page of `minipar doctor`: what will fail is named, with its cure; exit code 1."""

import re
import socket

import pytest
import torch

from minipar.cli import main
from minipar.tools import doctor


def called(capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main.main(["doctor"])
    failed = stop.value.code if isinstance(stop.value.code, str) else ""
    return int(bool(failed)), capsys.readouterr().out + failed


def fails(*args, **kwargs):
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    "what, bad, said",
    [
        ("RANKS", 2, "2 ranks start, sum up and end in .* Nothing will fail"),
        ("Ranks", fails, "FAIL: ranks: .*Too many open files"),
    ],
)
def test_what_will_fail_is_named_with_its_cure(capsys, monkeypatch, what, bad, said):
    """Mutant: the exit code is 0."""
    monkeypatch.setattr(doctor, what, bad)
    code, out = called(capsys)
    assert re.search(said, out), out
    assert code == ("FAIL" in said)


def test_the_loopback_is_named_with_its_cure(monkeypatch):
    """Debian writes 127.0.1.1 into /etc/hosts. Mutant: any address is one that others reach."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert "export GLOO_SOCKET_IFNAME" in doctor.network()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert doctor.network() == "gloo listens at eth7"


def three(tensor: torch.Tensor, _: object) -> torch.Tensor:
    return tensor * 3


def test_a_wrong_sum_is_no_success(monkeypatch):
    monkeypatch.setattr(doctor, "RANKS", 2)
    monkeypatch.setattr(doctor, "all_reduce", three)
    with pytest.raises(RuntimeError, match="the sums of 2 ones are"):
        doctor.ranks()
