"""The bench of compression: its arithmetic, its pictures, and its committed numbers."""

import json
from pathlib import Path

import pytest

from minipar.lab.bench import compression as bench
from minipar.lab.bench import race
from minipar.lab.bench.compression import METHODS, Learned

pytestmark = pytest.mark.trains

MEASURED = Path(__file__).parents[2] / "notebooks/assets/measured/compression.json"


def rows_of(**gaps: tuple[float, list[float]]) -> list[dict]:
    """Rows of fp32 and of others, given as (bytes, gaps to fp32 of two runs)."""
    learned = {name: [] for name in ("fp32", *gaps)}
    for name, (num_bytes, values) in {"fp32": (4e6, [0.0, 0.0]), **gaps}.items():
        seconds = 0.2 if name == "fp32" else 0.1
        for loss, gap in zip((2.0, 3.0), values, strict=True):
            run = Learned([8 - loss, loss + gap], loss + gap, num_bytes, seconds, seconds / 10)
            learned[name].append(run)
    return [bench.row(name, learned) for name in learned]


def test_a_row_compares_with_fp32_from_the_same_weights():
    """Mutant: a gap to the mean of fp32's runs (-0.4 to 0.6)."""
    exact, row = rows_of(int8=(1e6, [0.1, 0.3]))
    assert (exact["gap"], exact["share"], row["share"]) == (0, 1, 0.25)
    assert row["gap"] == pytest.approx(0.2) and row["loss"] == pytest.approx(2.7)
    assert (row["gap_low"], row["gap_high"]) == pytest.approx((0.1, 0.3))
    assert row["losses"] == [5.5, 2.7]
    assert (exact["step_ms"], row["step_ms"]) == pytest.approx((200, 100))
    assert row["exposed_ms"] == pytest.approx(10)
    head, _, line = race.table([exact, row], bench.COLUMNS).splitlines()
    assert line[head.index("gap") :] == "+0.200 [+0.100, +0.300]"
    assert line.split()[1:3] == ["1,000,000", "25.0%"]


def test_the_committed_numbers_are_of_all_methods():
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))
    assert [row["method"] for row in rows] == list(METHODS)
    assert len({row["link"] for row in rows}) == 1 and "emulated" in rows[0]["link"]
