"""The ground of the repository holds together: versions, layers, traps, and no GPU-only code.

Each check is a function of its input, and is shown to fail on a broken input beside the real one.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Set
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
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


def test_every_installed_dependency_is_locked():
    """Catches a lock file that forgets what our dependencies depend on."""
    pins = parse_lock(read("requirements.lock"))
    todo, seen = [(name, "") for name in direct_dependencies()], set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            child = canonical(requirement.name)
            todo += [(child, extra) for extra in ("", *requirement.extras)]
    # torch's build for CUDA brings NVIDIA's wheels along; it names their versions itself.
    needed = {name for name, _ in seen if not re.match(r"nvidia|cuda|triton", name)}
    assert len(needed) > 50
    assert needed <= set(pins)


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


# ------------------------------------------------------------------------------------ layers


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    """Run the contracts of pyproject.toml against the package `minipar` inside `folder`."""
    (folder / "pyproject.toml").write_text(read("pyproject.toml"), encoding="utf-8")
    command = "from importlinter.cli import lint_imports_command as main; main()"
    options = ["--no-cache", "--no-logo"]
    return subprocess.run(
        [sys.executable, "-c", command, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


# A small package with every floor, in which all imports are legal.
SKELETON = {
    "__main__.py": "import minipar.cli",
    "cli.py": "import minipar.lab.draw, minipar.train.trainer, minipar.sim.replay",
    "lab/draw.py": "import matplotlib.pyplot, minipar.train.trainer",
    "train/trainer.py": "import minipar.parallel.compose, minipar.model.llama",
    "sim/replay.py": "import minipar.observe.timeline",
    "parallel/plan.py": "import minipar.parallel.tensor",
    "parallel/compose.py": "import minipar.parallel.plan, minipar.parallel.pipeline.runtime",
    "parallel/ddp.py": "import minipar.comm.mesh, minipar.parallel.base.strategy",
    "parallel/base/strategy.py": "",
    "parallel/pipeline/runtime.py": "import minipar.parallel.pipeline.schedules",
    "parallel/pipeline/schedules.py": "",
    "model/llama.py": "import torch",
    "text.py": "",
    "comm/mesh.py": "",
    "emulate/link.py": "import minipar.observe.timeline",
    "ranks/launch.py": "import minipar.emulate.link, minipar.comm.mesh",
    "tools/hang.py": "import minipar.sim.replay",
    "observe/timeline.py": "import minipar.comm.mesh",
}


def build(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "minipar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for package in path.parents[: len(Path(name).parts)]:
            (package / "__init__.py").touch()
    return folder


@pytest.mark.slow
def test_imports_run_downward_only(tmp_path):
    sources = {
        path.relative_to(ROOT / "minipar").as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / "minipar").rglob("*.py")
    }
    assert sources
    result = lint_imports(build(tmp_path, sources))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_the_layers_contract_allows_what_is_legal(tmp_path):
    result = lint_imports(build(tmp_path, SKELETON))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, line, contract",
    [
        ("comm/mesh.py", "import minipar.model.llama", "The wire"),
        ("comm/mesh.py", "import minipar.observe.timeline", "Imports run downward"),
        ("observe/timeline.py", "import minipar.emulate.link", "Imports run downward"),
        ("emulate/link.py", "import minipar.ranks.launch", "Imports run downward"),
        ("model/llama.py", "from minipar.comm.mesh import Mesh", "Imports run downward"),
        ("model/llama.py", "def f():\n    import minipar.parallel.ddp", "Imports run downward"),
        ("parallel/ddp.py", "import minipar.train.trainer", "Imports run downward"),
        ("train/trainer.py", "import minipar.sim.replay", "Imports run downward"),
        ("sim/replay.py", "import minipar.cli", "Imports run downward"),
        ("helpers.py", "", "Imports run downward"),  # on no floor
        ("parallel/zero.py", "import minipar.parallel.ddp", "Strategies"),
        ("parallel/pipeline/runtime.py", "import minipar.parallel.ddp", "Strategies"),
        ("parallel/zero.py", "import minipar.parallel.compose", "Strategies"),
        ("parallel/base/strategy.py", "import minipar.parallel.ddp", "Strategies"),
        ("train/trainer.py", "import matplotlib.pyplot", "Plotting"),
        ("observe/timeline.py", "def f():\n    from IPython.display import display", "Plotting"),
        ("cli.py", "import matplotlib.pyplot", "Plotting"),
    ],
)
def test_the_layers_contract_refuses_what_is_not(tmp_path, name, line, contract):
    result = lint_imports(build(tmp_path, SKELETON | {name: line}))
    assert result.returncode == 1
    assert re.search(f"^{contract}.* BROKEN", result.stdout, re.MULTILINE), result.stdout


# ------------------------------------------------------------------------------ no GPU needed

# Private functions that run only with a GPU, since their callers have asked; each with the reason.
CALLED_WITH_A_GPU: dict[str, set[str]] = {
    "minipar/comm/hostcopy.py": {"_enqueue"},  # its stream is made where the device is a GPU
    "minipar/comm/values.py": {"lane"},  # asked for where it is
}
GPU_ONLY = {"apex", "cupy", "deepspeed", "flash_attn", "pynvml", "transformer_engine", "triton"}
QUESTIONS = {"is_available", "is_initialized", "device_count"}  # of torch.cuda: safe without a GPU


def promises_gpu(test: ast.expr) -> bool | None:
    """True: holds only with a GPU. False: only without one. None: says nothing."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = promises_gpu(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        decisive = isinstance(test.op, ast.And)  # one true operand of `and` is enough
        parts = [promises_gpu(value) for value in test.values]
        if decisive in parts:
            return decisive
        return (not decisive) if all(part is (not decisive) for part in parts) else None
    if not re.search("cuda|nccl", ast.unparse(test)):  # NCCL has nothing to do without a GPU
        return None
    negative = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.NotIn)
    return not negative


def leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def gpu_only_lines(source: str, allowed: Set[str] = frozenset()) -> list[int]:
    """Lines that would fail or mislead on a machine without a GPU, but for the functions `allowed`.

    These are: an import of a GPU-only package outside a function; and, unless a condition in sight
    says that there is a GPU, a use of `torch.cuda` that is no question, `.cuda()`, and the device
    name "cuda". Comparing with "cuda" is a question, and `Literal["cuda"]` a type.
    """
    found: list[int] = []

    def visit_body(body: list[ast.stmt], in_function: bool, guarded: bool) -> None:
        for statement in body:
            visit(statement, in_function, guarded)
            # `if not torch.cuda.is_available(): return` guards the rest of the block.
            if isinstance(statement, ast.If) and leaves(statement.body):
                guarded = guarded or promises_gpu(statement.test) is False

    def visit(node: ast.AST, in_function: bool, guarded: bool) -> None:
        match node:
            case ast.Import(names=names) if not in_function:
                if any(name.name.split(".")[0] in GPU_ONLY for name in names):
                    found.append(node.lineno)
            case ast.ImportFrom(module=str(module)) if not in_function:
                if module.split(".")[0] in GPU_ONLY:
                    found.append(node.lineno)
            case ast.If(test=test) | ast.IfExp(test=test):
                visit(test, in_function, guarded)
                promise = promises_gpu(test)
                for part, holds in ((node.body, True), (node.orelse, False)):
                    safe = guarded or promise is holds
                    if isinstance(part, list):
                        visit_body(part, in_function, safe)
                    else:
                        visit(part, in_function, safe)
                return
            case ast.Compare() | ast.Subscript(value=ast.Name(id="Literal")):
                return
            case ast.FunctionDef(name=name):
                guarded = guarded or name in allowed
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="cuda")):
                if node.attr not in QUESTIONS and not guarded:
                    found.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="cuda")) if not guarded:
                found.append(node.lineno)
            case ast.Constant(value=str(text)) if not guarded:
                if re.fullmatch(r"cuda(:\d*)?", text):
                    found.append(node.lineno)
        inner = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                visit_body(value, inner, guarded)
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, inner, guarded)

    visit_body(ast.parse(source).body, in_function=False, guarded=False)
    return found


