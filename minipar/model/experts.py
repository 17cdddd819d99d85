"""The experts of a mixture: one small MLP after the other, or all in one grouped matmul.

moe.py chooses the rows of each expert. `add_up` turns rows back into tokens. Proved by
tests/model/test_moe.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.model import casts


class Experts(nn.Module):
    """E SwiGLUs side by side: down(silu(gate(x)) · up(x)), each D -> F -> D.

    `gate_up_proj` [E, 2 F, D] holds gate above up; `down_proj` is [E, D, F].
    """

    def __init__(self, num_experts: int, width: int, expert_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * expert_size, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, expert_size))

    def forward(self, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        """Compute rows [R, D], sorted by expert, `counts` [E] per expert -> [R, D].

        Torch's grouped matmul computes all experts at once, and the host reads no value. If torch
        cannot group the tensors, the host reads the counts and computes one expert after the other.
        Without counts, rows are [E, C, D], C for each expert: one batched matmul.
        """
        if counts is None:
            return _swiglu(rows @ self.gate_up_proj.mT) @ self.down_proj.mT
        # Cast first, because autocast does not know the grouped matmul.
        rows, ups, downs = casts.as_multiplied(rows, self.gate_up_proj, self.down_proj)
        if not can_group(rows, ups, downs):
            # On meta there is no value to read: all experts have equally many rows.
            even = counts.is_meta and rows.tensor_split(len(counts))
            pieces = even or rows.split(counts.tolist())
            outs = [
                F.linear(_swiglu(F.linear(piece, up)), down)
                for piece, up, down in zip(pieces, ups, downs, strict=True)
            ]
            return torch.cat(outs)
        ends = counts.cumsum(0, dtype=torch.int32)
        if rows.is_cuda and not ends.is_cuda:
            ends = ends.pin_memory()  # else the host would wait until the GPU has the rows
        ends = ends.to(rows.device, non_blocking=True)
        hidden = _swiglu(torch._grouped_mm(rows, ups.mT, offs=ends))
        out = torch._grouped_mm(hidden, downs.mT, offs=ends)
        if out.requires_grad:  # its backward refuses an expanded gradient, such as a sum's
            out.register_hook(Tensor.contiguous)
        return out


def can_group(*tensors: Tensor) -> bool:
    """True if torch's grouped matmul takes these tensors: one dtype, rows of k times 16 bytes.

    On a GPU, the grouped matmul takes bfloat16 alone. Meta stands for a GPU.
    """
    on_cpu = tensors[0].device.type == "cpu"
    known = {torch.bfloat16, torch.float32, torch.float16} if on_cpu else {torch.bfloat16}
    dtypes = {tensor.dtype for tensor in tensors}
    is_even = not any(tensor.shape[-1] * tensor.itemsize % 16 for tensor in tensors)
    return len(dtypes) == 1 and dtypes <= known and is_even


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_up(rows: Tensor, tokens: Tensor, num_tokens: int, most: int) -> Tensor:
    """Add up the rows [M, D] of each token, `tokens` [M], at most `most` per token -> [N, D].

    The result is that of torch's `index_add`, but `index_add` would keep all rows for backward.
    """
    return _AddUp.apply(rows, tokens, num_tokens, most)


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, num_tokens: int, most: int) -> Tensor:
        ctx.save_for_backward(tokens)
        total = rows.new_zeros(num_tokens, rows.shape[1])
        if rows.is_cuda and most > 2:
            # On a GPU index_add adds in any order, and the order changes a sum of three: ranks of
            # tensor parallelism would get different sums of the same rows. index_put_ sorts first.
            return total.index_put_((tokens,), rows, accumulate=True)
        return total.index_add_(0, tokens, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.saved_tensors[0]], None, None, None
