"""A trainer of your own: data, tensor and pipeline parallel.

Three pieces make a Llama on a mesh: `cut_layer` cuts matrices along tp, `run_stage` runs a stage
along pp, `Overlapped` averages gradients along dp. The order is that of the library: cut first,
then keep the layers of a stage, and make buckets of the parameters that are left. Nothing here is
imported from the library's strategies.
Source: Narayanan et al. 2021 (arXiv 2104.04473), section 3: three axes on one model.
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from minipar.comm.collectives import all_reduce, wire_bytes
from minipar.emulate import link
from minipar.lab.exercises import Case, CheckFailed, fails
from minipar.lab.own import piece
from minipar.model.llama import Llama, LlamaConfig, token_loss

LEVEL, MINUTES = "hard", 60
GOOD = "losses and gradients of one device, a share of the weights per rank, no byte too many"
PRAISE = "A trainer on three axes, made of pieces that you wrote, and equal to one device."
MESH = {"pp": 2, "dp": 2, "tp": 2}
SECONDS = 60

CONFIG = LlamaConfig(32, 16, 24, num_layers=4, num_heads=4, num_kv_heads=2)
MICROBATCHES, BATCH, TOKENS, STEPS = 4, 2, 5, 3
FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def given(size, random):
    """For each rank: pieces, the whole model, microbatches [B, T + 1] of its replica by step."""
    pieces = SimpleNamespace(**{name: piece(name) for name in ("ddp", "tensor", "pipeline")})
    model = Llama(CONFIG).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4, generator=random)
    shape = MESH["dp"], STEPS, MICROBATCHES, BATCH, TOKENS + 1
    rows = torch.randint(CONFIG.vocab_size, shape, generator=random)
    return [(pieces, copy.deepcopy(model), rows[_places(rank)[1]]) for rank in range(size)]


def _places(rank: int) -> tuple[int, int, int]:
    """Return the places of a rank along pp, dp and tp."""
    return rank // 4, rank // 2 % 2, rank % 2


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def run(answer, axes, pieces, model, rows):
    """Return the loss of each step, gradients of the first by name, and numbers held by name.

    Last, how many parameters of the buckets are no longer the model's. Nothing is trained where a
    rank holds too much, or has such buckets: that would only end in an error of another piece.
    """
    pp, dp, tp = axes
    bucketed: list[nn.Parameter] = []

    def ddp(model, *args, **options):
        bucketed.extend(model.parameters())
        return pieces.ddp(model, *args, **options)

    noted = SimpleNamespace(**vars(pieces) | {"ddp": ddp})
    trainer, losses, grads = answer(noted, model, pp, dp, tp, MICROBATCHES), [], {}
    held = {n: p.untyped_storage().nbytes() // 8 for n, p in model.named_parameters()}
    stale = len({*bucketed} - {*model.parameters()})
    misheld = _misheld(held, 4 * pp.rank + 2 * dp.rank + tp.rank)
    if _on_any_rank(stale > 0 or misheld != "", axes):
        return torch.zeros(STEPS), {}, held, stale
    optimizer = _adamw(model)
    for step in rows:
        optimizer.zero_grad()
        losses.append(float(trainer.step([*step])))
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return torch.tensor(losses, dtype=torch.float64), grads, held, stale


def _on_any_rank(here: bool, axes) -> bool:
    """Return whether it is so on any rank; what this sends does not count as the answer's."""
    counters, link.observers[:] = link.observers[:], []
    found = torch.tensor(float(here))
    for axis in axes:
        found = all_reduce(found, axis)
    link.observers[:] = counters
    return bool(found)


def one_device(model, replicas):
    """Return losses, and gradients of the first step, of one device on all microbatches."""
    model, losses, grads = copy.deepcopy(model), [], {}
    optimizer = _adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for rows in torch.cat([replica[step] for replica in replicas]):
            num_targets = len(replicas) * MICROBATCHES * BATCH * TOKENS
            part = token_loss(model(rows[:, :-1]), rows[:, 1:]) / num_targets
            part.backward()
            loss += part.item()
        losses.append(loss)
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return torch.tensor(losses, dtype=torch.float64), grads


def _expected(case: Case):
    return one_device(case.given[0][1], [case.given[0][2], case.given[2][2]])


