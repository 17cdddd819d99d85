"""Live bytes, counted by hand; the ledger: every byte in its category, and within the budget."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from minipar.lab.memory import LiveBytes, MemoryHistory, MemoryLedger, OverBudget
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.observe import memory
from minipar.sim.memory import model_state

pytestmark = pytest.mark.slow

TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def llama() -> Llama:
    return Llama(LlamaConfig(61, 32, 64, 2, 4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        token_loss(model(TOKENS), TOKENS).backward()
        optimizer.step()


# ---------------------------------------------------------------------- live bytes
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_counts_while_it_lives(device):
    """Without the release, `now` would only grow; a count of tensors, not storages: views, too."""
    with LiveBytes() as live:
        a = torch.zeros(1000, device=device)
        view = a.view(10, 100).T
        a += 1
        assert live.now == 4000
        b = a * 2
        assert live.now == 8000
        del a
        assert live.now == 8000  # the view still holds it
        del view
        assert live.now == 4000
        del b
    assert live.now == 0 and live.peak == 8000
    assert live.samples == [0, 4000, 8000, 4000, 0]


def test_tensors_of_lists_and_copies_count_once():
    """Mutants: what torch.tensor makes is taken for given; copy.deepcopy counts the original."""
    before = torch.zeros(1000)
    with LiveBytes() as live:
        before += 1
        before.view(-1)
        assert live.samples == [0]  # what was there before does not count
        listed = torch.tensor([1.0] * 10)
        assert live.now == 40
        copied = copy.deepcopy(before)
        assert live.now == 4040
        again = copy.deepcopy(listed)
        assert live.now == 4080
        del listed, copied, again
    assert live.now == 0


# ---------------------------------------------------------------------- the ledger
@pytest.mark.parametrize("warm", [False, True])
def test_model_state_is_the_closed_form(warm):
    """Mutant: gradients taken for activations, state that is not seen, weights counted twice.

    Whether the optimizer's state is made meanwhile, or was there before.
    """
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    if warm:
        train(model, optimizer)
        optimizer.zero_grad()
    with MemoryLedger(model) as ledger:
        train(model, optimizer, 2)
    history = ledger.history()
    formula = model_state(sum(p.numel() for p in model.parameters()))
    assert history.peak_of("parameters") == formula["parameters"]
    assert history.peak_of("optimizer") == pytest.approx(formula["optimizer"], rel=0.01)  # and step
    # A weight that is used twice, or padded, receives its gradient as a second tensor at times.
    assert history.peak_of("gradients") == pytest.approx(formula["gradients"], rel=0.1)
    assert history.device["gradients"][-1] == formula["gradients"]
    at_start = history.device["optimizer"][0]
    assert at_start == history.device["optimizer"][-1] if warm else at_start == 0
    assert history.device["activations"][-1] < 0.01 * history.peak_of("activations")
    buffers = sum(b.nbytes for b in model.buffers())
    assert history.peak_of("buffers") == buffers
    assert history.peak == max(history.totals) == sum(history.at_peak.values())
    assert not history.host


def test_what_a_strategy_tags_counts_as_that():
    """Whatever else it may be: a gathered block holds parameters as well."""
    model = nn.Linear(10, 10, bias=False)
    with MemoryLedger(model) as ledger:
        flat = torch.empty(250)
        memory.tag("gathered", flat)
        memory.tag("copy", torch.empty(25))
        with memory.on_host():
            hosted = torch.empty(1000)
        del flat, hosted
    history = ledger.history()
    assert history.peak_of("gathered") == 1000 and history.device["gathered"][-1] == 0
    assert history.peak_of("copy") == 100
    assert history.peak_of(*history.host, host=True) == 4000
    assert history.peak == 400 + 1000 + 100
    assert not memory.watchers


@pytest.mark.parametrize("kind", [LiveBytes, MemoryLedger])
def test_memory_that_comes_and_goes_inside_of_one_tensor(kind):
    """A storage may be resized, as sharded strategies do. Mutant: it only grows."""
    older = torch.empty(500)
    older.untyped_storage().resize_(0)
    with kind() as live:
        older.untyped_storage().resize_(2000)
        assert live.now == 2000
        older.untyped_storage().resize_(0)
        flat = torch.empty(1000)
        flat.untyped_storage().resize_(0)
        assert live.now == 0
        flat.untyped_storage().resize_(4000)
        flat.fill_(1)
        assert live.now == 4000
        torch.ones(3, out=torch.empty(0))  # grown by an operation
        del flat
        assert live.now == 0
    assert "watch_resize" not in torch.UntypedStorage.resize_.__qualname__


# ---------------------------------------------------------------------- a budget
def test_a_model_that_does_not_fit():
    """In the optimizer step, where Adam's state comes; a little more room, and it fits."""
    model = llama()
    with MemoryLedger(model) as need:
        train(model, torch.optim.AdamW(model.parameters()))
    peak = need.history().peak
    model = llama()
    with MemoryLedger(model, budget=peak):
        train(model, torch.optim.AdamW(model.parameters()))
    model = llama()
    state = sum(p.nbytes for p in model.parameters())
    says = r"a rank would hold .* MB, more than its budget of .* MB: .*parameters 0\.\d+ MB"
    ledger = MemoryLedger(model, budget=0.95 * peak)
    with pytest.raises(ValueError, match=says) as caught, ledger:
        train(model, torch.optim.AdamW(model.parameters()))
    assert isinstance(caught.value, MemoryError) and "offload it" in str(caught.value)
    with pytest.raises(OverBudget, match="budget"), MemoryLedger(model, budget=0.99 * state):
        raise AssertionError("a model that is too large already")
    assert not memory.watchers
    model(TOKENS)  # nothing stays behind


def test_a_history_says_what_there_is_at_its_peak():
    history = MemoryHistory({"a": [1, 5, 2], "b": [7, 4, 0]}, {"c": [0, 1, 9]})
    assert history.totals == [8, 9, 2] and history.peak == 9
    assert list(history.at_peak.items()) == [("a", 5), ("b", 4)]
    assert history.peak_of("a") == 5 and history.peak_of("a", "b") == 9
    assert history.peak_of("c") == 0 and history.peak_of("c", "d", host=True) == 9
    assert MemoryHistory({}).at_peak == {}
    assert pickle.loads(pickle.dumps(history)) == history  # ranks send it


def test_phases_are_those_of_the_step():
    """Mutant: what autograd frees outside of backward is backward."""
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryLedger(model) as ledger:
        for _ in range(2):
            model(torch.ones(2, 10)).relu().sum().backward()
        optimizer.step()
    phases = [name for name, _ in itertools.groupby(ledger.history().phases)]
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]
    assert len(ledger.history().phases) == len(ledger.history().totals)
