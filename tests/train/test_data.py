"""The data: every token once, on any number of ranks."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from minipar.train.data import IGNORE, Batches, Sequences, epoch_order

# --------------------------------------------------------------------------------------- samples


@pytest.mark.slow
@given(num_tokens=st.integers(2, 60), data=st.data())
def test_each_token_is_a_target_once_and_follows_its_input(num_tokens, data):
    seq_len = data.draw(st.integers(1, num_tokens - 1))
    sequences = Sequences(torch.arange(100, 100 + num_tokens), seq_len)
    seen = []
    for inputs, targets in (sequences[i] for i in range(len(sequences))):
        assert inputs.shape == targets.shape == (seq_len,)
        assert inputs.dtype == targets.dtype == torch.int64
        valid = targets != IGNORE
        assert valid.any() and targets[valid].equal(inputs[valid] + 1)
        assert (inputs[~valid] == 0).all()
        seen += targets[valid].tolist()
    assert seen == list(range(101, 100 + num_tokens))


def test_trap_21_targets_are_shifted_before_the_sequence_is_split():
    """A rank that holds one piece of a sequence has the target of its last token.

    Caught: the mutant that splits the tokens first and shifts each piece.
    """
    tokens = torch.arange(1, 18)
    inputs, targets = Sequences(tokens, seq_len=16)[0]
    pieces = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
    for (_, piece_targets), (next_inputs, _) in zip(pieces, pieces[1:], strict=False):
        assert piece_targets[-1] == next_inputs[0]
    assert torch.cat([t for _, t in pieces]).equal(tokens[1:])


# --------------------------------------------------------------------------------------- batches


def sequences_of(num_samples: int, seq_len: int = 3) -> Sequences:
    """Samples that can be told apart: sample i starts with input i * seq_len."""
    return Sequences(torch.arange(num_samples * seq_len + 1), seq_len)


def samples_in(rows) -> list[int]:
    """The samples in a batch (a list of microbatches); rows without a target are none."""
    found = []
    for inputs, targets in rows:
        real = (targets != IGNORE).any(dim=1)
        found += (inputs[real, 0] // inputs.shape[1]).tolist()
        assert (inputs[~real] == 0).all()
    return found


def epoch_on(num_ranks: int, state=None, **options) -> list[list[int]]:
    """One epoch on all ranks: the samples of each global batch, sorted."""
    options = dict(options)
    num_samples, batch_size = options.pop("num_samples"), options.pop("batch_size")
    per_rank = []
    for rank in range(num_ranks):
        batches = Batches(sequences_of(num_samples), batch_size, rank, num_ranks, **options)
        if state:
            batches.load_state_dict(state)
        per_rank.append(list(batches))
    assert len({len(steps) for steps in per_rank}) == 1, "ranks take different numbers of steps"
    shapes = {t.shape for steps in per_rank for rows in steps for pair in rows for t in pair}
    assert len(shapes) == 1, "tensors of different shapes"
    num_microbatches = {len(rows) for steps in per_rank for rows in steps}
    assert num_microbatches == {options.get("microbatches", 1)}
    steps = zip(*per_rank, strict=True)
    return [sorted(sum((samples_in(rows) for rows in step), [])) for step in steps]


layouts = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 40),
        "batch_size": st.integers(1, 24),
        "microbatches": st.integers(1, 3),
        "seed": st.integers(0, 3),
    }
)


@given(layout=layouts, num_ranks=st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_each_sample_once_per_epoch_on_any_number_of_ranks(layout, num_ranks):
    """Caught: dropping or repeating at the uneven end; a rank that stops early; ragged shapes."""
    steps = epoch_on(num_ranks, **layout)
    assert Counter(sum(steps, [])) == Counter(range(layout["num_samples"]))
    assert steps == epoch_on(1, **{**layout, "microbatches": 1})  # the same global batches
    assert len(steps) == len(Batches(sequences_of(layout["num_samples"]), layout["batch_size"]))


@pytest.mark.slow
@given(layout=layouts, ranks=st.tuples(*[st.integers(1, 8)] * 2), data=st.data())
@settings(deadline=None, max_examples=60)
def test_resume_anywhere_on_any_number_of_ranks(layout, ranks, data):
    """Caught: a place counted per rank or in steps; a state saved one step late or early."""
    options = dict(layout)
    sequences, batch_size = sequences_of(options.pop("num_samples")), options.pop("batch_size")
    batches = Batches(sequences, batch_size, ranks[0] - 1, ranks[0], **options)
    done = data.draw(st.integers(0, 2 * len(batches)))
    stream = batches.forever()
    for _ in range(done):
        next(stream)
    state = json.loads(json.dumps(batches.state_dict()))  # it is plain data

    serial = Batches(sequences, batch_size, **options).forever()
    expected = [sorted(samples_in(next(serial))) for _ in range(done + 2 * len(batches))][done:]
    resumed = [Batches(sequences, batch_size, r, ranks[1], **options) for r in range(ranks[1])]
    for one in resumed:
        one.load_state_dict(state)
    streams = [one.forever() for one in resumed]
    for wanted in expected:
        assert sorted(sum((samples_in(next(s)) for s in streams), [])) == wanted


def test_trap_23_an_uneven_last_batch_neither_hangs_nor_biases_the_loss():
    """Seven samples on three ranks, validation: as many steps everywhere, the serial loss exactly.

    Caught: padding with repeated samples (the loss differs), dropping (likewise), and a rank
    without samples in the last batch that takes a step less (the others would wait for ever).
    """
    torch.manual_seed(0)
    table = torch.randn(32, 32, dtype=torch.float64)  # logits of the next token, a bigram model
    sequences = Sequences(torch.randint(32, (7 * 5 - 2,)), seq_len=5)  # the last one is padded too
    assert len(sequences) == 7

    def total(size: int, rank: int) -> list[tuple[float, int]]:
        steps = []
        for rows in Batches(sequences, 6, rank, size, microbatches=2):
            loss = [cross_entropy(table[i].mT, t, reduction="sum") for i, t in rows]
            num_valid = sum(int((t != IGNORE).sum()) for _, t in rows)
            steps.append((float(sum(loss)), num_valid))
        return steps

    def mean(per_rank: list[list[tuple[float, int]]]) -> float:
        losses, counts = zip(*sum(per_rank, []), strict=True)
        return sum(losses) / sum(counts)

    tokens = sequences.tokens
    truth = float(cross_entropy(table[tokens[:-1]], tokens[1:]))
    per_rank = [total(3, rank) for rank in range(3)]
    assert [len(steps) for steps in per_rank] == [2, 2, 2]
    assert per_rank[2][1] == (0.0, 0)  # the last batch has one sample: this rank has no part in it
    assert mean(per_rank) == pytest.approx(truth, rel=1e-12)


def test_trap_23_changed_run_is_refused_unless_it_continues_exactly():
    sequences = sequences_of(20)
    batches = Batches(sequences, 6, seed=1)
    next(iter(batches))
    state = batches.state_dict()
    assert state["epoch"] == 0 and state["position"] == 6

    rest = Batches(sequences, 4, seed=1, microbatches=2)  # another batch_size is exact
    rest.load_state_dict(state)
    left = sum((samples_in(rows) for rows in rest), [])
    assert sorted(left) == sorted(epoch_order(20, 1, 0)[6:].tolist())

    other_text = Sequences(sequences.tokens.clone(), 3)
    other_text.tokens[7] += 1
    for other, message in [
        (Batches(sequences, 6, seed=2), "another seed: saved with 1, now 2"),
        (Batches(Sequences(sequences.tokens, 4), 6, seed=1), "another seq_len: .* 3, now 4"),
        (Batches(other_text, 6, seed=1), "another text"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert (other.epoch, other.position) == (0, 0)


def test_epochs_are_different_permutations_and_seeds_do_not_overlap():
    orders = [tuple(epoch_order(50, s, e).tolist()) for s in range(4) for e in range(4)]
    assert len(set(orders)) == 16  # the mutant `seed + epoch` has 7
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert epoch_order(50, 3, 2).tolist() == list(orders[14])
