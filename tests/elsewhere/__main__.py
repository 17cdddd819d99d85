"""Run the law and the notebooks as other processors would round them.

    python -m tests.elsewhere                                 # under every setting: hours
    python -m tests.elsewhere --settings avx2,nudge-3 -k dp   # the rest goes to pytest

A *setting* is a set of environment variables: the instructions of a smaller processor, another
number of threads, or a nudge (`sitecustomize.py`), which is as good as any other rounding.
"""

import argparse
import os
import subprocess

from tests.elsewhere import HERE, PYTEST, environment

SETTINGS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
    "threads-2": {"OMP_NUM_THREADS": "2"},
} | {f"nudge-{seed}": {"MINIPAR_NUDGE": str(seed)} for seed in range(1, 11)}
TESTS = "tests/law", "tests/test_notebooks.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="separated by commas")
    asked, words = parser.parse_known_args()
    paths = os.pathsep.join([str(HERE), environment()["PYTHONPATH"]])
    failed = []
    for name in asked.settings.split(","):
        if name not in SETTINGS:
            parser.error(f"{name} is none of {', '.join(SETTINGS)}")
        print(f"== {name}", flush=True)
        env = {**environment(), **SETTINGS[name], "PYTHONPATH": paths}
        command = [*PYTEST, "-q", "--tb=short", "-p", "no:cacheprovider", *TESTS, *words]
        if subprocess.run(command, env=env, cwd=HERE.parents[1]).returncode:
            failed.append(name)
    print(f"failed under: {', '.join(failed) or 'no setting'}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
