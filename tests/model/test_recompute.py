"""Recomputation keeps less, computes what it promises, and changes no gradient."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipar.model.llama import PRESETS, Llama, token_loss
from minipar.model.recompute import checkpoint_activations
from tests.model.oracle import some_tokens


class Watch(TorchDispatchMode):
    """Counts matrix products and attentions, and remembers all memory that operators return.

    `saved_tensors_hooks` would not do: what "selective" keeps lies in a cache beside autograd.
    """

    def __init__(self):
        super().__init__()
        self.products = self.attentions = 0
        self.memory = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.mm.default
        self.attentions += "flash_attention_for_cpu.default" in str(func)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.memory[StorageWeakRef(storage)] = storage.data_ptr(), storage.nbytes()
        return out

    def num_bytes_alive(self, model) -> int:
        """Bytes that operators returned and that still live, without the parameters."""
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        alive = dict(memory for ref, memory in self.memory.items() if not ref.expired())
        return sum(n for pointer, n in alive.items() if pointer not in parameters)


def measure(mode: str) -> dict:
    model = Llama(PRESETS["tiny"]).double()
    checkpoint_activations(model, mode)
    tokens = some_tokens(model.config, 2, 65)
    with Watch() as forward:
        loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    saved = forward.num_bytes_alive(model)
    with Watch() as backward:
        loss.backward()
    return {
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "saved": saved,
        "forward": (forward.products, forward.attentions),
        "backward": (backward.products, backward.attentions),
    }


@pytest.fixture(scope="module")
def plain():
    return measure("none")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_equal_bit_for_bit(mode, plain):
    grads = measure(mode)["grads"]
    assert grads.keys() == plain["grads"].keys()
    for name, grad in grads.items():
        assert grad.abs().max() > 0 and torch.equal(grad, plain["grads"][name]), name


def test_each_mode_keeps_what_it_promises(plain):
    """Catches: a mode that does nothing, or a "selective" that keeps everything or nothing."""
    config, tokens = PRESETS["tiny"], 2 * 64
    full, selective = measure("full"), measure("selective")
    width, heads = config.hidden_size, config.num_heads
    # Matrix products and attention: q, k, v, attention with its log-sum-exp, o, gate, up; not down.
    kept = 4 * width + heads + 2 * config.intermediate_size
    per_layer = (selective["saved"] - full["saved"]) / (config.num_layers * tokens * 8)
    assert kept * 0.98 < per_layer < kept * 1.02
    # Inputs of the four layers, final norm, logits and loss; beside this nothing.
    assert full["saved"] < 0.15 * plain["saved"]
    assert selective["saved"] < 0.65 * plain["saved"]


def test_each_mode_computes_what_it_promises(plain):
    full, selective = measure("full"), measure("selective")
    layers = PRESETS["tiny"].num_layers
    assert plain["forward"] == full["forward"] == selective["forward"] == (7 * layers + 1, layers)
    assert plain["backward"][1] == 0
    extra = full["backward"][0] - plain["backward"][0], full["backward"][1]
    # The last product of a layer is spared: backward needs its inputs, not its result.
    assert extra == (6 * layers, layers)
    assert selective["backward"] == plain["backward"]
