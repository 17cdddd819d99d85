"""The inside of a rank: what it prints, and what travels to it and back."""

import pytest
import torch

from minipar.ranks import worker
from minipar.ranks.worker import Stream, pack, unpack


# ---------------------------------------------------------------------- output
@pytest.fixture
def heard() -> list[str]:
    return []


def test_lines_travel_whole(heard):
    stream = Stream("stdout", lambda _, text: heard.append(text))
    print("half ", end="", file=stream.text)
    print("and half\n\n1 %", end="", file=stream.text)
    assert heard == ["half and half\n\n1 %"]
    print("\r2 %", end="", flush=True, file=stream.text)
    print("rest", end="", file=stream.text)
    stream.end()
    assert heard[1:] == ["\r2 %", "rest"]


def test_beyond_the_last_line_there_is_only_a_count(heard, monkeypatch):
    """Each call has its own lines."""
    monkeypatch.setattr(worker, "MAX_LINES", 3)
    stream = Stream("stdout", lambda _, text: heard.append(text))
    out = stream.text
    for _ in range(2):
        out.write("a\nb\nc\nd\ne")
        for _ in range(1000):
            print("x", file=out)
        print("y", end="", flush=True, file=out)
        stream.end()
        assert "".join(heard) == "a\nb\nc\n... 1,001 more lines\n"
        heard.clear()


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


def test_of_a_large_tensor_travels_what_is_sent():
    assert len(pack(torch.zeros(1000, 1000)[7])) < 10_000
