"""Context parallelism piece by piece: who holds what, the merge of blocks, precision, overlap.

That training equals one device is proved by tests/law/test_law.py.
"""

import time
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minipar.comm.collectives import all_gather
from minipar.comm.mesh import Mesh
from minipar.model.llama import dense_core, rope_tables
from minipar.model.masks import document_mask
from minipar.observe import timeline
from minipar.parallel import blockwise, context, ulysses
from minipar.parallel.blockwise import KERNELS, best_kernel
from minipar.train.data import Sequences
from tests.comm.same import launched_over
from tests.law import models
from tests.on_ranks import on_ranks
from tests.parallel.layers import on_paper, random
from tests.parallel.timed import fastest

ORDERS = list(context.ORDERS)


# ---------------------------------------------------------------------- who holds which tokens


@pytest.mark.parametrize("order", ORDERS)
def test_trap_21_targets_are_shifted_before_the_sequence_is_cut(order):
    """The target of a chunk's last token is another rank's token. Mutant: targets shifted within
    each shard, which lose it or take the wrong one."""
    text = torch.randperm(49)
    inputs, targets = Sequences(text, 24)[0]
    follower = dict(zip(text.tolist(), text.tolist()[1:], strict=False))
    counted = 0
    for rank in range(3):
        mine, wanted = context.shard_batch((inputs, targets), on_paper("cp", 3, rank), order)
        assert [follower[token] for token in mine.tolist()] == wanted.tolist()
        counted += len(wanted)
        assert wanted[-1] not in mine
    assert counted == 24


# ---------------------------------------------------------------------- blocks
ON_CPU = ["math", "fused"]


