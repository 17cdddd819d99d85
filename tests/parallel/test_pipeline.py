"""The pipeline runtime: where it cuts, what a stage computes when, who waits for whom."""

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minipar.comm.mesh import Mesh
from minipar.model.llama import PRESETS
from minipar.model.recompute import checkpoint_activations
from minipar.observe import timeline
from minipar.parallel import ddp
from minipar.parallel.base.strategy import Strategy
from minipar.parallel.pipeline import messages, runtime, split_backward, stages
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.checks import peak_live
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.pipeline.simulate import lower
from tests.comm.same import launched_over
from tests.law import models
from tests.law.harness import Task
from tests.parallel.layers import on_paper

TASK = Task(partial(models.llama, num_layers=4))


def microbatches(m: int) -> list:
    return replace(TASK, microbatches=m).microbatches_of(0, 0, 1)


def weights_of(state) -> dict:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


# ---------------------------------------------------------------------- where to cut
@pytest.mark.parametrize("num_parts", [1, 3, 4, 5])
def test_no_other_cut_has_a_cheaper_dearest_part(num_parts):
    """Of cuts with the same dearest part, the second dearest decides, and so on.

    Mutants: equal numbers of layers; any cut with the same dearest part; a head that costs nothing.
    """
    generator = torch.Generator().manual_seed(num_parts)
    drawn = torch.randint(0, 6, (60, 8), generator=generator).tolist()
    for embedding, *layers, head in ([0, 5, 2, 1, 1, 4, 1, 0], *drawn):

        def parts_of(cut, embedding=embedding, layers=layers, head=head):
            parts = [sum(layers[i] for i in stages.layers_of(cut, k)) for k in range(num_parts)]
            parts[0] += embedding
            parts[-1] += head
            return sorted(parts, reverse=True)

        every = itertools.product(range(1, 7), repeat=num_parts)
        best = min(parts_of(cut) for cut in every if sum(cut) == 6)
        assert parts_of(stages.balance([embedding, *layers, head], num_parts)) == best


def test_the_head_of_a_large_vocabulary_counts():
    """Estimates are a third of the FLOPs of training."""
    config = PRESETS["llama-3.2-1b"]  # 16 layers; the head costs as much as four of them
    costs = stages.estimate_costs(config, 64)
    assert 3 * sum(costs) == pytest.approx(config.flops_per_token(64, causal=True), rel=0.01)
    assert stages.balance([0.0, *[1.0] * 16, 0.0], 4) == (4, 4, 4, 4)
    assert stages.balance(costs, 4)[-1] < 4


# ---------------------------------------------------------------------- backward in two halves
def _gradients(model, name: str, autocast=nullcontext) -> dict:
    """By a pipeline of one rank, whose schedule splits the backward or does not."""
    upstream = torch.randn(2, 5, 61, generator=torch.Generator().manual_seed(1))
    model.token_loss = lambda logits, _: (logits * upstream).sum()
    tokens = torch.randint(4, (2, 5), generator=torch.Generator().manual_seed(2))  # some twice
    pipeline = runtime.apply(model, Mesh().pp, make(name, 1, 1))
    pipeline.run(model, [], [(tokens, tokens)], autocast=autocast)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("tie", [True, False])
def test_trap_25_the_halves_are_the_whole(mode, tie):
    found = []
    for name in ("gpipe", "zb_h1"):
        model = models.llama(0, num_layers=2, tie_embeddings=tie).double()
        checkpoint_activations(model, mode)
        found.append(_gradients(model, name))
    for name, whole in found[0].items():
        torch.testing.assert_close(found[1][name], whole, rtol=1e-12, atol=1e-14)


def test_the_halves_are_the_whole_in_mixed_precision():
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    whole, halves = (_gradients(models.llama(0), n, autocast) for n in ("gpipe", "zb_h1"))
    for name, gradient in whole.items():
        assert halves[name].dtype == torch.float32
        assert (halves[name] - gradient).norm() / gradient.norm() < 0.01, name


