"""The numbers of the job that goes through all notebooks."""

import pytest

from minipar.lab import our_job


def test_a_ring_over_whole_nodes_uses_all_cards_and_never_beats_nvlink():
    assert our_job.ring_speed(8, nodes=1) == our_job.NVLINK
    assert our_job.ring_speed(8, nodes=8) == our_job.INFINIBAND  # each rank alone in its node
    assert our_job.ring_speed() == 8 * our_job.INFINIBAND
    assert our_job.ring_speed(128, nodes=8) == our_job.NVLINK
    assert our_job.all_reduce_seconds(400e9) == pytest.approx(2 * 63 / 64)
