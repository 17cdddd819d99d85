"""Every exercise proves itself: stub, solution, wrong answers; the checks cannot be fooled."""

import inspect
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch.distributed import isend, recv

from minipar.emulate import device, link
from minipar.lab import exercises, publish, shell
from minipar.lab.cases import CheckFailed, Sent
from minipar.lab.exercises import check, exercise, play
from minipar.parallel.pipeline import schedules
from minipar.sim import emulate
from tests.patience import busy

pytestmark = pytest.mark.slow  # many processes come and go here

ROOT = Path(__file__).resolve().parents[2]
IDS = list(exercises.exercises())
WRONG = [(number, name) for number in IDS for name in exercise(number).wrongs]
STUBS = [
    (tag.removeprefix("exercise-"), cell.source, "\n".join(c.source for c in cells))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    for cells in [[c for c in nbformat.read(path, 4).cells if not c.source.startswith("%%")]]
    for cell in cells
    for tag in cell.metadata.get("tags", [])
    if tag.startswith("exercise-")
]


@pytest.fixture(autouse=True)
def pool(ranks, monkeypatch, request):
    """Let the checks use the tests' own standing ranks, as many as the exercise takes."""
    number = getattr(request.node, "callspec", None) and request.node.callspec.params.get("number")
    standing = ranks(max(4, *exercise(number).sizes) if number else 4, "link")
    run_each = standing.run_each

    def wording_errors(fn, args_of, **kwargs):  # as `Watched` does
        args_of = [None if args is None else ({}, fn, *args) for args in args_of]
        return run_each(shell.call, args_of, **kwargs)

    monkeypatch.setattr(standing, "run_each", wording_errors)
    monkeypatch.setattr(exercises, "_own", standing)
    return standing


def refused(number: str, answer, **options) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        check(number, answer, **options)
    return caught.value


# ---------------------------------------------------------------------- each exercise
@pytest.mark.parametrize("number", IDS)
def test_the_solution_passes_on_any_inputs(number, capsys):
    asked = exercise(number)
    for seed in (None, 1):
        check(number, asked.solution, seed=seed)
    said = capsys.readouterr().out
    assert said.count(f"Exercise {number} passed") == 2 and asked.praise in said
    # As plain Python shows it, or IPython, if a test before has started one.
    shown = said.count("Figure(") + said.count("<Figure size")
    assert shown == (0 if asked.drawn is None else 2)
    if asked.bonuses:
        check(number, asked.solution_bonus, bonus=True)
        assert refused(number, asked.solution, bonus=True).criterion in asked.bonuses


@pytest.mark.parametrize(("number", "name"), WRONG)
def test_each_wrong_answer_fails_for_its_reason(number, name):
    """And each is told its own sentence, whatever inputs it failed on."""
    answer = exercise(number).wrongs[name]
    error = refused(number, answer)
    assert error.criterion == answer.fails
    assert f"A guess: {answer.sentence}\n" in str(error)


@pytest.mark.parametrize("number", IDS)
def test_an_exercise_is_complete(number):
    """Two wrong answers at least; one of them talks to nobody, which is observed, not believed."""
    asked = exercise(number)
    assert asked.title and asked.level in ("easy", "medium", "hard") and 0 < asked.minutes <= 120
    assert asked.checks and asked.good and asked.praise and len(asked.wrongs) >= 2
    assert set(asked.bonuses) == set() or asked.solution_bonus is not None
    # Catches a wrong answer that was added, or whose sentence was changed, without --slips.
    sentences = {wrong.sentence for wrong in asked.wrongs.values()}
    assert set(asked.slips["told"].values()) == sentences, "publish --slips"
    assert all(len(s) <= 90 and s[-1] in ".?" and len(s.split()) >= 3 for s in sentences)
    assert {answer.fails for answer in asked.wrongs.values()} <= {*asked.checks, "run"}
    size = asked.sizes[0]
    talking = [answer for answer in asked.wrongs.values() if answer.fails != "run"]
    silent = (play(asked, answer, size, seed=0).sent == [[]] * size for answer in talking)
    assert any(silent), "no wrong answer that communicates nothing"


