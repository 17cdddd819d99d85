"""Run what trains as other processors would round it, and print how often it passes.

    python -m tests.elsewhere                                 # all, under every setting: hours
    python -m tests.elsewhere --settings avx2,nudge-3         # under these
    python -m tests.elsewhere tests/test_notebooks.py -k 03   # the rest goes to pytest

A *setting* is a set of environment variables: the instructions of a smaller processor, another
number of threads, or a nudge (`sitecustomize.py`), which is as good as any other rounding. Tests
are those marked `trains`. The result goes to the screen alone; to go on with a sweep that was cut
short, name the settings that are left.
"""

import argparse
import os
import re
import subprocess
import sys

from tests.elsewhere import HERE, PYTEST, environment

SETTINGS = {
    "as it is": {},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
    "threads-2": {"OMP_NUM_THREADS": "2"},
} | {f"nudge-{seed}": {"MINIPAR_NUDGE": str(seed)} for seed in range(1, 11)}


def under(setting: str, words: list[str]) -> tuple[str, list[str]]:
    """Run pytest under a setting; return its counts, "1 failed, 2 passed", and who failed."""
    paths = os.pathsep.join([str(HERE), environment()["PYTHONPATH"]])
    command = [*PYTEST, "-m", "trains and not exhaustive", "-q"]
    done = subprocess.run(
        [*command, "--tb=short", "-p", "no:cacheprovider", *words],
        env={**environment(), **SETTINGS[setting], "PYTHONPATH": paths},
        cwd=HERE.parents[1],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed or done.returncode not in (0, 1):
        print(done.stdout[-20_000:], done.stderr[-2000:], sep="\n", flush=True)
    counts = re.findall(r"\d+ (?:failed|passed|skipped|errors?)\b", done.stdout[-500:])
    return ", ".join(counts) or f"pytest ended with {done.returncode}", failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="separated by commas")
    asked, words = parser.parse_known_args()
    settings, results = asked.settings.split(","), {}
    for setting in settings:
        if setting not in SETTINGS:
            parser.error(f"{setting} is none of {', '.join(SETTINGS)}")
    for setting in settings:
        results[setting] = under(setting, words)
        print(f"{setting}: {results[setting][0]}", flush=True)
    print("\n| setting | result | failed |", "| --- | --- | --- |", sep="\n")
    for setting, (counts, failed) in results.items():
        print(f"| {setting} | {counts} | {', '.join(failed)} |")
    return int(any(failed or "passed" not in counts for counts, failed in results.values()))


if __name__ == "__main__":
    sys.exit(main())
