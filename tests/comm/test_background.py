"""Background work: in order, and its errors are heard of."""

import time

import pytest
import torch

from minipar.comm.background import Background


def test_work_is_done_in_order_and_an_error_reaches_who_waits_for_it():
    done, cpu = [], torch.device("cpu")
    slow = Background(lambda: time.sleep(0.1) or done.append("slow"), None, cpu, "first")
    failing = Background(lambda: 1 / 0, slow, cpu, "second")
    Background(lambda: done.append("last"), failing, cpu, "third").wait()
    assert done == ["slow", "last"]
    with pytest.raises(ZeroDivisionError):
        failing.wait()
