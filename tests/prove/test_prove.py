"""`minipar prove` names each mistake of a gallery, and lets what is right pass."""

from dataclasses import replace
from functools import partial

import pytest

from minipar.prove.prove import prove
from tests.prove import gallery
from tests.prove.gallery import plain

DP, TP = {"dp": 2}, {"tp": 2}


def job(parallelize, **changes):
    return replace(plain, parallelize=parallelize, **changes)


RIGHT = {
    "torch DDP": (job(gallery.torch_ddp), DP),
    "torch FSDP2": (job(gallery.torch_fsdp, build=gallery.seeded), DP),
    "torch tensor parallel": (job(gallery.torch_tensor, build=gallery.seeded), TP),
    "torch FSDP2 and tensor parallel": (
        job(gallery.torch_both, build=gallery.seeded),
        {"dp": 2, "tp": 2},
    ),
    "all-reduces by hand": (job(gallery.reduced), DP),
    "Megatron's layers by hand": (job(gallery.megatron), TP),
    "sequence parallel norm by hand": (job(gallery.sequence_parallel), TP),
    "tokens apart": (job(gallery.context_parallel, shares=gallery.tokens_apart), {"cp": 2}),
    "rows dealt like cards, by hand": (job(gallery.dealt, gather=gallery.undealt), TP),
    "our ddp": (job(gallery.our_ddp), DP),
    "our ZeRO-2": (job(gallery.our_zero), DP),
    "our fsdp": (job(gallery.our_fsdp), DP),
    "our tensor and ddp": (
        job(gallery.our_both, build=gallery.llama, loss=gallery.llama_loss),
        {"dp": 2, "tp": 2},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(ranks, name):
    case, sizes = RIGHT[name]
    verdict = prove(case, sizes, ranks)
    assert verdict.parting is None, str(verdict)
    assert verdict.trials == ["3 steps", "2 microbatches accumulated"]
    assert "NOT" not in str(verdict)
    # Where a rank has pieces and nothing says how they are clipped, no norm is compared.
    no_norm = name == "torch tensor parallel" or ("hand" in name and sizes == TP)
    no_norm |= name == "torch FSDP2 and tensor parallel"
    assert any("norms were not compared" in note for note in verdict.notes) == no_norm


# Who made it; where it parts: stage, module, step, ranks; and why.
WRONG = {
    "weights never sent": (
        job(gallery.unequal_weights),
        DP,
        ("initial weights", "embed", 1, [1], "never broadcast"),
    ),
    "fully_shard without a seed": (
        job(gallery.torch_fsdp),
        DP,
        ("initial weights", "embed", 1, [0, 1], "never broadcast"),
    ),
    "T1 pieces drawn under one seed": (
        job(gallery.one_seed),
        TP,
        ("initial weights", "up", 1, [0, 1], "one seed"),
    ),
    "T3 a hook that averages weights": (
        job(gallery.averages_weights),
        DP,
        ("gradient", "head", 1, [0, 1], "not reduced"),
    ),
    "T4 the first piece on every rank": (
        job(partial(gallery.megatron, column={"piece": 0})),
        TP,
        ("initial weights", "up", 1, [0, 1], "first piece everywhere"),
    ),
    "pieces swapped": (
        job(gallery.swapped_pieces),
        TP,
        ("initial weights", "up", 1, [0, 1], "pieces in another order"),
    ),
    "T15 tie lost": (
        job(gallery.unties, build=partial(gallery.Net, tied=True)),
        DP,
        ("gradient", "embed", 1, [0, 1], "tie lost"),
    ),
    "summed": (
        job(partial(gallery.reduced, factor=1.0)),
        DP,
        ("gradient", "head", 1, [0, 1], "summed, not averaged"),
    ),
    "averaged twice": (
        job(gallery.averages_twice),
        DP,
        ("gradient", "head", 1, [0, 1], "divided once too often"),
    ),
    "one parameter forgotten": (
        job(partial(gallery.reduced, skip=("norm.bias",))),
        DP,
        ("gradient", "norm", 1, [0, 1], "not reduced"),
    ),
    "reduced to rank 0": (
        job(gallery.to_the_root),
        DP,
        ("gradient", "head", 1, [1], "not reduced"),
    ),
    "T29 a rank without gradient": (
        job(gallery.forgotten_rank),
        DP,
        ("gradient", "norm", 1, [1], "no gradient"),
    ),
    "T5 increments under accumulation": (
        job(gallery.sends_increments, no_sync=gallery.no_sync),
        DP,
        ("gradient", "head", 1, [0, 1], "accumulated gradients are not reduced"),
    ),
    "T18 a bucket that is overwritten": (
        job(gallery.forgets_microbatches),
        DP,
        ("gradient", "head", 1, [0, 1], "last microbatch only"),
    ),
    "a bucket that is never zeroed": (
        job(gallery.keeps_its_bucket),
        DP,
        ("gradient", "head", 2, [0, 1], "kept between steps"),
    ),
    "T10 mean of means": (
        job(gallery.torch_ddp, uneven=gallery.uneven),
        DP,
        ("gradient", "head", 1, [0, 1], "mean of means"),
    ),
    "batch norm of a share": (
        job(gallery.torch_ddp, build=gallery.with_batch_norm),
        DP,
        ("gradient", "3", 1, [0, 1], "mean of means"),
    ),
    "T12 a norm under sequence parallelism": (
        job(partial(gallery.sequence_parallel, reduces=False)),
        TP,
        ("gradient", "norm", 1, [0, 1], "missing all-reduce"),
    ),
    "Megatron's f left out": (
        job(partial(gallery.megatron, column={"enter": gallery.untouched})),
        TP,
        ("gradient", "norm", 1, [0, 1], "missing all-reduce"),
    ),
    "Megatron's g left out": (
        job(partial(gallery.megatron, row={"leave": gallery.untouched})),
        TP,
        ("output", "down", 1, [0, 1], "unfinished sum"),
    ),
    "T14 a bias on every rank": (
        job(partial(gallery.megatron, row={"early": True})),
        TP,
        ("output", "down", 1, [0, 1], "bias on every rank"),
    ),
    "T14 whole logits in a loss of pieces": (
        job(gallery.megatron, loss=gallery.loss_of_pieces),
        TP,
        ("loss", "", 1, [0, 1], "logits counted on every rank"),
    ),
    "summed though whole": (
        job(gallery.sums_what_is_whole),
        TP,
        ("gradient", "head", 1, [0, 1], "counted on every rank"),
    ),
    "T9 a norm that counts twice": (
        job(gallery.megatron, clip=gallery.clip_counting_all),
        TP,
        ("gradient norm", "", 1, [0, 1], "norm: replicated parameters counted"),
    ),
    "T9 a norm of own pieces": (
        job(gallery.megatron, clip=gallery.clip_of_own),
        TP,
        ("gradient norm", "", 1, [0, 1], "norm of own pieces"),
    ),
    "an optimizer made too early": (
        job(gallery.optimizer_too_early, optimizer=gallery.early_or_not),
        TP,
        ("weights", "up", 1, [0, 1], "not in the optimizer"),
    ),
    "an optimizer without memory": (
        job(gallery.torch_ddp, optimizer=gallery.forgetful),
        DP,
        ("weights", "embed", 2, [0, 1], "optimizer state"),
    ),
    "summed over one of two axes": (
        job(gallery.both_wrong, build=gallery.seeded),
        {"dp": 2, "tp": 2},
        ("gradient", "head", 1, [0, 1, 2, 3], "summed, not averaged"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(ranks, name):
    case, sizes, expected = WRONG[name]
    verdict = prove(case, sizes, ranks)
    found = verdict.parting
    assert found is not None, "it passed"
    told = found.stage, found.module, found.step, found.ranks, found.cause
    assert told == expected, str(verdict)
    assert "NOT equal" in str(verdict) and found.cause in str(verdict)


def test_what_float32_rounds_is_known_and_can_be_forgiven(ranks):
    case = job(gallery.torch_ddp, loss=gallery.loss_in_float32)
    assert prove(case, DP, ranks).parting.cause == "rounding"
    assert prove(case, DP, ranks, rtol=1e-5).parting is None
    twice = job(gallery.averages_twice, loss=gallery.loss_in_float32)
    assert prove(twice, DP, ranks, rtol=1e-5).parting.cause == "divided once too often"