@pytest.mark.parametrize(("number", "source", "cells_of_kernel"), STUBS)
def test_the_stub_of_the_notebook_is_waiting(number, source, cells_of_kernel, monkeypatch):
    """And no rank is started for it."""
    monkeypatch.setattr(exercises, "_pool", None)
    space = {"torch": torch, "dist": dist, "Tensor": torch.Tensor}
    exec("from minipar.comm.mesh import Axis, Mesh\nfrom torch import nn\n" + source, space)
    stub = next(v for k, v in reversed(space.items()) if callable(v) and k in source)
    error = refused(number, stub)
    assert error.criterion == "written" and f"Exercise {number} is waiting for you" in str(error)
    assert "seed" not in str(error)  # the same text every time
    # What a learner is given, in the order in which it comes.
    asked, given = (inspect.signature(f).parameters for f in (stub, exercise(number).solution))
    assert [*asked] == [*given][: len(asked)]
    for module in re.findall(r"\b(collectives|dist)\.\w+\(", source):  # that it is to call
        assert re.search(rf"import .*\b{module}\b|^{module} =", cells_of_kernel, re.M), module


def test_exercises_are_in_notebooks_and_in_the_order_of_their_numbers():
    """As names of files, 10.1 would stand between 0.2 and 1.1."""
    assert sorted(number for number, *_ in STUBS) == sorted(IDS)
    assert sorted(IDS, key=lambda number: [int(part) for part in number.split(".")]) == IDS


def test_the_hosts_page_tells_of_every_exercise_and_its_minutes():
    page = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    for number, asked in zip(IDS, map(exercise, IDS), strict=True):
        level = f"{asked.level} +" if asked.bonuses else asked.level
        assert f"| {number} | {asked.title} | {level} | {asked.minutes} |" in page
    assert f"Together {sum(exercise(number).minutes for number in IDS)} minutes" in page


@pytest.fixture(scope="module")
def handout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("handout") / "course"
    publish.hand_out(ROOT / "notebooks", folder)
    return folder


def test_a_copy_lacks_no_name(handout):
    """Taking out too much would leave a check without what it calls."""
    for file in (handout / "solutions").glob("ex_*.py"):
        text = file.read_text(encoding="utf-8")
        assert "solution" not in text and "wrong" not in text, file
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "solutions"]
    done = subprocess.run(command, cwd=handout, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "number",  # one of each notebook, others in test-all
    [i if i.endswith(".1") else pytest.param(i, marks=pytest.mark.exhaustive) for i in IDS],
)
def test_a_copy_has_no_answers_and_checks_as_before(number, handout, monkeypatch):
    """Taking out too little would give them away."""
    answer = exercise(number)
    monkeypatch.chdir(handout)
    asked = exercise(number)
    assert asked.checks.keys() == answer.checks.keys()
    assert asked.wrongs == {} and asked.solution is None
    check(number, answer.solution)
    wrong = next(iter(answer.wrongs.values()))
    error = refused(number, wrong)
    assert error.criterion in asked.checks and f"A guess: {wrong.sentence}\n" in str(error)


@pytest.mark.parametrize("number", [number for number in IDS if exercise(number).bugs])
def test_a_bug_is_named_before_it_is_mended(number, capsys, monkeypatch):
    """Each wrong name is told what speaks against it, and no rank is started for that."""
    monkeypatch.setattr(exercises, "_pool", None)
    bugs = exercise(number).bugs
    (right,) = [name for name, against in bugs.items() if not against]
    assert len(set(bugs.values())) == len(bugs) >= 5
    for name in bugs.keys() - {right}:
        error = refused(number, name)
        assert bugs[name] in str(error) and error.criterion == "bug"
    check(number, right)
    assert f"yes, {right}" in capsys.readouterr().out
    assert all(name in str(refused(number, "...")) for name in bugs)


