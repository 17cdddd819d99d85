"""Even work for uneven ranks: microbatches by speed, documents in even rows."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.comm.mesh import Mesh
from minipar.observe import timeline
from minipar.train.balance import Balancer, imbalance, pack, packed_batch, rank_loads, shares
from minipar.train.data import IGNORE

# ---------------------------------------------------------------------- microbatches by speed


def test_shares_follow_speed():
    assert shares([3, 1], 8) == [6, 2]
    assert shares([4, 1], 8) == [7, 1]  # 1.75 s; the proportional 6.4 and 1.6 round to 2 s
    assert shares([2.0, 2.0], 3) == [2, 1]  # a tie goes to the lower rank, on all ranks
    assert shares([1.0, 1e6], 4) == [1, 3]  # nobody is left without, or it is never measured again
    with pytest.raises(ValueError, match="2 microbatches are too few for 3 ranks"):
        shares([1, 1, 1], 2)
    assert imbalance([4, 4]) == imbalance([0, 0]) == 1.0 and imbalance([6, 2]) == 1.5


def _balance(seconds_of_rank: list[float]):
    mesh = Mesh(dp=len(seconds_of_rank))
    balancer = Balancer(mesh.dp, every=2)
    seen = []
    with timeline.record() as recorded:
        for _ in range(4):
            counts = balancer.shares(8)
            seen.append(counts)
            mine = counts[mesh.rank]
            balancer.update(mine, mine * seconds_of_rank[mesh.rank], torch.device("cpu"))
    sizes = [span.num_bytes for span in recorded if span.kind == "comm"]
    return seen, sizes, balancer.speeds


def test_all_ranks_agree_on_shares_from_what_each_measured(ranks):
    """Caught: shares from a rank's own numbers only; seconds per step taken for those per batch."""
    for seen, sizes, speeds in ranks(2).run(_balance, [0.1, 0.3]):
        assert seen == [[4, 4], [4, 4], [6, 2], [6, 2]]  # the measured speed stays the same then
        assert sizes == [8, 8] and speeds == pytest.approx([10, 10 / 3])


# ---------------------------------------------------------------------- documents into rows


@given(
    lengths=st.lists(st.integers(1, 16), max_size=40),
    num_ranks=st.integers(1, 5),
)
@settings(deadline=None, max_examples=100)
def test_each_document_lies_in_one_row_with_room_for_it(lengths, num_ranks):
    rows = pack(lengths, 16, multiple_of=num_ranks)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert len(rows) % num_ranks == 0 and rows
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert max(loads) <= 16
    # Graham's bound: no row can have less than the mean, nor less than the longest document.
    least = max([sum(lengths) / len(rows), *lengths], default=0)
    assert max(loads) <= least + max(lengths, default=0)
    assert sum(rank_loads(lengths, rows, num_ranks)) == sum(lengths)


def test_the_fullest_row_of_a_round_meets_the_emptiest_of_the_next():
    lengths = [10, 9, 5, 4]
    rows = pack(lengths, 10, multiple_of=2)
    assert rows == [[0], [1], [3], [2]]
    assert rank_loads(lengths, rows, 2) == [14, 14]


def test_pack_refuses_documents_that_do_not_fit():
    with pytest.raises(ValueError, match="document 1 has 9 tokens, and a row takes 1 to 8"):
        pack([8, 9], 8)
    with pytest.raises(ValueError, match="document 0 has 0 tokens"):
        pack([0], 8)
    assert pack([], 8, multiple_of=2) == [[], []]


def test_trap_21_a_packed_document_keeps_its_targets_positions_and_privacy():
    """Caught: packing tokens and then shifting, which has a document predict its neighbour."""
    documents = [torch.arange(10, 14), torch.arange(20, 23), torch.tensor([30, 31])]
    inputs, targets, positions, mask = packed_batch(documents, [[0, 1], [2]], seq_len=6)
    no = IGNORE
    assert inputs.tolist() == [[10, 11, 12, 20, 21, 0], [30, 0, 0, 0, 0, 0]]
    assert targets.tolist() == [[11, 12, 13, 21, 22, no], [31, no, no, no, no, no]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert mask.shape == (2, 1, 6, 6)
    allowed = mask[0, 0].int().tolist()
    assert allowed[2] == [1, 1, 1, 0, 0, 0] and allowed[4] == [0, 0, 0, 1, 1, 0]
    assert allowed[5] == [0, 0, 0, 0, 0, 1]
