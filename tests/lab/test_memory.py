"""Live bytes, held against programs whose bytes can be counted by hand."""

import copy

import pytest
import torch

from minipar.lab.memory import LiveBytes
from minipar.model.llama import Llama, LlamaConfig, token_loss
from minipar.model.recompute import checkpoint_activations

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@DEVICES
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
    assert live.now == 0 and live.peak == 8000 and live.largest == 4000
    assert live.samples == [0, 4000, 8000, 4000, 0]


def test_tensors_of_lists_and_copies_count_once():
    """Mutants: what torch.tensor makes is taken for given; copy.deepcopy counts the original."""
    before = torch.zeros(1000)
    with LiveBytes() as live:
        listed = torch.tensor([1.0] * 10)
        assert live.now == 40
        copied = copy.deepcopy(before)
        assert live.now == 4040
        again = copy.deepcopy(listed)
        assert live.now == 4080
        del listed, copied, again
    assert live.now == 0


def test_what_was_there_before_does_not_count():
    before = torch.zeros(1000)
    with LiveBytes() as live:
        before += 1
        before.view(-1)
    assert live.samples == [0]


def test_gradients_and_adam_are_one_and_two_times_the_weights():
    model = torch.nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with LiveBytes() as live:
        model(torch.ones(1, 64)).sum().backward()
        assert live.now == model.weight.nbytes
        optimizer.step()
        assert live.now == 3 * model.weight.nbytes + 4  # and the number of the step
        optimizer.zero_grad()
        assert live.now == 2 * model.weight.nbytes + 4


def test_recomputation_keeps_one_vector_per_token_and_layer():
    """The mutant that never releases, or that does not see recomputation, fails."""
    kept, peaks = {}, {}
    for mode in ("none", "full"):
        after_forward = []
        for num_layers in (1, 2):
            model = Llama(LlamaConfig(256, 32, 64, num_layers, 4, 2))
            checkpoint_activations(model, mode)
            tokens = torch.zeros(2, 16, dtype=torch.int64)
            with LiveBytes() as live:
                loss = token_loss(model(tokens), tokens)
                after_forward.append(live.now)
                loss.backward()
                del loss
        kept[mode] = (after_forward[1] - after_forward[0]) / (2 * 16 * 4)
        peaks[mode] = live.peak
    assert kept["full"] == 32
    assert kept["none"] > 10 * 32
    assert peaks["full"] < peaks["none"]
