"""Cut one layer of a Llama, and put a border on each side of its halves.

Tensor parallelism in its smallest form. Attention and MLP are two pairs of matrices each: the first
cut by columns, the second by rows. What goes in is the same on all ranks, and meets pieces: I -> R.
What comes out is a summand: P -> I. Norms and the residual path know nothing of it.
Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3.
"""

import copy

import torch
from torch import nn

from minipar.comm.autograd import all_reduce, convert
from minipar.comm.collectives import wire_bytes
from minipar.lab.exercises import Case, CheckFailed, Sent, fails
from minipar.model.llama import Block, LlamaConfig, rope_tables

LEVEL, MINUTES = "medium", 35
GOOD = "1/n of every matrix, output and gradients of one device, two sums forward, two backward"
PRAISE = "This is tensor parallelism: the second piece of a trainer of your own."
SIZES = (4, 2)

CONFIG = LlamaConfig(32, 16, 24, num_layers=1, num_heads=8, num_kv_heads=4)
BATCH, TOKENS = 2, 5
FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def given(size, random):
    """The same for all ranks: a layer with all of its weights, and x [B, T, D]."""
    layer = Block(CONFIG).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    x = torch.randn(BATCH, TOKENS, CONFIG.hidden_size, generator=random, dtype=torch.float64)
    return [(copy.deepcopy(layer), x.clone()) for _ in range(size)]


def run(answer, axis, layer, x):
    """Output, gradients of x and of parameters by name, and bytes behind each matrix."""
    answer(layer, axis)
    rope = rope_tables(CONFIG, torch.arange(TOKENS), x.dtype)
    x = x.clone().requires_grad_()
    out = layer(x, rope)
    (out.sin() * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    params = dict(layer.named_parameters())
    held = {name: p.untyped_storage().nbytes() for name, p in params.items()}
    return out.detach(), x.grad, {name: p.grad for name, p in params.items()}, held


def _one_device(case: Case):
    return run(lambda layer, axis: None, None, copy.deepcopy(case.given[0][0]), case.given[0][1])


def _dim(name: str) -> int | None:
    """The dim of a weight [out, in] along which it should be cut."""
    module = name.split(".")[-2]
    return None if "norm" in module else 0 if module in FIRST else 1


def _mine(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    dim = _dim(name)
    return whole if dim is None else whole.chunk(size, dim)[rank]


def _of(case: Case, results: list) -> Case:
    return Case(case.size, case.given, results, case.sent)


def check_pieces(case: Case) -> None:
    whole = _one_device(case)[3]
    for rank, (_, _, _, held) in enumerate(case.results):
        if held.keys() != whole.keys():
            raise CheckFailed(f"rank {rank}: parameters should keep their names, got {[*held]}")
        for name, num_bytes in held.items():
            most = whole[name] // (1 if _dim(name) is None else case.size)
            if num_bytes > most:
                raise CheckFailed(
                    f"rank {rank}: {name} keeps {num_bytes} bytes of memory, and its piece has "
                    f"{most}"
                )


def check_result(case: Case) -> None:
    found = [out for out, *_ in case.results]
    _of(case, found).expect_close([_one_device(case)[0]] * case.size, "the output")


def check_gradients(case: Case) -> None:
    _, x, params, _ = _one_device(case)
    _of(case, [r[1] for r in case.results]).expect_close([x] * case.size, "the gradient of x")
    for name, whole in params.items():
        expected = [_mine(name, whole, rank, case.size) for rank in range(case.size)]
        found = [result[2][name] for result in case.results]
        _of(case, found).expect_close(expected, f"the gradient of {name}")


def check_traffic(case: Case) -> None:
    num_bytes = 8 * BATCH * TOKENS * CONFIG.hidden_size
    one = Sent("all_reduce", wire_bytes("all_reduce", num_bytes, case.size))
    for rank in range(case.size):
        case.expect_sent(rank, [one] * 4)


def solution(layer, axis):
    first = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # the others come second
    for half in (layer.self_attn, layer.mlp):
        for name, linear in half.named_children():
            dim = 0 if name in first else 1  # a weight is [out, in]: columns of a matrix are rows
            piece = linear.weight.detach().chunk(axis.size, dim)[axis.rank]
            linear.weight = nn.Parameter(piece.clone())  # a view would keep the whole
        half.register_forward_pre_hook(lambda _, args: (convert(args[0], axis), *args[1:]))
        half.register_forward_hook(lambda _, args, out: all_reduce(out, axis, to="I"))


def _cut(layer, axis, clone=True):
    for half in (layer.self_attn, layer.mlp):
        for name, linear in half.named_children():
            piece = linear.weight.detach().chunk(axis.size, 0 if name in FIRST else 1)[axis.rank]
            linear.weight = nn.Parameter(piece.clone() if clone else piece)
    return layer.self_attn, layer.mlp


def _enter(half, axis):
    half.register_forward_pre_hook(lambda _, args: (convert(args[0], axis), *args[1:]))


def _leave(half, axis, to="I"):
    half.register_forward_hook(lambda _, args, out: all_reduce(out, axis, to=to))


@fails(
    "result",
    "Cut, and no border: what leaves a half is a summand, and nobody sums.",
)
def wrong_sends_nothing(layer, axis):
    _cut(layer, axis)


@fails(
    "pieces",
    "Nothing was cut: give each linear.weight a piece of its own.",
)
def wrong_cuts_nothing(layer, axis):
    pass


@fails(
    "pieces",
    "A piece is a view, which keeps the whole matrix in memory: clone it.",
)
def wrong_keeps_views(layer, axis):
    for half in _cut(layer, axis, clone=False):
        _enter(half, axis)
        _leave(half, axis)


@fails(
    "gradients",
    "Nothing stands before the first matrices: convert what goes into each half.",
)
def wrong_as_it_comes(layer, axis):
    for half in _cut(layer, axis):
        _leave(half, axis)


@fails(
    "gradients",
    "The sum is of type R: all ranks use it in the same way, so it is I.",
)
def wrong_type_of_the_sum(layer, axis):
    for half in _cut(layer, axis):
        _enter(half, axis)
        _leave(half, axis, to="R")


@fails(
    "gradients",
    "The whole layer is converted: its residual path is, too, and counts n times.",
)
def wrong_converts_the_residual_path(layer, axis):
    _enter(layer, axis)
    for half in _cut(layer, axis):
        _leave(half, axis)


@fails(
    "traffic",
    "Converted once for each matrix: convert once, before each half.",
)
def wrong_converts_for_each_matrix(layer, axis):
    for half in _cut(layer, axis):
        for name, linear in half.named_children():
            if name in FIRST:
                _enter(linear, axis)
        _leave(half, axis)


@fails(
    "result",
    "Attention is summed, the MLP is not: both end with a matrix cut by rows.",
)
def wrong_forgets_the_mlp(layer, axis):
    attention, mlp = _cut(layer, axis)
    _enter(attention, axis)
    _leave(attention, axis)
    _enter(mlp, axis)
