"""What a file gets wrong ends in one line and exit code 2; ranks that hang or die, too."""

import os
import re
from collections import UserDict
from pathlib import Path

import pytest
import torch

from minipar.cli import main
from minipar.cli.looking import parse_mesh
from minipar.tools.prove.job import WrongFile, rows
from minipar.tools.prove.prove import prove

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text(encoding="utf-8").split("## Is your own training right?")[1]
FILE, PAGE = (re.findall(f"```{head}(.*?)```", SECTION, re.S)[0] for head in ("python\n", "\n[$]"))


def proved(*words) -> int:
    with pytest.raises(SystemExit) as stop:
        main.main(["prove", *map(str, words)])
    return stop.value.code


@pytest.mark.slow
def test_the_example_in_readme_is_found_out(tmp_path, monkeypatch, capsys):
    """Word for word, and right with one more line."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE, encoding="utf-8")
    assert proved("mine.py", "--mesh", "dp=2") == 1
    assert capsys.readouterr().out.split() == PAGE.split("\n", 1)[1].split()
    right = FILE.replace("mesh.dp.group)", "mesh.dp.group)\n            p.grad /= mesh.dp.size")
    Path("mine.py").write_text(right, encoding="utf-8")
    assert proved("mine.py", "--mesh", "dp=2") == 0
    assert "mine.py on dp=2: equal to one device" in capsys.readouterr().out


# A word of the file, what stands there instead, and what is said of it.
WRONG = {
    "syntax": ("def build():", "def build(:", r"mine\.py: .*SyntaxError.*line \d+"),
    "nothing to build": ("def build", "def construct", "missing 1 required .* 'build'"),
    "no model": ("nn.Sequential(", "(", "'tuple' object has no attribute 'double'"),
    "chance": ("nn.ReLU()", "nn.Dropout()", "what is random, or counts calls, cannot be"),
    "rows": ("randn(16", "randn(15", "15 rows has no equal shares for 2 ranks"),
    "vector": ("F.mse_loss(model(batch[0]), batch[1])", "model(batch[0])",
        r"loss\(\) must return a tensor of one number, not \[16, 1\]"),
    "nothing made": ("return model, after_backward", "return None",
        "'NoneType' object has no attribute"),
    "a loss that is no number": ("F.mse_loss(model(batch[0]), batch[1])",
        "F.mse_loss(model(batch[0]), batch[1]) * float('nan')",
        "the loss on one device is not a number in step 1: nothing can be compared"),
    "a gradient that is no number": ("F.mse_loss(model(batch[0]), batch[1])",
        "F.mse_loss(model(batch[0]), batch[1]) + (0 * model(batch[0])).abs().sqrt().sum()",
        r"the gradient of 0\.weight on one device is not a number in step 1: nothing can be comp"),
    "a mistake in it": ("dist.broadcast(p.data", "dist.broadcast(q.data",
        "in parallelize.*NameErr"),
    "a batch without its seed": ("generator=torch.Generator().manual_seed(seed)", "",
        r"draw batch\(seed\) from its seed"),
    "no word for shares": ("import torch\n", "import torch\nshares = 3\n",
        "shares is 3; it must be"),
    "death": ("p.data, src=0)", "p.data, src=0)\n    import os; os._exit(3)", "ended by exit 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_is_told_in_one_line(ranks, tmp_path, name):
    """Mutant: what is nan on one device and on the ranks is told as a difference."""
    old, new, said = WRONG[name]
    assert old in FILE
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(WrongFile, match=said) as error:
        prove(str(file), {"dp": 2}, ranks)
    assert "\n" not in str(error.value) and "mine.py" in str(error.value)


def test_a_mistake_in_what_the_file_imports_has_its_line(ranks, tmp_path):
    (tmp_path / "mine.py").write_text("from my_model import *", encoding="utf-8")
    text = FILE.replace("F.mse_loss(", "F.mse_loss(3, ")
    (tmp_path / "my_model.py").write_text(text, encoding="utf-8")
    with pytest.raises(WrongFile, match=r"line \d+ of my_model\.py, in loss: "):
        prove(str(tmp_path / "mine.py"), {"dp": 2}, ranks)


@pytest.mark.parametrize("batch", [UserDict(x=torch.ones(4)), 3, [torch.tensor(3)]])
def test_what_has_no_rows_is_not_given_whole_to_each_rank(batch):
    """Such as a seed, from which loss() draws: without a reduction, all would be equal."""
    with pytest.raises(WrongFile, match="has no rows to share out"):
        rows(batch, 0, 2)
    assert rows(batch, 0, 1) is batch


def test_tensors_of_unlike_rows_are_asked_about():
    """A mask [T, T] is whole on each rank. Mutant: it is cut as samples are."""
    with pytest.raises(WrongFile, match="tensors of 4 and of 6 rows: which are samples"):
        rows((torch.zeros(4, 6), torch.ones(6, 6).tril()), 0, 2)


def test_a_library_finds_what_torchrun_would_set(ranks, tmp_path):
    """Mutant: its variables are left out, or stay."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    before = [os.environ.get(name) for name in names]
    told = f"    import os\n    assert all(os.environ[n] for n in {names})\n"
    told += "    assert int(os.environ['RANK']) == dist.get_rank() == mesh.rank\n"
    right = FILE.replace("mesh.dp.group)", "mesh.dp.group)\n            p.grad /= mesh.dp.size")
    head = "def parallelize(model, mesh):"
    (tmp_path / "mine.py").write_text(right.replace(head, f"{head}\n{told}"), encoding="utf-8")
    assert prove(str(tmp_path / "mine.py"), {"dp": 2}, ranks).parting is None
    assert [os.environ.get(name) for name in names] == before


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_in_vain_are_ended(tmp_path, capsys):
    file = tmp_path / "mine.py"
    loop = "        for p in model.parameters():"  # that of after_backward
    wait = "        import time; time.sleep(600 * dist.get_rank())\n"
    stuck = FILE.replace(loop, wait + loop)
    assert stuck != FILE
    file.write_text(stuck, encoding="utf-8")
    assert proved(file, "--mesh", "dp=2", "--timeout", "1") == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert "rank 0 of 2 (dp=0)" in said and "in after_backward: " in said
    assert "Timed out waiting" in said


@pytest.mark.parametrize("flags", [["--mesh", "dp"], ["--rtol", "7"], ["--rtol", "1e-9"]])
def test_what_was_typed_wrong_is_told(tmp_path, capsys, flags):
    assert proved(tmp_path / "no.py", *flags) == 2
    said = capsys.readouterr().err.strip()
    assert (flags[0] in said or "No such file" in said) and "\n" not in said


def test_a_mesh_is_read_with_any_names():
    assert parse_mesh("dp_shard=2, tp=4") == {"dp_shard": 2, "tp": 4}
    for text in ("", "dp", "dp=0", "dp=2,dp=2", "rank=2", "dp=-1", "d p=", "2=2"):
        with pytest.raises(ValueError, match="try dp=2,tp=2"):
            parse_mesh(text)


def test_a_mesh_of_one_rank_proves_nothing(ranks):
    with pytest.raises(WrongFile, match="one device itself"):
        prove("any.py", {"dp": 1}, ranks)
