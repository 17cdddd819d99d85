"""The page of a run out of memory: what was held, and changes that fit when they are traced."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from minipar.cli import commands
from minipar.model.llama import PRESETS
from minipar.sim import remedy
from minipar.train import out_of_memory
from minipar.train.config import TrainConfig

pytestmark = pytest.mark.slow

CONFIG = TrainConfig(mesh="dp=2", seq_len=128, batch_size=64, sample_tokens=0, weight_decay=0.2)


@pytest.fixture(scope="module", autouse=True)
def shallow(module_patch):
    """Two layers are quicker to trace than four."""
    module_patch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], num_layers=2))


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def needed():
    return sum(remedy._peak(remedy._job(CONFIG), CONFIG).values())


def advised(page: str) -> list[TrainConfig]:
    lines = [line.strip() for line in page.splitlines() if line.startswith("    minipar train ")]
    return [commands.parse(shlex.split(line)[1:])[1] for line in lines]


@pytest.mark.parametrize("share", [0.9, pytest.param(0.4, marks=pytest.mark.exhaustive)])
def test_what_is_advised_fits_and_is_the_run_but_for_its_plan(needed, share):
    """Mutants: changes are not traced; a change and more of it are two."""
    limit = share * needed
    held = {"parameters": 3 * 10**6, "all else": int(limit / remedy.SHARE) - 4 * 10**6}
    noted = {"rank": "rank 1 of 2 (dp=1)", "held": held, "free": 10**6}
    page = remedy.page(CONFIG, noted)
    assert "What rank 1 of 2 (dp=1) held" in page and re.search(r"parameters +0\.00", page)
    found = advised(page)
    assert 1 <= len(found) <= 3
    changed = []
    for config in found:
        assert sum(remedy._peak(remedy._job(config), config).values()) <= limit
        assert (config.batch_size, config.weight_decay, config.seq_len) == (64, 0.2, 128)
        config.check()
        changed.append(remedy._changed(CONFIG.as_plan(), config.as_plan()))
    assert not any(a <= b for a in changed for b in changed if a is not b)
    if share == 0.9:
        assert {"microbatches"} in changed and {"checkpointing"} in changed


def test_a_run_with_a_checkpoint_is_resumed_and_nothing_is_said_where_nothing_fits():
    noted = {"rank": "rank 0 of 2", "held": {"all else": 30 * 10**6}, "free": 0}
    page = remedy.page(CONFIG, noted, "runs/my run")
    lines = [line for line in page.splitlines() if "minipar train" in line]
    assert lines and all("minipar train --resume 'runs/my run' --" in line for line in lines)
    assert not any("--mesh dp=2 " in line or "--weight-decay" in line for line in lines)
    nothing = remedy.page(CONFIG, noted | {"held": {}, "free": 10**5})
    assert "No plan on 2 ranks takes less" in nothing


def test_a_run_that_cannot_be_traced_ends_in_a_line_that_says_so(tmp_path):
    """Mutant: another error in the place of the one that the run ended with."""
    noted = {"rank": "rank 0 of 4", "held": {"all else": 10**7}, "free": 0}
    (tmp_path / out_of_memory.FILE).write_text(json.dumps(noted), encoding="utf-8")
    plan = "pp=2,ep=2,schedule=dualpipe_v,microbatches=4,dispatch=paired"
    config = replace(CONFIG, preset="tiny-moe", mesh="", plan=plan)
    said = remedy.page_of(config, tmp_path).strip()
    assert said.startswith("what would fit cannot be said: plan pp=2") and "\n" not in said