@pytest.mark.slow
def test_trap_11_no_gpu_only_code_on_the_cpu_path():
    """picotron#36: `cuda.synchronize()` or a flash-attn import at the top breaks a laptop."""
    paths = sorted((ROOT / "minipar").rglob("*.py"))
    assert paths
    for path in paths:
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        allowed = CALLED_WITH_A_GPU.get(name, set())
        lines = gpu_only_lines(source, allowed)
        assert not lines, (
            f"{name}: lines {lines} need a GPU, and no condition in sight asks for one"
        )
        for function in allowed:  # an exception that is no longer needed has to go
            assert gpu_only_lines(source, allowed - {function}), f"{name}: {function}"


@pytest.mark.parametrize(
    "source",
    [
        "import triton",
        "try:\n    from flash_attn import flash_attn_func\nexcept ImportError:\n    pass",
        "torch.cuda.synchronize()",
        "x = torch.zeros(3, device='cuda')",
        "x = x.to(f'cuda:{rank}')",
        "x = x.cuda()",
        "def f(device='cuda'): ...",
        "if not torch.cuda.is_available():\n    torch.cuda.synchronize()",
        "if torch.cuda.is_available():\n    pass\nelse:\n    x.cuda()",
        "if fast or torch.cuda.is_available():\n    x.cuda()",
        "device = 'cpu' if torch.cuda.is_available() else 'cuda'",
        "if fast:\n    return\ntorch.cuda.empty_cache()",
    ],
)
def test_trap_11_mutants_are_caught(source):
    assert gpu_only_lines(source)


@pytest.mark.parametrize(
    "source",
    [
        "def kernel():\n    import triton",
        "n = torch.cuda.device_count()",
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        "if torch.cuda.is_available() and fast:\n    torch.cuda.synchronize()",
        "if not torch.cuda.is_available():\n    raise ValueError\ntorch.cuda.synchronize()",
        "if x.device.type == 'cuda':\n    torch.cuda.current_stream().synchronize()",
        "if x.device.type != 'cuda':\n    pass\nelse:\n    x.cuda()",
        "def f(device: Literal['cpu', 'cuda'] = 'cpu'): ...",
        "'''A docstring may speak of cuda.'''",
    ],
)
def test_trap_11_guarded_code_is_allowed(source):
    assert not gpu_only_lines(source)


# ------------------------------------------------------------------------------- traps, paths


def traps_by_number(names: list[str]) -> dict[int, set[str]]:
    """Names of tests by the number that they carry; one without a number raises."""
    found: dict[int, set[str]] = {}
    for name in names:
        match = re.match(r"test_trap_(\d\d)_\w", name)
        if not match:
            raise ValueError(f"{name}: a test of a trap is named test_trap_NN_what_it_refuses")
        found.setdefault(int(match[1]), set()).add(name)
    return found


def test_every_trap_of_the_list_is_refused_by_the_tests_that_it_names():
    names = []
    for path in (ROOT / "tests").rglob("*.py"):
        names += re.findall(r"^def (test_\w*trap_\w*)\(", path.read_text(encoding="utf-8"), re.M)
    names.remove("test_every_trap_of_the_list_is_refused_by_the_tests_that_it_names")
    rows = re.findall(r"^\| T(\d+) \|.*\| (.*) \|$", read("tests/TRAPS.md"), re.MULTILINE)
    listed = {int(number): set(re.findall(r"`(test_\w+)`", row)) for number, row in rows}
    assert list(listed) == list(range(1, 40))
    assert listed == traps_by_number(names)
    with pytest.raises(ValueError, match="test_trap_NN"):
        traps_by_number(["test_some_trap_without_a_number"])


# A folder of somebody's machine, where a path starts: not `a/home/b`, not part of a web address.
MACHINE_PATH = re.compile(rb"(?<![\w.~/}-])/(?:root|home|Users|work)/\w")


def test_machine_paths_are_recognised():
    for text in (b"open('/%s/me/x')", b"File /%s/x.py", b'"/%s/x"'):
        for folder in (b"root", b"home", b"Users", b"work"):
            assert MACHINE_PATH.search(text % folder)
    assert not MACHINE_PATH.search(b"https://site.org/work/paper and ../home/x and $DIR/work/x")


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