def _qkv(size, heads, kv_heads, tokens, dtype=torch.float64, width=8):
    """Queries, keys, values and a gradient of the output, of the whole sequence."""
    shapes = [(2, heads), (2, kv_heads), (2, kv_heads), (2, heads)]
    return [random(*s, tokens, width, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def _reference(q, k, v, d_out, mask=None):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = dense_core(q, k, v, mask)
    out.backward(d_out)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def _ranks_of(axis):
    return [on_paper("cp", axis.size, rank) for rank in range(axis.size)]


def _ring(exchange, order, kernel, heads, kv_heads, tokens, dtype, mask=None, autocast=False):
    """Output and gradients of the whole sequence, computed on all ranks; and what was sent."""
    axis = Mesh(cp=torch.distributed.get_world_size()).cp
    tensors = _qkv(axis.size, heads, kv_heads, tokens, dtype)
    q, k, v, d_out = (context.shard(x, axis, order, dim=2).contiguous() for x in tensors)
    rows = None if mask is None else context.shard(mask, axis, order, dim=2)
    for x in (q, k, v):
        x.requires_grad_()
    with timeline.record() as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = context.EXCHANGES[exchange].apply(q, k, v, rows, axis, order, KERNELS[kernel])
    with timeline.record() as backward:
        out.backward(d_out)
    where = torch.cat([context.shard(torch.arange(tokens), a, order) for a in _ranks_of(axis)])
    gathered = (all_gather(x.detach(), axis, 2) for x in (out, q.grad, k.grad, v.grad))
    whole = [x[:, :, where.argsort()] for x in gathered]
    assert all(x.dtype == dtype for x in whole)
    return whole, forward.bytes_by_axis(), backward.bytes_by_axis(), len(forward), len(backward)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("exchange", context.EXCHANGES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", ON_CPU)
def test_attention_and_its_gradients_equal_one_device(ranks, kernel, order, exchange):
    """Mutants: the scale left out; `dot` of one block instead of all; gradients of keys that do not
    come home; a block of one document multiplied with another's mask; a future that a mask shows
    left out; a joined block that sees the future."""
    documents = document_mask(torch.tensor([[0] * 11 + [1] * 13, [0] * 3 + [1] * 20 + [2]]))
    hidden = documents.clone()
    hidden[0, 0, 5] = False  # nan on one device; 0 here, and no gradient
    prefix = documents | (torch.arange(24) < torch.tensor([9, 17])[:, None, None, None])
    for mask in (None, documents, hidden, prefix):
        for heads, kv_heads in ((4, 4), (6, 2)):
            args = (heads, kv_heads, 24, torch.float64, mask)
            expected = _reference(*_qkv(3, heads, kv_heads, 24), mask)
            for found, *_ in ranks(3).run(_ring, exchange, order, kernel, *args):
                for ours, theirs in zip(found, expected, strict=True):
                    assert ours.isfinite().all()
                    if mask is not hidden:
                        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
                assert mask is not hidden or not found[0][0, :, 5].any()


# ---------------------------------------------------------------------- precision
def _errors(found, expected):
    scale = [x.abs().max() for x in expected]
    return [
        ((ours.double() - theirs).abs().max() / s).item()
        for ours, theirs, s in zip(found, expected, scale, strict=True)
    ]


@pytest.mark.parametrize("kernel, autocast", [("fused", False), ("math", False), ("math", True)])
def test_trap_20_errors_in_bf16_do_not_grow_with_the_ring(ranks, kernel, autocast):
    """The error is that of rounding the result once, on 2 ranks as on 4; what travels is as wide as
    the docstring says. Mutants: output, or gradients of keys, kept in bf16 between steps; autocast
    that rounds the products; heads repeated on the wire; gradients that go around once more."""
    tensors = _qkv(1, 4, 2, 64, torch.bfloat16)
    expected = _reference(*(x.double() for x in tensors))
    rounded = _errors([x.bfloat16() for x in expected], expected)
    for size in (2, 4):
        args = ("ring", "plain", kernel, 4, 2, 64, torch.bfloat16, None, autocast)
        one_way = (size - 1) * 2 * 2 * 2 * 64 * 8 // size  # numbers of two heads' keys and values
        for found, forward, backward, *calls in ranks(size).run(_ring, *args):
            assert (forward, backward) == ({"cp": one_way * 2}, {"cp": one_way * (2 + 4)})
            assert calls == [size - 1, 2 * (size - 1)]
            for ours, once in zip(_errors(found, expected), rounded, strict=True):
                assert ours <= 1.05 * once + 1e-6


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
def test_the_kernel_of_a_gpu_is_chosen_and_called_as_it_wants_to_be(heads, kv_heads):
    """On "meta", which stands for one. Mutants: float32 handed to it; a mask; an odd width."""
    q, k, v, d_out = (x.to("meta") for x in _qkv(1, heads, kv_heads, 24, torch.bfloat16))
    assert best_kernel(q, None) == "flash"
    assert best_kernel(q.float(), None) == best_kernel(q[..., :6], None) == "fused"
    assert best_kernel(q, torch.ones(2, 1, 24, 24).bool()) == "fused"
    assert best_kernel(torch.empty(2, 4, 24, 8, dtype=torch.bfloat16), None) == "fused"
    on_gpu = mock.Mock(dtype=q.dtype, shape=q.shape)
    on_gpu.device.type = "cuda"
    assert best_kernel(on_gpu, None) == "flash"
    for x in (q, k, v):
        x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out = context.GatherAttention.apply(q, k, v, None, Mesh().cp, "zigzag", KERNELS["flash"])
        out.backward(d_out)
    called = {str(op) for op in counter.get_flop_counts()["Global"]}
    assert called == {
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward",
    }
    assert out.dtype == q.dtype and [x.grad.shape for x in (q, k)] == [q.shape, k.shape]


# ---------------------------------------------------------------------- skipping
def _products(mask, order):
    axis = Mesh(cp=4).cp
    q, k, v, _ = (context.shard(x, axis, order, dim=2) for x in _qkv(4, 4, 2, 32))
    rows = None if mask is None else context.shard(mask, axis, order, dim=2)
    attend = mock.Mock(wraps=blockwise.attend)
    kernel = blockwise.Kernel(attend, blockwise.attend_backward)
    context.RingAttention.apply(q, k, v, rows, axis, order, kernel)
    return attend.call_count


def test_blocks_in_which_nobody_looks_are_skipped(ranks):
    """Mutants: all blocks multiplied; documents looked at one rank at a time."""
    assert ranks(4).run(_products, None, "zigzag") == [9] * 4
    assert ranks(4).run(_products, None, "plain") == [1, 2, 3, 4]
    halves = document_mask(torch.arange(32)[None] // 16).expand(2, -1, -1, -1)
    assert ranks(4).run(_products, halves, "plain") == [1, 2, 1, 2]
    assert ranks(4).run(_products, halves, "zigzag") == [1 + 4, 2 + 3, 3 + 2, 4 + 1]


# ---------------------------------------------------------------------- overlap
BLOCK, TRANSFER = 0.04, 0.06


def _timed(exchange):
    """(Seconds, hidden fraction) of forward and of backward, when products only take time."""
    axis = Mesh(cp=4).cp
    q, k, v, d_out = (
        context.shard(x, axis, dim=2).requires_grad_() for x in _qkv(4, 4, 4, 64, torch.float32)
    )

    def slowly(function, seconds):
        def call(*args):
            with timeline.span("compute", "block"):
                time.sleep(seconds)
                return function(*args)

        return call

    kernel = blockwise.Kernel(
        slowly(blockwise.attend, BLOCK), slowly(blockwise.attend_backward, 2 * BLOCK)
    )
    forward = partial(context.EXCHANGES[exchange].apply, q, k, v, None, axis, "zigzag", kernel)
    backward = partial(forward().backward, d_out, retain_graph=True)
    bandwidth = 2 * k.nbytes / TRANSFER
    return [fastest(step, axis, bandwidth) for step in (forward, backward)]


@pytest.mark.timed
@pytest.mark.slow
def test_the_ring_hides_behind_the_products(ranks):
    """Forward hides all of it, backward all but the last hop of gradients. Mutants: waiting before
    computing; gradients of keys that are waited for as soon as they are sent."""
    products = 9 * BLOCK
    for forward, backward in ranks(4, "link").run(_timed, "ring"):
        assert products <= forward[0] < products + 2 * TRANSFER
        assert forward[1] > 0.7
        assert 2 * products + TRANSFER <= backward[0] < 2 * products + 3.5 * TRANSFER
        assert backward[1] > 0.6
    for forward, backward in ranks(4, "link").run(_timed, "gather"):
        assert forward[0] >= products + 3 * TRANSFER and forward[1] < 0.1
        assert backward[0] >= 2 * products + 6 * TRANSFER and backward[1] < 0.1


# ---------------------------------------------------------------------- the model
def _positions(order):
    axis = Mesh(cp=4).cp
    model = models.llama(0)
    context.apply(model, axis, order=order)
    seen = []

    def note(module, args):
        seen.append(args[1])

    model.model.layers[0].self_attn.register_forward_pre_hook(note)
    tokens = torch.arange(24).expand(2, 24)
    model(context.shard(tokens, axis, order))
    given = context.shard(torch.arange(24) % 7, axis, order)
    model(context.shard(tokens, axis, order), given)
    model.model(context.shard(tokens, axis, order), positions=given)
    return [cos for cos, _ in seen]


@pytest.mark.parametrize("order", ORDERS)
def test_trap_19_rope_turns_by_the_position_in_the_whole_sequence(ranks, order):
    """Mutants: every shard starts at 0; zigzag shards numbered as if they were contiguous."""
    config = models.llama(0).config
    cos, _ = rope_tables(config, torch.arange(24), torch.float32)
    restarting, _ = rope_tables(config, torch.arange(24) % 7, torch.float32)
    for rank, (counted, given, by_name) in enumerate(ranks(4).run(_positions, order)):
        assert torch.equal(counted, context.shard(cos, on_paper("cp", 4, rank), order, dim=0))
        expected = context.shard(restarting, on_paper("cp", 4, rank), order, dim=0)
        assert torch.equal(given, expected) and torch.equal(by_name, expected)


def test_which_tokens_count_reaches_the_model_beside_positions():
    """Mutant: padding takes part in the balance of experts, because the hook forgets `valid`."""
    model, seen = models.llama(0), []
    context.ContextParallel(model, on_paper("cp", 2, 1)).order = "plain"
    model.model.register_forward_pre_hook(lambda _, args: seen.extend(args) or 1 / 0)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ZeroDivisionError):
        model(tokens, valid=tokens > 0)
    assert seen[1].tolist() == [4, 5, 6, 7] and torch.equal(seen[3], tokens > 0)


# ---------------------------------------------------------------------- refusals
ERRORS = [
    (
        lambda: context.shard(torch.zeros(2, 27), on_paper("cp", 4)),
        "8 chunks.*27 tokens; pad them to 32",
    ),
    (lambda: context.apply(torch.nn.Linear(2, 2), on_paper("cp", 4)), "Linear has no Attention"),
    (lambda: ulysses.apply(torch.nn.Linear(2, 2), on_paper("cp", 4)), "Linear has no Attention"),
]


@pytest.mark.parametrize("call, said", ERRORS)
def test_what_does_not_fit_is_refused_with_the_nearest_good_values(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    "seq_len, mask_shape, message",
    [
        (5, None, "into 4 chunks, which do not divide 10 tokens; pad them to 12"),
        (34, None, "a sequence of 68 tokens is longer than max_seq_len=64"),
        (4, (1, 1, 8, 8), r"it must be \[B, 1, 4, 8\]"),
    ],
)
@on_ranks(2)
def test_bad_inputs_are_refused_before_anything_is_sent(seq_len, mask_shape, message):
    for exchange in context.EXCHANGES:
        model = models.llama(0, max_seq_len=64)
        context.apply(model, Mesh(cp=2).cp, exchange=exchange)
        mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.bool)
        with timeline.record() as recorded, pytest.raises(ValueError, match=message):
            model(torch.zeros(1, seq_len, dtype=torch.int64), mask=mask)
        assert not recorded.spans


@on_ranks(2)
def test_over_nccl_a_ring_meets_before_its_first_message():
    """Which is one of a batch: all ranks of the group are to make its communicator together.
    Mutant: no meeting."""
    with launched_over("cpu:gloo,cuda:nccl") as called:
        context.apply(models.llama(0), Mesh(cp=2).cp)
    assert called == [("all_reduce",)]
