"""What one test leaves behind in its process does not move another test's numbers."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# More test processes than cores run at once: an OpenMP thread that spins for its peers takes the core from another test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
gc.disable()  # while modules and thousands of tests are collected, which stay: a seventh of the CPU time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or extension modules complain at the end that their objects leaked


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    """For all processes that a worker of a whole suite starts, commands included: one that imports torch for them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    from understudy.cluster.fork_server import MODULES, prepared

    # A child whose environment differs in these is started as a new Python.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's thread: a fork server has none
    here = Path(__file__).parent
    # Rewards and agent loops of tests; replica_fork_server.py.
    own = str(here / "e2e"), str(here / "contract/teacher")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH"))))
    with prepared({}, (*MODULES, "understudy.run.launch")):
        yield


@pytest.fixture(autouse=True)
def numbers_as_in_a_fresh_process() -> Iterator[None]:
    """A run inside the test's process sets threads and determinism for good. And torch switches oneDNN off, for the rest of the
    process and for all dtypes, when it cannot do a bfloat16 product on this CPU: float32 sums then end in other last digits."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    yield
    if torch is None:
        return
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if not torch.utils.deterministic.fill_uninitialized_memory:
        torch.utils.deterministic.fill_uninitialized_memory = True
    if not torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.enabled = True
