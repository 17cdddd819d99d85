"""The inside of a rank: what it prints, and what travels to it and back."""

import pytest
import torch
from torch import nn

from minipar.ranks.worker import WIDTH, Output, Stream, pack, unpack


# ---------------------------------------------------------------------- output
class Heard(list):
    """An output and what it has said."""

    def __init__(self, max_lines: int | None) -> None:
        self.output = Output(lambda *what: self.append(what), "rank 3", max_lines)
        self.out, self.err = (Stream(name, self.output) for name in ("stdout", "stderr"))


@pytest.mark.parametrize("max_lines", [None, 10])
def test_lines_travel_whole_and_in_order(max_lines):
    heard = Heard(max_lines)
    print("half ", end="", file=heard.out)
    print("an error", file=heard.err)
    print("and half\n\nrest", end="", file=heard.out)
    assert heard == [("stderr", "an error\n"), ("stdout", "half and half\n\n")]
    print("\r1 %", end="", flush=True, file=heard.err)
    heard.output.end()
    assert heard[2:] == [("stderr", "\r1 %"), ("stdout", "rest")]


def test_beyond_the_last_line_there_is_only_a_count():
    """Streams share the lines; each call has its own; a line that has not ended counts as one."""
    heard = Heard(3)
    heard.out.write("a\nb\n")
    heard.err.write("c\nd\ne")
    for _ in range(1000):
        print("x", file=heard.out)
    print("y", end="", file=heard.out)
    assert not heard.output.make_room()
    heard.output.end()
    assert "".join(text for _, text in heard) == "a\nb\nc\n... 1,004 more lines of rank 3\n"
    heard.out.write("y" * 2 * WIDTH + "\n")  # the next call; too long for a notebook
    assert heard[-1][1] == "y" * WIDTH + " ... 2,000 more characters\n"


# ---------------------------------------------------------------------- pickles
WHOLE = torch.arange(24.0).view(4, 6)
TENSORS = {
    "of float64": torch.randn(3, 5, dtype=torch.float64),
    "of bf16": torch.randn(7).bfloat16(),
    "empty": torch.empty(0, 4),
    "a column": WHOLE[:, 2],
    "transposed": WHOLE.t(),
    "conjugated": torch.randn(2, 3, dtype=torch.complex64)[:1].conj(),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, 2, device="meta")[1],
}


def look(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.layout, tensor.device, tensor.requires_grad


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    """Mutant: a view forgets that it has a gradient."""
    tensor = TENSORS[name]
    grad = tensor.is_floating_point() and not tensor.is_sparse  # which torch forgets of those
    for sent in (tensor, tensor.detach().requires_grad_(grad)):
        arrived = unpack(pack({"x": [sent]}))["x"][0]
        assert look(arrived) == look(sent)
        if not sent.is_meta:
            assert torch.equal(sent.detach().to_dense(), arrived.detach().to_dense())


def test_a_module_arrives_as_it_was():
    model = nn.BatchNorm1d(3)
    model.weight.note = "of a user"
    arrived = unpack(pack(model))
    assert type(arrived.weight) is nn.Parameter and arrived.weight.requires_grad
    assert arrived.weight.note == "of a user"
    theirs = dict(model.state_dict())
    assert all(torch.equal(value, theirs[name]) for name, value in arrived.state_dict().items())


def test_of_a_large_tensor_travels_what_is_sent():
    assert len(pack(torch.zeros(1000, 1000)[7])) < 10_000
