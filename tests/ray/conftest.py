"""A small Ray cluster of several simulated nodes on this machine, with a token, for one test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def _installed(name: str) -> bool:
    """This folder, too, can be imported as `ray`: as a namespace, which has no origin."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


if not (_installed("ray") and _installed("transfer_queue")):
    collect_ignore_glob = ["test_*.py", "*/test_*.py"]

TOKEN = "understudy-test-token-0123456789abcdef"
HERE = Path(__file__).parent
STORE = 80 * 2**20


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose head node has no CPUs unless the parameter gives it some, so that roles are placed on
    other nodes, which a test may remove."""
    ray = import_module("ray")
    if ray.is_initialized():
        pytest.skip(
            "other tests of this process hold a Ray: run tests/ray by itself, as `make test-ray` does"
        )
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "8",
        "RAY_health_check_initial_delay_ms": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    import_module("understudy.cluster.ray_cluster").use_token(TOKEN)
    head = {
        "num_cpus": getattr(request, "param", 0),
        "object_store_memory": STORE,
        "include_dashboard": False,
    }
    made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        if ray.is_initialized():
            ray.shutdown()
        made.shutdown()
