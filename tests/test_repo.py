"""The ground of the repository holds together: versions, traps, and no GPU-only code."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    path = ROOT / name
    assert path.is_file(), f"{name} is missing"
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------- versions


def canonical(name: str) -> str:
    """`Foo_bar` and `foo-bar` are one package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> dict[str, str]:
    """Name -> version; any line that is not `name==version[; marker]` raises."""
    pins = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(
            r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)(; \w+ [<=>!]+ \"[\w.]+\")?", line
        )
        if not match:
            raise ValueError(f"not `name==version`: {line}")
        name = canonical(match[1])
        if name in pins:
            raise ValueError(f"pinned twice: {name}")
        pins[name] = match[2]
    return pins


def direct_dependencies() -> set[str]:
    """What pyproject.toml names, tests included; the optional `datasets` extra is not installed."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["test"]
    return {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def test_lock_pins_everything():
    pins = parse_lock(read("requirements.lock"))
    assert pins["torch"] == "2.13.0"
    assert direct_dependencies() <= set(pins), "run `make lock`"


def test_the_book_has_a_lock_of_its_own_that_agrees():
    wanted = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]["book"]
    book, pins = parse_lock(read("book/requirements.lock")), parse_lock(read("requirements.lock"))
    assert {canonical(re.match(r"[\w.-]+", one)[0]) for one in wanted} <= set(book), "`make lock`"
    shared = book.keys() & pins.keys()
    assert len(shared) > 30
    assert {name: book[name] for name in shared} == {name: pins[name] for name in shared}


def test_conda_environment_has_the_versions_of_the_lock():
    dependencies = yaml.safe_load(read("environment.yml"))["dependencies"]
    (pip_lines,) = (entry["pip"] for entry in dependencies if isinstance(entry, dict))
    options = {line for line in pip_lines if line.startswith("-")}
    assert options == {"-c requirements.lock", "-e ."}
    conda_pins = parse_lock("\n".join(line for line in pip_lines if line not in options))
    lock = parse_lock(read("requirements.lock"))
    assert conda_pins == {name: lock[name] for name in direct_dependencies()}


def test_the_lock_suits_the_oldest_python():
    """Catches a pin that asks for 3.11.5 while distributions ship 3.11.2."""
    checked = 0
    for name, version in parse_lock(read("requirements.lock")).items():
        try:
            metadata = distribution(name).metadata
        except PackageNotFoundError:  # for another platform
            continue
        if metadata["Version"].split("+")[0] == version:
            checked += 1
            assert SpecifierSet(metadata["Requires-Python"] or "").contains("3.11.0"), name
    assert checked > 50


# ------------------------------------------------------------------------------ no GPU needed

GPU_ONLY = "apex", "cupy", "deepspeed", "flash_attn", "pynvml", "transformer_engine", "triton"


@pytest.mark.slow
def test_trap_11_no_gpu_only_code_on_the_cpu_path():
    """picotron#36: `cuda.synchronize()` or a flash-attn import at the top breaks a laptop.

    Every module is imported, where no package for GPUs can be. What runs later is tried by all
    other tests: this torch raises an error at each call that needs a GPU.
    """
    paths = [path.relative_to(ROOT) for path in (ROOT / "minipar").rglob("*.py")]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.stem != "__main__"]
    assert len(names) > 100

    def exit_code(modules: list[str]) -> int:
        code = f"import sys; sys.modules.update(dict.fromkeys({GPU_ONLY}))\n"
        code += "import importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
        return subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT).returncode

    assert exit_code(names) == 0 and exit_code(["triton"]) == 1


# ------------------------------------------------------------------------------- traps, paths


def test_every_trap_of_the_list_is_refused_by_the_tests_that_it_names():
    names = []
    for path in (ROOT / "tests").rglob("*.py"):
        names += re.findall(r"^def (test_\w*trap_\w*)\(", path.read_text(encoding="utf-8"), re.M)
    names.remove("test_every_trap_of_the_list_is_refused_by_the_tests_that_it_names")
    rows = re.findall(r"^\| T(\d+) \|.*\| (.*) \|$", read("tests/TRAPS.md"), re.MULTILINE)
    listed = {int(number): set(re.findall(r"`(test_\w+)`", row)) for number, row in rows}
    assert [*listed] == [*range(1, 40)] and set(names) == set().union(*listed.values())
    for number, tests in listed.items():
        assert tests and all(name.startswith(f"test_trap_{number:02}_") for name in tests), number


# A folder of somebody's machine, where a path starts: not `a/home/b`, not part of a web address.
MACHINE_PATH = re.compile(rb"(?<![\w.~/}-])/(?:root|home|Users|work)/\w")


@pytest.mark.slow
def test_no_committed_file_names_a_path_of_a_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("without git there is no list of committed files")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(
        command, cwd=ROOT, capture_output=True, check=True, text=True, encoding="utf-8"
    ).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    assert ROOT / "pyproject.toml" in paths
    guilty = [p for p in paths if p.is_file() and MACHINE_PATH.search(p.read_bytes())]
    assert not guilty
