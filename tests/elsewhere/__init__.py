"""Other processors, as far as this one can play them: `python -m tests.elsewhere`."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTEST = (
    sys.executable,
    "-c",
    "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.main())",
)
"""How to start it, but for its arguments. That module, which what reads notebooks imports if it is
there, builds a grammar of addresses at each start, for seconds; nothing here is checked with it."""


def environment() -> dict[str, str]:
    """Return the environment for a Python that a test starts: this tree's package, one thread."""
    paths = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
