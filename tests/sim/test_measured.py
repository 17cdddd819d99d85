"""What was measured on a GPU, beside the simulator."""

import json
from pathlib import Path

import pytest

from minipar.model.llama import PRESETS
from minipar.parallel.plan import Plan
from minipar.sim import hardware
from minipar.sim.replay import replay
from minipar.sim.trace import trace

MEASURED = Path("notebooks/assets/measured")


@pytest.mark.slow
def test_the_simulator_knows_what_was_measured_on_a_gpu():
    """A step of the H200 whose rows are here. Mutants: norms spelled out in operations; products
    at the rate of a data sheet's peak."""
    rows = json.loads((MEASURED / "gpu.json").read_text(encoding="utf-8"))
    (row,) = [r for r in rows if "peak_bytes" in r and not r["compile"] and not r["loss_chunk"]]
    plan = Plan.parse(f"precision=bf16,checkpointing={row['recompute']}")
    traces = trace(
        PRESETS[row["preset"]], plan, sequences=row["batch_size"], seq_len=row["seq_len"]
    )
    assert sum(traces.at_peak().values()) == pytest.approx(row["peak_bytes"], rel=0.02)
    for machine, off in ((MEASURED / "gpu_machine.toml", 0.03), ("h200", 0.08)):
        seconds = replay(traces, hardware.load(machine)).seconds
        assert 1e3 * seconds == pytest.approx(row["step_ms"], rel=off)
