"""Autocast without values, as a simulated step sees it."""

import torch
from torch import nn

from minipar.model import casts


def test_on_meta_products_are_cast_inside_of_the_body_alone():
    """Mutants: a cast that never ends; of sums, too; a weight that is cast at each product."""
    with torch.device("meta"):
        linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    with casts.autocast("meta", torch.bfloat16) as outer:
        with casts.autocast("meta", torch.float16):
            assert linear(x).dtype == casts.product_dtype("meta") == torch.float16
        assert linear(x).dtype == casts.product_dtype("meta") == torch.bfloat16
        assert (x + x).dtype == torch.float32
        with casts.off("meta"):
            assert linear(x).dtype == torch.float32
        cast = outer.weights[linear.weight]
        linear(x)
        assert outer.weights[linear.weight] is cast
        with casts.same_again() as again:
            assert again.dtype == torch.bfloat16
    assert linear(x).dtype == torch.float32 and casts.product_dtype("meta") is None
