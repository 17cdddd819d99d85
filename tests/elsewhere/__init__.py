"""Other processors, as far as this one can play them: `python -m tests.elsewhere`."""

import os
from pathlib import Path

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    """Return the environment for a Python that a test starts: this tree's package, one thread."""
    paths = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
