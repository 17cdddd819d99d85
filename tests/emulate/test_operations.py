"""A norm is one operation each way, as on a GPU; what operations cost."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minipar.emulate.operations import fused_norms, tensors, work_of

WIDTH = 64


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op._opname)
        return op(*args, **(kwargs or {}))


def given(dtype, of_weight=None, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, 32, WIDTH, generator=generator).to(device, dtype) for _ in range(2))
    weight = torch.randn(WIDTH, generator=generator).to(device, of_weight or dtype)
    return x.requires_grad_(), weight.requires_grad_(), grad


def norm(x, weight, grad):
    out = F.rms_norm(x, (WIDTH,), weight, 1e-5)
    return out, *torch.autograd.grad(out, (x, weight), grad.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_fused_norm_computes_the_same(dtype):
    expected = norm(*given(dtype))
    with fused_norms():
        found = norm(*given(dtype))
    for ours, usual in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, usual)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_one_operation_each_way_that_keeps_its_input(device):
    """Mutant: float32 of the input is kept beside its 16 bits."""
    x, weight, grad = given(torch.bfloat16, device=device)
    kept = []
    with fused_norms(), Names() as names:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = F.rms_norm(x, (WIDTH,), weight, 1e-5)
        torch.autograd.grad(out, (x, weight), grad)
    assert [n for n in names.seen if n != "detach"] == [
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
    ]
    wide = [t for t in kept if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in wide] == [x.data_ptr()] and wide[0].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_with_a_weight_of_another_type_it_is_spelled_out_as_on_a_gpu():
    with fused_norms(), Names() as names:
        norm(*given(torch.bfloat16, torch.float32))
    assert "_fused_rms_norm" not in names.seen and "rsqrt" in names.seen


def test_where_a_product_is_put_is_none_of_its_factors():
    """Mutant: the last two tensors are the factors, and `out=` is the last."""
    a, b, c = torch.ones(4, 3), torch.ones(3, 2), torch.ones(4, 2)
    aten = torch.ops.aten
    for op, given in ((aten.mm.default, [a, b]), (aten.mm.out, [a, b, c])):
        work = work_of(op, given, [c], (a, b))
        assert work.shape == (1, 4, 2, 3)
    work = work_of(aten.addmm.out, [c, a, b, c], [c], (c, a, b))
    assert work.shape == (1, 4, 2, 3)


# ---------------------------------------------------------------------- bytes
class Works(TorchDispatchMode):
    """What operations of the body cost, by their names."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        given = tensors((args, kwargs))
        if work := work_of(op, given, tensors(result), args):
            self.seen[op.name().removeprefix("aten::")] = work.num_bytes
        return result


def test_only_what_is_read_and_written_counts():
    """Mutants: what is overwritten is read, too; so is `out=`; all of a table, for some rows of it;
    all probabilities, for those of the targets."""
    x, y, few = torch.ones(8, 4), torch.ones(8, 4), torch.tensor([1, 2])
    out, size = torch.empty(8, 4), 8 * 4 * 4
    column, turned = torch.zeros(8, 1, dtype=torch.int64), x.T
    with Works() as works:
        y.copy_(x)
        y.zero_()
        y.fill_(1.0)
        y.normal_()
        y.add_(x)
        torch.add(x, y, out=out)
        torch._foreach_copy_([y], [x])
        F.embedding(few, x)
        x[few]
        x.index_select(0, few)
        x.gather(1, column)
        torch.mm(x, turned, out=torch.empty(8, 8))
    rows, indices = 2 * 2 * 4 * 4, 2 * 8
    assert works.seen.pop("mm.out") == 2 * size + 8 * 8 * 4
    assert works.seen.pop("gather") == 2 * 8 * 4 + 8 * 8
    assert works.seen == {
        **{"copy_": 2 * size, "zero_": size, "fill_.Scalar": size, "normal_": size},
        **{"add_.Tensor": 3 * size, "add.out": 3 * size, "_foreach_copy_": 2 * size},
        **{"embedding": rows + indices, "index.Tensor": rows + indices},
        "index_select": rows + indices,
    }


def test_a_loss_reads_the_probabilities_of_its_targets():
    """As above; its gradient is written whole."""
    logits, targets = torch.randn(64, 1000, requires_grad=True), torch.zeros(64, dtype=torch.int64)
    with Works() as works:
        F.cross_entropy(logits, targets).backward()
    size = 64 * 1000 * 4
    assert works.seen["nll_loss_forward"] < 2000
    assert size <= works.seen["nll_loss_backward"] < size + 2000
    assert works.seen["_log_softmax"] == 2 * size