def test_trap_25_each_half_costs_a_forward():
    """Nothing is computed twice: I and W together cost a backward, and W is half of it.

    Mutant: W as a second backward through everything.
    """
    layer = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    split_backward.enable(layer)
    x = torch.randn(5, 32, requires_grad=True)
    flops, jobs = [], []
    with FlopCounterMode(display=False) as counter:
        y = layer[1].forward(layer[0].forward(x))  # the counter cannot see a leaf's hooks
        flops.append(counter.get_total_flops())
        with split_backward.put_off(jobs):
            torch.autograd.grad(y, [x, *layer.parameters()], y.detach(), allow_unused=True)
        flops.append(counter.get_total_flops())
        split_backward.do(jobs)
        flops.append(counter.get_total_flops())
    assert flops == [flops[0], 2 * flops[0], 3 * flops[0]] and flops[0] == 2 * 2 * 5 * 32 * 64


def test_trap_25_each_microbatch_has_its_own_inputs():
    """W may come much later and in another order: it uses what its own microbatch had.

    Mutant: a layer that remembers its last input only.
    """
    layer = nn.Linear(3, 2, bias=False).double()
    split_backward.enable(layer)
    inputs = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    grads = torch.randn(3, 4, 2, dtype=torch.float64)
    jobs = [[], [], []]
    for i in (0, 1, 2):
        with split_backward.put_off(jobs[i]):
            torch.autograd.grad(layer(inputs[i]), layer.weight, grads[i], allow_unused=True)
    for i in (2, 0, 1):
        layer.weight.grad = None
        split_backward.do(jobs[i])
        torch.testing.assert_close(layer.weight.grad, grads[i].mT @ inputs[i].detach())


# ---------------------------------------------------------------------- refused, before all else
def drop(schedule, action: str):
    rows = (tuple(a for a in row if str(a) != action) for row in schedule.actions)
    return replace(schedule, actions=tuple(rows))


def _apply(schedule, size: int = 2, model=None, **how):
    return runtime.apply(model or models.llama(0), on_paper("pp", size), schedule, **how)


def _run(schedule, m: int):
    model, axis = models.llama(0), on_paper("pp", schedule.num_ranks)
    cut = stages.balance([0, 1, 1, 1, 0], schedule.num_stages)
    runtime.Pipeline(model, axis, lower(schedule), cut).run(model, [], microbatches(m))


ONE = make("1f1b", 2, 3)
ERRORS = [
    (lambda: _apply(drop(make("zb_h1", 2, 3), "1W2")), "stage 1 has F I for microbatch 2"),  # T25
    (lambda: _apply(drop(ONE, "0F1")), "stage 0 has B for microbatch 1"),
    (lambda: _apply(drop(lower(ONE), "1RF0")), "rank 0 at 0SF0 for 1RF0"),
    (lambda: _apply(make("1f1b", 4, 4)), "1f1b has p=4, but pp=2"),
    (lambda: _apply(make("zb_v", 2, 4)), "4 stages do not fit 3 layers: each needs one"),
    (lambda: _apply(ONE, cut=(2, 2)), "does not cut 3 layers into 2 stages"),
    (lambda: _apply(make("1f1b", 3, 3), 3, cut=(3, 0, 0)), "all above 0 between the first"),
    (lambda: _run(ONE, 4), "4 microbatches, but the schedule 1f1b has m=3"),
]