# ---------------------------------------------------------------------- answers of all kinds
def other_answers() -> dict[str, tuple]:
    """Answers by name: the exercise, the answer, the check that refuses it ("": none), its words.

    All are local functions: ranks get them by value, as functions of a notebook.
    """
    known: dict[str, tuple] = {}

    def answer(number, criterion="", *says):
        return lambda function: known.setdefault(
            function.__name__, (number, function, criterion, says)
        )[1]

    # ------------------------------------------------------------------ right in another way
    @answer("6.3")
    def two_buffers_hold_two_weights(shards, x, compute, axis):
        buffers = [shards[0].new_empty(axis.size * len(shards[0]), shards[0].shape[1])] * 2
        buffers[1] = buffers[0].clone()

        def gather(i):
            into = buffers[i % 2]
            return dist.all_gather_single(into, shards[i], group=axis.group, async_op=True)

        coming = gather(0)
        for i in range(len(shards)):
            coming.wait()
            coming = gather(i + 1) if i + 1 < len(shards) else None
            x = compute(buffers[i % 2], x)
        return x

    @answer("11.4")
    def counts_in_float32(bias, counts, speed, axis):
        load = counts.float()
        dist.all_reduce(load, group=axis.group)
        return bias + speed * (load.mean() - load).sign()

    @answer("3.4")
    def a_loss_in_float32(model, microbatches, axis):
        return exercise("3.4").solution(model, microbatches, axis).float()

    @answer("14.5")
    def gathers_flags(parameters, axis):
        mine = torch.tensor([p.grad is not None for p in parameters]).long()
        every = mine.new_empty(axis.size * len(mine))
        dist.all_gather_single(every, mine, group=axis.group)
        for p, used in zip(parameters, every.view(axis.size, -1).any(0).tolist(), strict=True):
            if used:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, group=axis.group)
                p.grad /= axis.size

    @answer("12.3")
    def exact_to_the_byte(explained, layer_bytes, budget):
        for one in explained:
            plan, needs = one.plan, []
            for place in range(plan.pp):
                layers = sum("q_proj" in r.name and place in r.stage_ranks for r in one.rows)
                begun = min(plan.pp - place, plan.microbatches)
                kept = begun * layers * layer_bytes / (plan.tp * plan.cp)
                needs.append(sum(one.bytes_on(place).values()) + kept)
            if max(needs) <= budget:
                return plan
        return None

    @answer("14.1")
    def in_tuples(model, backward, limit):
        return [*map(tuple, exercise("14.1").solution(model, backward, limit))]

    # ------------------------------------------------------------------ nearly right
    @answer("3.4", "result", "the loss of rank 0: the value is wrong")
    def nearly(model, microbatches, axis):
        return a_loss_in_float32(model, microbatches, axis) * 1.0001

    @answer("10.5", "own", "your own, please: not by zb_h1")
    def takes_one(p, m):
        return schedules.make("zb_h1", p, m).as_text()

    # ------------------------------------------------------------------ of another kind
    def returns(name, function, says, criterion="result"):
        known[name] = "2.1", lambda tensor, axis: function(tensor), criterion, (says,)

    returns("none", lambda x: None, "expected a tensor, got None\nA guess: Is a `return` missing?")
    returns("slip", lambda x: x[2400], "IndexError", "run")
    returns("tidies_up", lambda x: dist.destroy_process_group(), "group was destroyed", "run")
    returns("of_ranks", lambda x: ring_round(x), "A guess: A cell of %%ranks", "run")  # noqa: F821

    @answer("2.1", "run", "; ranks 1, 2, 3 called return", "in only_rank_0", "skip a call")
    def only_rank_0(tensor, axis):
        if axis.rank == 0:
            dist.all_reduce(tensor, group=axis.group)
        return tensor

    @answer("2.1", "run", "name 'world_size' is not defined", "A guess: A cell of %%ranks")
    def asks_for_a_name_of_cells(tensor, axis):
        return tensor * world_size  # noqa: F821

    return known


@pytest.mark.parametrize(
    ("number", "answer", "criterion", "says"),
    [pytest.param(*known, id=name) for name, known in other_answers().items()],
)
def test_an_answer_is_accepted_or_told_what_is_wrong(number, answer, criterion, says):
    if not criterion:
        for seed in range(3):
            check(number, answer, seed=seed)
        return
    error = refused(number, answer)
    assert error.criterion == criterion
    assert all(word in str(error) for word in says), str(error)


@pytest.mark.parametrize("number", IDS)
def test_an_answer_of_another_kind_gets_a_sentence(number):
    """Catches: "'NoneType' object has no attribute 'splitlines'", with the lines of our own."""
    for returned in (None, ["?"]):
        text = str(refused(number, lambda *_, returned=returned: returned))
        assert "Traceback" not in text and "solutions/" not in text
        assert "object" not in text or "The check went on with this" in text


def test_an_answer_that_is_wrong_in_its_own_way_gets_no_guess():
    """A guess that fits everything would be none; nor is one made where it would take long."""

    def adds_one(tensor, axis):
        return exercise("2.1").solution(tensor, axis) + 1

    def breaks_off(tensor, axis):
        raise KeyError("an error that no wrong answer has")

    for answer in (adds_one, breaks_off):
        assert "A guess" not in str(refused("2.1", answer))


