"""One standing pool of ranks per size, shared by all tests: a start per size, not per test."""

import gc
import os
import signal
import time

import pytest
import torch
from hypothesis import settings

from minipar.emulate import strict
from minipar.ranks import backends, launch, processes
from minipar.ranks.launch import Ranks
from tests.patience import Looks, busy

launch.GRACE = 0.3  # seconds: tests of failures are many

# What this machine's network, or a launcher around the tests, tells of itself holds neither for the
# ranks that tests start nor in the network namespaces that they make.
FOREIGN = "GLOO_", "NCCL_", "TORCH_DISTRIBUTED_", "TORCH_NCCL_", "TORCHELASTIC_", "MASTER_"
FOREIGN += "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_"
for name in list(os.environ):
    if name.startswith(FOREIGN) or name.lower().endswith("_proxy"):
        del os.environ[name]

# Tests know the numbers of a processor, to the last bit, and GPUs have a check of their own: `make
# gpu-check`. With MINIPAR_GPU=1 tests see them, too, and those that need one run.
if "MINIPAR_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# What a shell runs in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


RERUNS, LOOKS = 3, pytest.StashKey[Looks]()

# Inputs that are drawn are the same each time, but in `make test-all`, which looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """All of these folders train, and so does what says so elsewhere.

    Of a test that is mostly slow, the first case is not, so that `make test-fast` knows of it.

    What is timed is looked at up to four times before it counts as failed: a machine that is busy
    with something else makes it late once, a mistake each time.
    """
    in_a_hurry = set()
    for item in items:
        if item.get_closest_marker("mostly_slow") and not item.get_closest_marker("slow"):
            if item.function in in_a_hurry:
                item.add_marker(pytest.mark.slow)
            in_a_hurry.add(item.function)
        if item.path.parent.name in ("law", "parallel", "tools", "train"):
            item.add_marker(pytest.mark.trains)
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, reruns_delay=2))


THREADS = torch.get_num_threads()


def pytest_collection():
    """A process in which several threads have computed can fork no other that does: see
    side_by_side.py."""
    torch.set_num_threads(1)


def pytest_collection_finish():
    """Collectors shall not go through all that was imported, and all tests, again and again."""
    torch.set_num_threads(THREADS)
    gc.freeze()


# All pools are forked from one server, which imports before the fork what most ranks would import
# after it: torch's own parallelism, which the gallery uses, takes long.
processes.PRELOAD += "minipar.train.trainer", "minipar.parallel.compose", "tests.law.harness"
processes.PRELOAD += "pytest", "tests.tools.gallery"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """The time limit of a test is that of a quiet machine."""
    mark = item.get_closest_marker("timeout")
    limit = mark.args[0] if mark else item.config.getoption("timeout")
    limit = limit or float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(limit * busy()), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A timed test that fails, and had the cores for itself in none of its looks, is skipped."""
    if not item.get_closest_marker("timed") or "MINIPAR_TESTS_TIMED" in os.environ:
        return (yield)
    looks = item.stash.setdefault(LOOKS, Looks())
    try:
        with looks.one():
            return (yield)
    except Exception:
        if len(looks.shares) <= RERUNS or not looks.say_nothing:
            raise
        shares = ", ".join(f"{share:.1%}" for share in looks.shares)
        pytest.skip(f"other virtual machines had {shares} of the cores in its {RERUNS + 1} looks")


STRICT = "MINIPAR_TESTS_STRICT"  # if it is set, `ranks` that talk over gloo find races instead


class Strict(Ranks):
    """Ranks that find races in each call."""

    def run_each(self, fn, args_of, **kwargs):
        def watched(*args, **kwargs):
            with strict.watching():
                return fn(*args, **kwargs)

        return super().run_each(watched, args_of, **kwargs)


class Pools:
    """Standing groups of ranks, by size and backend, until nobody has asked for one for a while.

    Each of its process groups has a thread that wakes up a hundred times a second.
    """

    IDLE = 20.0  # seconds; to start one again takes about one

    def __init__(self) -> None:
        self.pools: dict[tuple, Ranks] = {}
        self.asked: dict[tuple, float] = {}

    def __call__(self, size: int, backend: str = "gloo") -> Ranks:
        if backend == "gloo" and "MINIPAR_GPU" in os.environ:
            backend = backends.pick_backend(size)
        key = size, backend
        if key not in self.pools or self.pools[key].closed:
            if backend == "gloo" and STRICT in os.environ:
                self.pools[key] = Strict(size, backend="link")
            else:
                self.pools[key] = Ranks(size, backend=backend)
        self.asked[key] = time.monotonic()
        return self.pools[key]

    def close(self, idle: float = 0.0) -> None:
        """Those for which nobody has asked for so many seconds."""
        for key in [key for key in self.pools if time.monotonic() - self.asked[key] >= idle]:
            self.pools.pop(key).close()


@pytest.fixture(scope="session")
def standing():
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(standing):
    """``ranks(4).run(fn, ...)`` runs fn on a standing group of four ranks."""
    standing.close(Pools.IDLE)
    return standing