@pytest.mark.parametrize("call, said", ERRORS)
def test_what_does_not_fit_is_refused_before_any_rank_waits(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# ---------------------------------------------------------------------- the weights that exist
def _initial(schedule) -> dict:
    mesh = Mesh(pp=schedule.num_ranks)
    model = TASK.build(mesh.rank)
    with torch.no_grad():  # weights that no seed would give
        model.model.layers[2].mlp.up_proj.weight.add_(mesh.rank + 1)
    before = weights_of(model.state_dict())
    pipeline = runtime.apply(model, mesh.pp, schedule)
    own = weights_of(model.state_dict())
    full = pipeline.full_state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # as training goes on
    return {"before": before, "own": own, "full": full}


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_trap_02_stages_have_the_weights_of_the_model(ranks, name):
    """Mutants: stages that initialise themselves with one seed, so layers are equal; a state that
    training changes."""
    found = ranks(2).run(_initial, make(name, 2, 2))
    serial = found[0]["before"]
    for result in found:
        assert list(result["full"]) == list(serial)
        assert all(torch.equal(result["full"][n], serial[n]) for n in serial)
        assert all(torch.equal(result["own"][n], serial[n]) for n in result["own"])
        assert result["full"]["lm_head.weight"] is result["full"]["model.embed_tokens.weight"]
    rows = [name for name in serial if name.endswith("q_proj.weight")]
    layers = [found[0]["full"][name] for name in rows]
    assert len(layers) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(layers, 2))
    assert not torch.equal(found[1]["before"][rows[0]], serial[rows[0]])
    held = Counter(name for result in found for name in result["own"])
    copies = 1 if name == "1f1b" else 2
    assert all(held[n] == copies for n in serial)


# ---------------------------------------------------------------------- one step
class Spy(Strategy):
    """Notes of every gradient that arrives whether it was to be synchronised."""

    def __init__(self, model, axis) -> None:
        super().__init__(model, axis)
        self.arrived: dict[str, list[bool]] = {name: [] for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name, p) -> None:
        self.arrived[name].append(self.synchronises)


BACKWARDS = """backwards: microbatches 3; stages on ranks 0 1
rank 0: 0F0 0F1 0F2 0B2 0B1 0B0
rank 1: 1F0 1F1 1F2 1B2 1I0 1B1 1W0"""  # the last microbatch to come is the first to go


def _spied(schedules: list[Schedule], m: int) -> list:
    mesh = Mesh(pp=2)
    results = []
    for schedule in schedules:
        model = TASK.build(0)
        pipeline = runtime.apply(model, mesh.pp, schedule)
        spy = Spy(model, mesh.pp)
        held, steps = [], []

        def forward(step, *args, held=held, steps=steps):
            out = _forward(step, *args)
            held.append(len(step.live) + len(step.owed))
            steps.append(step)
            return out

        with mock.patch.object(runtime.Step, "forward", forward):
            pipeline.run(model, [spy, pipeline], microbatches(m))
        pipeline.finish_backward()
        results.append((spy.arrived, max(held), len(steps[-1].live)))
    return results


_forward = runtime.Step.forward


@pytest.mark.slow
def test_trap_17_gradients_are_synchronised_once_at_the_last_backward(ranks):
    """Of every parameter, by every schedule: not before its last gradient, and then for sure.

    Where several ranks have a parameter (a tied head, a copy of the model), the sum arrives, once.
    Besides, activations are held as long as `peak_live` says. Mutants: synchronise in every
    backward; in that of the last microbatch by number; a head before its embedding is added.
    """
    m = 3
    schedules = [*(make(name, 2, m) for name in SCHEDULES), Schedule.parse(BACKWARDS)]
    found = ranks(2).run(_spied, schedules, m)
    for rank, results in enumerate(found):
        for schedule, (arrived, held, left) in zip(schedules, results, strict=True):
            name = schedule.name
            assert held == peak_live(schedule)[rank] and left == 0, name
            for parameter, order in arrived.items():
                tied = parameter in ("model.embed_tokens.weight", "lm_head.weight")
                # The sum of all uses, on one rank or on several, arrives once.
                is_sum = schedule.copies == 2 or tied
                expected = [True] if is_sum else [False] * (m - 1) + [True]
                assert order == expected, (name, parameter, order)


