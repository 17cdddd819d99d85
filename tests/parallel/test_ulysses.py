"""Ulysses piece by piece: tokens to heads and back, repeated heads, what is sent, what is refused.

That training equals one device is proved by tests/law/test_law.py.
"""

import pytest
import torch

from minipar.comm.mesh import Mesh
from minipar.model.llama import dense_core
from minipar.model.masks import document_mask
from minipar.observe import timeline
from minipar.parallel import context, ulysses
from tests.law import models
from tests.parallel.layers import on_paper, random

# ---------------------------------------------------------------------- tokens <-> heads


def _attention(heads, kv_heads, mask):
    """Output and gradients of this rank's tokens."""
    axis = Mesh(cp=torch.distributed.get_world_size()).cp
    model = models.llama(0, num_heads=heads, num_kv_heads=kv_heads, head_dim=8)
    ulysses.apply(model, axis)
    core = model.model.layers[0].self_attn.core
    q, k, v, d_out = (context.shard(x, axis, "plain", dim=2) for x in _qkv(heads, kv_heads))
    for x in (q, k, v):
        x.requires_grad_()
    with timeline.record() as recorded:
        out = core(q, k, v, mask)
        out.backward(d_out)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)], recorded.spans


def _qkv(heads, kv_heads):
    counts = (heads, kv_heads, kv_heads, heads)
    return [random(2, count, 12, 8, seed=i) for i, count in enumerate(counts)]


@pytest.mark.parametrize(
    "size, heads, kv_heads",
    [
        (2, 4, 4),
        (2, 4, 2),
        (2, 4, 1),  # fewer key/value heads than ranks
        pytest.param(4, 8, 2, marks=pytest.mark.slow),
        pytest.param(4, 12, 6, marks=pytest.mark.slow),  # 6 on 4 ranks: 12 copies
        (3, 6, 2),  # 2 on 3 ranks: 6 copies
        (3, 12, 4),
        (3, 3, 1),
    ],
)
def test_trap_13_any_number_of_key_value_heads(ranks, size, heads, kv_heads):
    """Mutants: the heads of one rank served by those of another; gradients of copies not added;
    copies in the order 0 1 0 1 instead of 0 0 1 1."""
    copies = torch.tensor(kv_heads).lcm(torch.tensor(size)).item()
    head_bytes = 2 * 12 * 8 * 8  # of one head of all tokens, in float64
    for mask in (None, document_mask(torch.tensor([[0] * 5 + [1] * 7, [0] * 12]))):
        q, k, v, d_out = _qkv(heads, kv_heads)
        for x in (q, k, v):
            x.requires_grad_()
        out = dense_core(q, k, v, mask)
        out.backward(d_out)
        expected = [out.detach(), q.grad, k.grad, v.grad]
        for rank, (found, spans) in enumerate(ranks(size).run(_attention, heads, kv_heads, mask)):
            for ours, theirs in zip(found, expected, strict=True):
                theirs = theirs.chunk(size, dim=2)[rank]
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
            assert [span.name for span in spans] == ["all_to_all"] * 4
            one_way = (size - 1) * (2 * heads + 2 * copies) * head_bytes // size**2
            assert sum(span.num_bytes for span in spans) == 2 * one_way


# ---------------------------------------------------------------------- refusals
def test_what_does_not_fit_is_refused_with_the_nearest_good_values():
    """Before anything is sent: these axes have no ranks behind them that could."""
    with pytest.raises(ValueError, match="do not divide 27 tokens; pad them to 28"):
        ulysses.shard_batch((torch.zeros(2, 27),), on_paper("cp", 4, 1))
    model, tokens = models.llama(0, max_seq_len=6), torch.zeros(1, 4, dtype=torch.int64)
    ulysses.apply(model, on_paper("cp", 2))
    with pytest.raises(ValueError, match="8 tokens is longer than max_seq_len=6"):
        model(tokens)
