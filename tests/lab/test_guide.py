"""The guide says what was measured, and nothing when it was not."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from minipar.lab import draw, guide
from tests.lab.figures import texts

ROOT = Path(__file__).parents[2]
ROWS = guide.read(ROOT / guide.MEASURED)


def test_every_arrow_bears_what_was_measured():
    """Mutant: a figure with numbers of its own, that does not change when a measurement does."""
    said = texts(guide.guide(ROWS))
    for choice in guide.CHOICES:
        assert choice.fact(ROWS) in said and choice.strategy in said and choice.question in said
        assert any(map(str.isdigit, choice.fact(ROWS)))
    facts = [choice.fact(ROWS) for choice in guide.CHOICES]
    doubled = copy.deepcopy(ROWS)
    for row in (row for rows in doubled.values() for row in rows):
        row |= {k: 2 * v for k, v in row.items() if isinstance(v, float)}
    others = [choice.fact(doubled) for choice in guide.CHOICES]
    assert all(a != b for a, b in zip(facts, others, strict=True))


def test_what_was_not_measured_is_not_drawn():
    for name in ("ddp", "fsdp", "compression", "tensor", "context", "pipeline"):
        with pytest.raises(LookupError, match=f"{name}.json has no row"):
            guide.guide({**ROWS, name: []})


@pytest.mark.slow
def test_the_committed_figure_is_the_one_of_the_committed_measurements(tmp_path):
    """Mutant: measured again, but not drawn again."""
    out = tmp_path / "guide.png"
    command = [sys.executable, "-m", "minipar.lab.guide", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert out.read_bytes() == (ROOT / "notebooks/assets/guide.png").read_bytes()
    assert draw.png(guide.guide(ROWS)) == out.read_bytes()