def _launches(schedule) -> list[str]:
    """In the second step: the backwards of this rank, and "dp" for each sum over dp, as they begin.

    Their order is the program's: that what is launched also travels meanwhile is shown elsewhere.
    """
    mesh = Mesh(dp=2, pp=2)
    model = TASK.build(0)
    pipeline = runtime.apply(model, mesh.pp, schedule)
    data = ddp.apply(model, mesh.dp, average=False, bucket_mb=0.004)
    for _ in range(2):
        model.zero_grad()
        with timeline.record() as recorded:
            pipeline.run(model, [data, pipeline], microbatches(schedule.num_microbatches))
            for strategy in (data, pipeline):
                strategy.finish_backward()
    spans = sorted(recorded, key=lambda span: span.start)
    order = ["dp" if s.axis == "dp" else s.name for s in spans if s.axis or s.kind == "backward"]
    pieces = {name: order.index(name) for name in order}  # of a backward that was interrupted
    return [n for i, n in enumerate(order) if n == "dp" or n[1:2] == "B" and pieces[n] == i]


@pytest.mark.slow
def test_trap_17_a_stage_is_synchronised_while_other_stages_compute(ranks):
    """A rank with two stages sends the gradients of the later one before it ends the earlier one.

    Mutant: everything after the last backward of the rank.
    """
    schedule = make("interleaved_1f1b", 2, 3)
    for rank, order in enumerate(ranks(4).run(_launches, schedule)):
        later = str(schedule.last_gradient(2 + rank % 2))
        backwards = [i for i, what in enumerate(order) if what != "dp"]
        sums = [i for i, what in enumerate(order) if what == "dp"]
        assert len(backwards) == 2 * 3, order
        assert sums[0] > order.index(later), "sent before the stage had all of its gradients"
        assert sums[0] < backwards[-1], "nothing was sent before the end"
        assert sums[-1] > backwards[-1], order


# ---------------------------------------------------------------------- messages
def _met(schedule: Schedule) -> list[tuple]:
    axis = Mesh(pp=schedule.num_ranks).pp
    with launched_over("cpu:gloo,cuda:nccl") as called:
        runtime.apply(models.llama(0, num_layers=8), axis, schedule)
    words = "broadcast", "all_gather_object"  # weights and checks travel, too
    return [call for call in called if call[0] not in words]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v"])
def test_over_nccl_pairs_meet_before_the_first_message(ranks, name):
    """In one order: a rank that waits in a pair is waited for by nobody before it. Mutants: some
    pairs only; none."""
    schedule = lower(make(name, 4, 8))
    messages_of = [[a for a in row if not a.computes] for row in schedule.actions]
    pairs = {tuple(sorted((r, schedule.peer(a)))) for r in range(4) for a in messages_of[r]}
    assert pairs == {(0, 1), (1, 2), (2, 3)} | ({(0, 3)} if name == "interleaved_1f1b" else set())
    for rank, called in enumerate(ranks(4).run(_met, schedule)):
        own = [pair for pair in sorted(pairs) if rank in pair]
        expected = [("send", b) if rank == a else ("recv", a) for a, b in own]
        assert called == [("all_reduce",), *expected]


def test_messages_in_flight_are_bounded():
    """Mutant: sends that nobody waits for, until the end: tensors that have left pile up."""
    flying, most = set(), []

    class Sent:
        def __init__(self) -> None:
            flying.add(self)
            most.append(len(flying))

        def wait(self) -> None:
            flying.remove(self)

    schedule = lower(make("gpipe", 2, 20))
    with mock.patch.object(messages, "send", lambda *_, **__: Sent()):
        mail = messages.Mail(on_paper("pp", 2), schedule, torch.empty, torch.device("meta"))
        for i in range(20):
            mail.put(Action(0, "F", i), torch.empty(0))
            mail.send(Action(0, "SF", i))
        mail.close()
    assert max(most) == messages.IN_FLIGHT < len(most) == 20 and not flying