def _piece_of(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return the part of a tensor that belongs to a rank; None where another stage has it."""
    place, _, tp = _places(rank)
    words = name.split(".")
    stage = int(words[2]) // 2 if words[1] == "layers" else int("embed" not in name)
    if stage != place:
        return None
    module = words[-2]
    if words[1] != "layers" or "norm" in module:
        return whole
    return whole.chunk(2, 0 if module in FIRST else 1)[tp]


def _parts(rank: int, tensors: dict) -> dict:
    parts = {name: _piece_of(name, whole, rank) for name, whole in tensors.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _misheld(held: dict[str, int], rank: int) -> str:
    """Say what a rank holds and should not, or should and does not; "" if all is well."""
    whole = dict(Llama(CONFIG).named_parameters())
    want = {name: part.numel() for name, part in _parts(rank, whole).items()}
    for name in sorted(held.keys() | want.keys()):
        if held.get(name, 0) > want.get(name, 0) or name not in held:
            return (
                f"rank {rank} (pp, dp, tp = {_places(rank)}) holds {held.get(name, 0)} numbers "
                f"of {name}, and should hold {want.get(name, 0)} "
                f"(in all {sum(held.values()):,}, and its share is {sum(want.values()):,})"
            )
    return ""


def check_share(case: Case) -> None:
    for rank, (_, _, held, _) in enumerate(case.results):
        if said := _misheld(held, rank):
            raise CheckFailed(said)


def check_buckets(case: Case) -> None:
    for rank, (*_, stale) in enumerate(case.results):
        if stale:
            raise CheckFailed(
                f"rank {rank}: {stale} parameters in the buckets are no longer the model's: their "
                "gradients never come. Cut along tp, let go of other stages, and make buckets last"
            )


def check_first_loss(case: Case) -> None:
    first = [losses[0] for losses, *_ in case.results]
    expected = [_expected(case)[0][0]] * case.size
    Case(case.size, case.given, first, case.sent).expect_close(expected, "loss of the first step")


def check_gradients(case: Case) -> None:
    nothing = torch.zeros(0)  # on ranks that have other layers
    for name, whole in _expected(case)[1].items():
        parts = [_piece_of(name, whole, rank) for rank in range(case.size)]
        expected = [nothing if part is None else part for part in parts]
        found = [grads.get(name, nothing) for _, grads, *_ in case.results]
        Case(case.size, case.given, found, case.sent).expect_close(expected, f"gradient of {name}")


def check_losses(case: Case) -> None:
    found = [losses for losses, *_ in case.results]
    expected = [_expected(case)[0]] * case.size
    Case(case.size, case.given, found, case.sent).expect_close(expected, "losses")


def check_traffic(case: Case) -> None:
    activations = 8 * BATCH * TOKENS * CONFIG.hidden_size
    for rank in range(case.size):
        mine = _parts(rank, dict(Llama(CONFIG).named_parameters()))
        tp = 2 * 4 * MICROBATCHES * wire_bytes("all_reduce", activations, 2)
        pp = MICROBATCHES * activations
        dp = wire_bytes("all_reduce", 8 * sum(part.numel() for part in mine.values()), 2)
        most, sent = STEPS * (tp + pp + dp), sum(one.num_bytes for one in case.sent[rank])
        if sent > most + 64 * STEPS:  # and some for the loss
            raise CheckFailed(
                f"rank {rank} sent {sent} bytes in {STEPS} steps; sums of activations, messages "
                f"and gradients need {most}"
            )


class solution:
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        self.run_stage = pieces.pipeline
        self.model, self.pp, self.dp = model, pp, dp
        self.is_last = pp.rank == pp.size - 1

        # 1. Along tp: cut the layers that stay. 2. Along pp: let go of all others.
        layers = model.model.layers
        for i in range(len(layers)):
            if i * pp.size // len(layers) == pp.rank:
                pieces.tensor(layers[i], tp)
            else:
                layers[i] = None
        if pp.rank > 0:
            model.model.embed_tokens = None
        if not self.is_last:
            model.model.norm = model.lm_head = None

        # 3. Along dp: buckets of the parameters that are left.
        self.buckets = pieces.ddp(model, dp, 4096, microbatches)

        # This rank's row of 1F1B.
        ahead = min(microbatches, pp.size - 1 - pp.rank)
        self.row = [f"{pp.rank}F{i}" for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                self.row.append(f"{pp.rank}F{ahead + i}")
            self.row.append(f"{pp.rank}B{i}")

    def step(self, microbatches):
        losses = self.run_stage(self.row, self.model, microbatches, self.pp)
        self.buckets.finish()
        like = next(self.model.parameters())
        loss = sum(losses) if self.is_last else like.new_zeros(())
        loss = all_reduce(torch.as_tensor(loss), self.pp)  # zeros, but for the last stage
        return all_reduce(loss, self.dp, "avg").item()


@fails(
    "share",
    "Each rank has the whole model and trains alone: cut it, and let the pieces talk.",
)
class wrong_trains_alone:
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        self.model = model

    def step(self, microbatches):
        rows = torch.cat(microbatches)
        loss = token_loss(self.model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        return loss.item()


@fails(
    "share",
    "Matrices are whole: cut the layers of the stage along tp, with your piece from 07.",
)
class wrong_cuts_no_matrix(solution):
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        pieces = SimpleNamespace(**vars(pieces) | {"tensor": lambda layer, axis: None})
        super().__init__(pieces, model, pp, dp, tp, microbatches)


@fails(
    "first_loss",
    "Only the last stage knows the loss: the others say 0. Share it along pp.",
)
class wrong_keeps_the_loss(solution):
    def step(self, microbatches):
        losses = self.run_stage(self.row, self.model, microbatches, self.pp)
        self.buckets.finish()
        loss = torch.as_tensor(sum(losses) if self.is_last else 0.0, dtype=torch.float64)
        return all_reduce(loss, self.dp, "avg").item()


@fails(
    "first_loss",
    "This is the loss of one replica: average it along dp.",
)
class wrong_says_the_loss_of_a_replica(solution):
    def step(self, microbatches):
        losses = self.run_stage(self.row, self.model, microbatches, self.pp)
        self.buckets.finish()
        loss = torch.as_tensor(sum(losses) if self.is_last else 0.0, dtype=torch.float64)
        return all_reduce(loss, self.pp).item()


@fails(
    "first_loss",
    "Losses of the replicas were added up: average them along dp.",
)
class wrong_adds_up_the_replicas(solution):
    def step(self, microbatches):
        return super().step(microbatches) * self.dp.size


@fails(
    "buckets",
    "The buckets know the parameters as they were: make them when all is cut.",
)
class wrong_makes_buckets_first(solution):
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        buckets = pieces.ddp(model, dp, 4096, microbatches)
        pieces = SimpleNamespace(**vars(pieces) | {"ddp": lambda *_: buckets})
        super().__init__(pieces, model, pp, dp, tp, microbatches)


@fails(
    "share",
    "Embedding and head are on every stage: the first keeps one, the last the other.",
)
class wrong_keeps_both_ends(solution):
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        ends = model.model.embed_tokens, model.model.norm, model.lm_head
        super().__init__(pieces, model, pp, dp, tp, microbatches)
        model.model.embed_tokens, model.model.norm, model.lm_head = ends


@fails(
    "gradients",
    "Each replica has gradients of its own: `finish` the buckets before the optimizer.",
)
class wrong_forgets_dp(solution):
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        nothing = lambda *_: SimpleNamespace(finish=lambda: None)  # noqa: E731
        pieces = SimpleNamespace(**vars(pieces) | {"ddp": nothing})
        super().__init__(pieces, model, pp, dp, tp, microbatches)


@fails(
    "gradients",
    "Buckets left after the first microbatch: say how many microbatches there are.",
)
class wrong_counts_one_microbatch(solution):
    def __init__(self, pieces, model, pp, dp, tp, microbatches):
        super().__init__(pieces, model, pp, dp, tp, microbatches)
        self.buckets.microbatches = 1
        self.buckets.start()


@fails(
    "traffic",
    "More is sent than needed: gradients are averaged once, by `Overlapped`.",
)
class wrong_averages_twice(solution):
    def step(self, microbatches):
        loss = super().step(microbatches)
        for p in self.model.parameters():
            p.grad = all_reduce(p.grad, self.dp, "avg")
        return loss
