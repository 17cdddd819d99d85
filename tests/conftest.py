"""One standing pool of ranks per size, shared by all tests: a start per size, not per test."""

import os

import pytest

from minipar.comm.launch import Ranks

# What this machine's network, or a launcher around the tests, tells of itself holds neither for the
# ranks that tests start nor in the network namespaces that they make.
FOREIGN = "GLOO_", "NCCL_", "TORCH_DISTRIBUTED_", "TORCH_NCCL_", "TORCHELASTIC_", "MASTER_"
FOREIGN += "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_"
for name in list(os.environ):
    if name.startswith(FOREIGN) or name.lower().endswith("_proxy"):
        del os.environ[name]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """All of these two folders train, and so does what says so elsewhere."""
    for item in items:
        if item.path.parent.name in ("parity", "train"):
            item.add_marker(pytest.mark.trains)


@pytest.fixture(scope="session")
def ranks():
    """``ranks(4).run(fn, ...)`` runs fn on a standing group of four ranks."""
    pools: dict[tuple, Ranks] = {}

    def get(size: int, backend: str = "gloo") -> Ranks:
        key = size, backend
        if key not in pools or pools[key].closed:
            pools[key] = Ranks(size, backend=backend, grace=0.3)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()
