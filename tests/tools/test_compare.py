"""What counts as equal, and pieces that become whole."""

import math
from dataclasses import replace

import pytest
import torch

from minipar.tools.prove.compare import Record, differing, forms, is_close, join, whole
from tests.law.harness import differences

SIZES = {"dp": 2, "tp": 2}


def test_the_first_difference_is_the_first_computed():
    weights, gradients = {"w": torch.ones(3)}, [{"w": torch.arange(3.0)}]
    right = Record(before=weights, after=weights, losses=[2.0], norms=[1.0], gradients=gradients)
    wrong = replace(right, losses=[2.1], norms=[3.0], gradients=[{"w": torch.zeros(3)}])
    assert list(differences(right, right)) == []
    assert list(differences(wrong, right)) == [
        "loss of step 0: off by 0.1 of 2",
        "gradient of step 0 w: off by 2 of 2",
        "gradient norm of step 0: off by 2 of 1",
    ]


@pytest.mark.parametrize(
    "ours", [{}, {"w": None}, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.0, float("nan")])}]
)
def test_what_is_missing_or_not_a_number_differs(ours):
    assert list(differing(ours, {"w": torch.ones(3)})) == ["w"]
    assert "v" in differing({"w": torch.ones(3), "v": torch.ones(1)}, {"w": torch.ones(3)})


def test_equal_is_relative_to_the_largest_number():
    one = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert is_close(one + 9e-11, one) and not is_close(one + 2e-10, one)
    masks = torch.tensor([-math.inf, 0.0]), torch.tensor([-math.inf, 1.0])
    assert (
        is_close(masks[1], masks[1]) and not is_close(*masks) and not is_close(-masks[1], masks[1])
    )
    assert not is_close(masks[1] * 0, masks[1] * 0)  # NaN
    masked = {"mask": masks[0], "w": one}  # the mask of an attention makes nothing else equal
    assert list(differing({**masked, "w": one + 1}, masked)) == ["w"]
    noise = {"a": one, "b": torch.full((2,), 1e-16, dtype=torch.float64)}
    assert not differing({**noise, "b": -noise["b"]}, noise)  # what sums that cancel leave


def test_pieces_are_joined_along_any_axes():
    value = torch.arange(24.0).view(4, 6)
    pieces = [
        part for half in value.chunk(2, 0) for part in half.chunk(2, 1)
    ]  # dp rows, tp columns
    assert all(torch.equal(w, value) for w in join(pieces, SIZES, {"dp": 0, "tp": 1}))
    assert all(torch.equal(w, value) for w in whole(pieces, SIZES, value))
    found = [form for form, joined in forms([value / 2] * 4, SIZES, value.shape, "sum")
             if is_close(joined[0], value)]  # fmt: skip
    assert found == [{"tp": "sum"}, {"dp": "sum"}]
    assert whole([torch.ones(5)] * 4, SIZES, value)[0].shape == (5,)  # nothing fits
