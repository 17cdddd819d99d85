"""What travels to ranks and back arrives as it was; of functions, tests/ranks/test_launch.py."""

import pytest
import torch
from torch import nn

from minipar.ranks.pack import pack, unpack

WHOLE = torch.arange(24).view(4, 6)
TENSORS = {
    "of float64": torch.randn(3, 5, dtype=torch.float64),
    "of bf16": torch.randn(7).bfloat16(),
    "of float8": torch.randn(7).to(torch.float8_e4m3fn),
    "of complex numbers": torch.randn(2, 2, dtype=torch.complex64),
    "of truths": torch.tensor([True, False]),
    "a number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "a column": WHOLE[:, 2],
    "transposed": WHOLE.t(),
    "every second row": WHOLE[1::2],
    "conjugated": torch.randn(2, 3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, 2, device="meta"),
}


def look(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.layout, tensor.device, tensor.requires_grad


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    """Mutants: one type for all; the memory before it; memory that cannot be resized."""
    tensor = TENSORS[name]
    grad = tensor.is_floating_point() and not tensor.is_sparse  # which torch forgets of those
    for sent in (tensor, tensor.detach().clone().requires_grad_(grad)):
        arrived = unpack(pack({"x": [sent]}))["x"][0]
        assert look(arrived) == look(sent)
        if not sent.is_meta:
            theirs, ours = (x.detach().to_dense().to(torch.complex128) for x in (sent, arrived))
            assert torch.equal(theirs, ours)
        if sent.layout == torch.strided:
            arrived.untyped_storage().resize_(1000)


def test_a_tensor_stays_on_the_cpu_where_others_are_made_elsewhere():
    """Mutant: an error of torch's, of two devices."""
    with torch.device("meta"):
        assert unpack(pack(WHOLE)).equal(WHOLE)


def test_a_module_arrives_as_it_was():
    model = nn.BatchNorm1d(3)
    model.weight.note = "of a user"
    arrived = unpack(pack(model))
    assert type(arrived.weight) is nn.Parameter and arrived.weight.requires_grad
    assert arrived.weight.note == "of a user"
    theirs = dict(model.state_dict())
    assert all(torch.equal(value, theirs[name]) for name, value in arrived.state_dict().items())


def test_what_is_freed_is_not_read():
    """Mutant: a crash of the process, or what is there by now."""
    weight = torch.zeros(10_000)
    weight.untyped_storage().resize_(0)
    sent = pack(weight)
    assert len(sent) < 5000 and len(unpack(sent)) == 10_000


def test_of_a_large_tensor_travels_what_is_sent():
    """And as bytes: not as a checkpoint file, which would take a millisecond."""
    sent = pack(torch.zeros(1000, 1000)[7])
    assert 4000 <= len(sent) < 5000 and b"_load_from_bytes" not in sent
