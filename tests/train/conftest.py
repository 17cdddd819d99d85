"""What tests of whole runs share: a text, and a function that trains on it."""

import random
from dataclasses import replace

import pytest
import torch

from minipar.train import trainer


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As each rank has, for what runs in this very process: more would only fight for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words in random order: what comes next can be guessed only in part, so there is noise."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    words = ["one ", "rank ", "talks, ", "the ", "others ", "wait, ", "then ", "they ", "add. "]
    path.write_text("".join(random.Random(0).choices(words, k=1500)), encoding="utf-8")
    return path


@pytest.fixture
def run(request, ranks, text, tmp_path):
    """``run(size, name, start=..., **changes)`` trains on `size` ranks; returns the folder.

    The configuration is `PLAIN` of the module, with `changes`.
    """

    def run(size: int, name: str, start=None, **changes):
        given = {"data": str(text), "mesh": f"dp={size}", **changes}
        config = replace(request.module.PLAIN, **given)
        config.check()
        args = config, str(tmp_path / name), None if start is None else str(start)
        if size == 1:  # this very process
            trainer.train(*args)
        else:
            ranks(size).run(trainer.train, *args)
        return tmp_path / name

    return run