# ---------------------------------------------------------------------- the machinery
def test_words_of_a_check():
    error = str(refused("2.1", exercise("2.1").wrongs["passes_whole_tensors"], seed=7))
    assert "3 x send to rank 1, 192 bytes" in error and "6 x send to rank 1, 48 bytes" in error
    assert "difference: -3 operations, +288 bytes" in error and exercise("2.1").good in error
    assert error.endswith('check("2.1", wrong_passes_whole_tensors, seed=7)')
    for called in (torch.ones(2), "ring", None):
        assert str(refused("2.1", called)).startswith("This is no function: ")


def test_inputs_are_fresh_unless_the_seed_is_given():
    """Fixed inputs could be answered by fixed outputs."""

    def keeps_its_own(tensor, axis):
        return tensor

    assert len({str(refused("2.1", keeps_its_own, seed=3)) for _ in range(2)}) == 1
    assert len({str(refused("2.1", keeps_its_own)).rsplit("seed=")[-1] for _ in range(4)}) > 1


def test_every_way_of_talking_is_counted():
    """A count at the level of `dist.*` would miss names imported before, and what torch calls."""

    def talk(tensor, axis):
        group, right, left = axis.group, (axis.rank + 1) % 4, (axis.rank - 1) % 4
        dist.all_reduce(tensor.clone(), group=group)
        work = isend(tensor, group=group, group_dst=right)
        recv(torch.empty_like(tensor), group=group, group_src=left)
        work.wait()
        posts = [dist.P2POp(dist.isend, tensor[:6], group=group, group_peer=left)]
        posts.append(dist.P2POp(dist.irecv, tensor[6:12].clone(), group=group, group_peer=right))
        for work in dist.batch_isend_irecv(posts):
            work.wait()
        torch.distributed.nn.functional.all_reduce(tensor.clone(), group=group)
        dist.barrier(group)

    case = play(exercise("2.1"), talk, 4, seed=0)
    for rank, sent in enumerate(case.sent):
        sums = [Sent("all_reduce", 288)] * 2  # 2 * 3/4 * 24 numbers of 8 bytes
        right, left = Sent("send", 192, (rank + 1) % 4), Sent("send", 48, (rank - 1) % 4)
        assert sorted(sent, key=str) == sorted([*sums, right, left], key=str)


def test_nothing_is_left_over_for_the_next_check():
    """Nor may a message arrive that nobody received, or bytes count as on another device."""

    def send_to_nobody(tensor, axis):
        device.use(emulate.device("h100", magnify=32))
        dist.isend(tensor + 1000, group=axis.group, group_dst=(axis.rank + 1) % axis.size)
        return tensor

    for _ in range(2):
        assert refused("2.1", send_to_nobody).criterion == "run"  # never waited for
        check("2.1", exercise("2.1").solution)
    assert exercises._own.run(lambda: len(link.observers)) == [0] * 4


def test_an_endless_loop_and_a_wait_in_vain_end(pool, monkeypatch):
    """A check without a limit would hang; one that kills the ranks would lose them."""
    monkeypatch.setattr(exercises, "TIME_LIMIT", 1.0)

    def loop(tensor, axis):
        while True:
            pass

    def wait_in_vain(tensor, axis):
        dist.recv(tensor, group=axis.group, group_src=(axis.rank + 1) % axis.size)

    def asks_the_world(tensor, axis):
        if axis.size == 4:
            return exercise("2.1").solution(tensor, axis)
        dist.all_reduce(tensor)  # not all of the world takes part in the axis
        return tensor

    pids = pool.pids
    for answer in (loop, wait_in_vain, asks_the_world):
        start = time.monotonic()
        error = refused("2.1", answer)
        assert error.criterion == "run" and "group=axis.group" in str(error)
        assert time.monotonic() - start < 6 * busy()
    assert pool.pids == pids and pool.time_limit is None
    check("2.1", exercise("2.1").solution)


def test_ranks_of_the_check_itself_notice_a_wait_in_vain(monkeypatch):
    """Else a deadlock would last for the whole time limit."""
    monkeypatch.setattr(exercises, "_own", None)

    def wait_in_vain(tensor, axis):
        if axis.rank == 0:
            dist.recv(tensor, group=axis.group, group_src=1)

    try:
        error = str(refused("2.1", wait_in_vain))
        assert "waits in recv, in vain (all ranks wait)" in error
        assert "waits in return, in vain" in error and "barrier" not in error
    finally:
        exercises._own.close()
