"""No rank has the whole model: the memory of each is measured, at sizes where it tells."""

import os

import pytest

from tests.lab import large_model


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_each_rank_holds_its_part_and_no_more(capfd, monkeypatch):
    """Mutants: a save that gathers everything; a checkpoint that is read whole, then cut."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # so that it is as before afterwards
    assert large_model.main(["--vocab", "8192", "--layers", "6"]) == 0
    assert capfd.readouterr().out.count("1/") == 2


def test_where_memory_does_not_do_it_says_so(capsys, monkeypatch):
    """Before any process starts. Mutant: a machine that swaps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    free = large_model.psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(large_model.psutil, "virtual_memory", lambda: free)
    assert large_model.main([]) == 2
    assert "GB are needed and 1.0 GB free" in capsys.readouterr().err
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # it is the memory of the CPU that is measured
