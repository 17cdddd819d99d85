"""`minipar prove` names each mistake of a gallery, and lets what is right pass."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from minipar.tools.prove.job import WrongFile
from minipar.tools.prove.prove import prove
from tests.tools import gallery, mistakes, unusual
from tests.tools.mistakes import job, told

DP, TP = {"dp": 2}, {"tp": 2}


RIGHT = {
    "torch DDP": (job(gallery.torch_ddp), DP),
    "torch FSDP2": (job(gallery.torch_fsdp, build=gallery.seeded), DP),
    "torch tensor parallel": (job(gallery.torch_tensor, build=gallery.seeded), TP),
    "torch FSDP2 and tensor parallel": (job(gallery.torch_both, build=gallery.seeded),
        mistakes.BOTH),
    "all-reduces by hand": (job(gallery.by_hand), DP),
    "Megatron's layers by hand": (job(gallery.megatron), TP),
    "sequence parallel norm by hand": (job(gallery.sequence_parallel), TP),
    "tokens apart": (job(gallery.context_parallel, shares=gallery.tokens_apart), {"cp": 2}),
    "rows dealt like cards, by hand": (job(gallery.dealt, gather=gallery.undealt), TP),
    "our fsdp": (job(gallery.our_fsdp), DP),
    "our zero": (job(gallery.our_zero, optimizer=mistakes.adam), DP),
    "our zero, at its own rate": (job(partial(gallery.our_zero, lr=0.1),
        optimizer=partial(mistakes.adam, lr=lambda ranks: 0.1)), DP),
    "our tensor and ddp": (job(gallery.our_both, build=gallery.llama, loss=gallery.llama_loss),
        mistakes.BOTH),
} | unusual.RIGHT  # fmt: skip


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(ranks, name):
    case, sizes = RIGHT[name]
    verdict = prove(case, sizes, ranks)
    assert verdict.parting is None, str(verdict)
    assert verdict.trials == ["3 steps", "2 steps of 3 microbatches"]
    assert "NOT" not in str(verdict)
    has_norm = bool(case.clip) or name.startswith("our")
    assert any("norms were not compared" in note for note in verdict.notes) != has_norm
    is_cut = callable(case.shares)
    assert any("gives the ranks 50%, 50% of" in note for note in verdict.notes) == is_cut
    is_elsewhere = name == "gradients elsewhere by hand"
    assert any("are not in .grad" in note for note in verdict.notes) == is_elsewhere


@pytest.mark.slow
def test_microbatches_that_weigh_differently_are_the_files_own(ranks):
    verdict = prove(unusual.UNEVEN, DP, ranks)
    assert verdict.parting is None and len(verdict.trials) == 4, str(verdict)


# Who made it; where it parts, and why.
WRONG = {
    "weights never sent": told(gallery.unequal_weights, DP, "initial weights of embed",
        "never broadcast", ranks=[1]),
    "weights never sent, beside a mask": told(gallery.unequal_weights, DP,
        "initial weights of attend.self_attn", "never broadcast", ranks=[1],
        build=gallery.WithAttention),
    "fully_shard without a seed": told(gallery.torch_fsdp, DP, "initial weights of embed",
        "never broadcast", build=gallery.with_a_word_more),
    "T1 pieces drawn under one seed": told(gallery.one_seed, TP, "initial weights of up",
        "one seed"),
    "T3 a hook that averages weights": told(gallery.averages_weights, DP, "gradient of head",
        "not reduced"),
    "T4 the first piece on every rank": told(partial(gallery.megatron, column={"piece": 0}), TP,
        "initial weights of up", "pieces in another order"),
    "pieces swapped": told(gallery.swapped_pieces, TP, "initial weights of up",
        "pieces in another order"),
    "T15 tie lost": told(gallery.unties, DP, "gradient of embed", "unknown",
        build=partial(gallery.Net, tied=True)),
    "summed": told(gallery.summed_by_hand, DP, "gradient of head",
        "summed, not averaged"),
    "averaged twice": told(gallery.averages_twice, DP, "gradient of head",
        "divided once too often"),
    "T29 a rank without gradient": told(gallery.forgotten_rank, DP, "weights of norm",
        "not in the optimizer", ranks=[1]),
    "T5 increments under accumulation": told(gallery.sends_increments, DP, "gradient of head",
        "microbatches are reduced differently", no_sync=gallery.no_sync),
    "the last microbatch stays": told(gallery.sends_increments, DP, "gradient of head",
        "microbatches are reduced differently", no_sync=partial(gallery.no_sync, inverted=True)),
    "T18 a bucket that is overwritten": told(gallery.forgets_microbatches, DP, "gradient of head",
        "microbatches are reduced differently"),
    "a bucket that is never zeroed": told(gallery.keeps_its_bucket, DP, "gradient of head",
        "kept between steps", step=2),
    "T10 mean of means": told(gallery.torch_ddp, DP, "gradient of head", "mean of means",
        uneven=gallery.uneven),
    "batch norm of a share": told(gallery.torch_ddp, DP, "gradient of 3", "samples see each other",
        build=gallery.with_batch_norm),
    "T12 a norm under sequence parallelism": told(partial(gallery.sequence_parallel, reduces=False),
        TP, "gradient of norm", "missing all-reduce"),
    "Megatron's f left out": told(partial(gallery.megatron, column={"enter": gallery.untouched}),
        TP, "gradient of norm", "missing all-reduce"),
    "Megatron's f left out, and gradients that are zero at first": told(partial(gallery.megatron,
        column={"enter": gallery.untouched}), TP, "gradient of norm", "missing all-reduce", step=2,
        build=partial(gallery.zeroed, "weight")),
    "Megatron's g left out": told(partial(gallery.megatron, row={"leave": gallery.untouched}), TP,
        "output of down", "unfinished sum"),
    "Megatron's g left out of what has no bias": told(partial(gallery.megatron,
        row={"leave": gallery.untouched}), TP, "output of head", "unfinished sum",
        build=partial(gallery.zeroed, "bias")),
    "T14 a bias on every rank": told(partial(gallery.megatron, row={"early": True}), TP,
        "output of down", "bias on every rank"),
    "summed though whole": told(gallery.sums_what_is_whole, TP, "gradient of head",
        "counted on every rank"),
    "T9 a norm that counts twice": told(gallery.megatron, TP, "gradient norm",
        "another norm", clip=gallery.clip_counting_all),
    "an optimizer made too early": told(gallery.optimizer_too_early, TP, "weights of up",
        "not in the optimizer", optimizer=gallery.early_or_not),
    "an optimizer without memory": told(gallery.torch_ddp, DP, "weights of embed",
        "another update", step=2, optimizer=gallery.forgetful),
    "summed over one of two axes": told(gallery.both_wrong, mistakes.BOTH,
        "gradient of head", "summed, not averaged", ranks=[0, 1, 2, 3], build=gallery.seeded),
} | mistakes.WRONG | unusual.WRONG  # fmt: skip


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(ranks, name):
    case, sizes, expected = WRONG[name]
    verdict = prove(case, sizes, ranks)
    found = verdict.parting
    assert found is not None, "it passed"
    cause, why = found.cause
    told = found.stage, found.module, found.step + 1, found.ranks, cause
    assert told == expected, str(verdict)
    assert "NOT equal" in str(verdict) and cause in str(verdict)
    assert name != "a mean of own tokens" or "not weighed by its tokens" in why
    assert name != "alike over tp alone" or "drawn by build() on rank 2," in why
    assert name != "a branch for few rows" or "the rows of one rank alone" in why
    assert name != "batch norm of a share" or "2 (BatchNorm1d) or its caller" in why


class NoSync(DistributedDataParallel):
    def no_sync(self):
        raise RuntimeError("\nnot now")


UNKNOWN = {
    "pieces that make nothing": (job(unusual.fsdp_1), DP,
        r"initial weights .* pieces of \[\d+\] make no"),
    "pieces in an order of their own": (job(gallery.dealt), TP, "in an order of their own"),
    "a loss with others": (job(gallery.torch_ddp, loss=lambda model, batch: (0.0, {})), DP,
        "must return a tensor of one number, not tuple"),
    "an optimizer where functions are meant": (job(lambda model, mesh: (model,
        mistakes.adam(model))), DP, "'AdamW' object is not callable"),
    "an optimizer of zero alone": (job(gallery.our_zero), DP, "one device needs, too"),
    "a name that no rank has": (job(mistakes.renamed), DP, "head.weight .* no rank has this name"),
    "an axis": (job(gallery.plain.parallelize), {"gpus": 2},
        "do the ranks of axis 'gpus' have sam"),
    "an axis like tp": (job(unusual.alike), {"tpu": 2}, "do the ranks of axis 'tpu' have sam"),
    "an axis that is misspelt": (job(gallery.plain.parallelize, shares=["dp", "gpu"]), {"gpus": 2},
        "do the ranks of axis 'gpus' have sam"),
    "a trial": (job(lambda model, mesh: NoSync(model)), DP,
        r"RuntimeError: not now \(in the trial of 2 steps of 3 microbatches; equal by then: 3 ste"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_compared_is_no_verdict(ranks, name):
    """Mutant: told as a difference."""
    case, sizes, said = UNKNOWN[name]
    with pytest.raises(WrongFile, match=said):
        prove(case, sizes, ranks)


def rounded(gradient):
    return gallery.average(gradient.float()).double()


def test_what_float32_rounds_is_known_and_can_be_forgiven(ranks):
    case = mistakes.wrong(rounded)
    assert prove(case, DP, ranks).parting.cause[0] == "rounding"
    assert prove(case, DP, ranks, rtol=1e-5).parting is None
    twice = mistakes.wrong(lambda gradient: rounded(gradient) / 2)
    assert prove(twice, DP, ranks, rtol=1e-5).parting.cause[0] == "divided once too often"


def in_short_numbers(model, batch):
    """As many a model: a norm and a loss in float32, a layer in bfloat16, and recomputation."""
    x = checkpoint(model.embed, batch[0], use_reentrant=False).to(torch.bfloat16)
    x = checkpoint(lambda x: model.norm(x.float()).type_as(x), x, use_reentrant=False)
    logits = model.head(model.down(model.act(model.up(x.softmax(-1, torch.float32)))))
    chances = F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=torch.float32)
    return F.nll_loss(chances, batch[1].flatten())


def fsdp_in_bfloat16(model, mesh):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh.device_mesh()["dp"], mp_policy=policy)
    return model


def nine_rows(seed):
    return tuple(torch.cat([part, part[:1]]) for part in gallery.batch(seed))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("parallelize", [gallery.by_hand, fsdp_in_bfloat16])
def test_what_a_model_rounds_itself_is_float64(ranks, parallelize):
    """Mutant: casts of the model are done, and rounding is all that is seen. With three ranks one
    does see it: a half of a mean over 2^n numbers is rounded as the whole is."""
    changes = dict(build=gallery.seeded, batch=nine_rows)
    if parallelize is not fsdp_in_bfloat16:  # a loss may call its layers one by one
        changes["loss"] = in_short_numbers
    verdict = prove(job(parallelize, **changes), {"dp": 3}, ranks)
    assert verdict.parting is None, str(verdict)


LLAMA = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

PLAN = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel)
PLAN |= {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel}
PLAN |= {"self_attn.o_proj": RowwiseParallel, "mlp.down_proj": RowwiseParallel}


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    ))


def batch(seed):
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def loss(model, batch):
    return model(**batch).loss


def parallelize(model, mesh):
    grid = mesh.device_mesh()
    for layer in model.model.layers:
        parallelize_module(layer, grid["tp"], {name: style() for name, style in PLAN.items()})
        fully_shard(layer, mesh=grid["dp"])
    return fully_shard(model, mesh=grid["dp"])
"""


@pytest.mark.slow
def test_a_llama_of_transformers_under_fsdp2_and_dtensor(ranks, tmp_path):
    """Its norms and its loss are in float32; its embeddings are tied."""
    (tmp_path / "mine.py").write_text(LLAMA, encoding="utf-8")
    verdict = prove(str(tmp_path / "mine.py"), {"dp": 2, "tp": 2}, ranks)
    assert verdict.parting is None, str(verdict)
    assert len(verdict.trials) == 2
