import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from teacher_rig import await_ready, spawn_replica, write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real replica process with small limits."""
    folder = tmp_path_factory.mktemp("server")
    limits = [
        "--max-length",
        "64",
        "--max-k",
        "16",
        "--max-request-tokens",
        "5000",
        "--max-request-bytes",
        "100000",
    ]
    replica = spawn_replica(model, folder, "math", *limits)
    try:
        yield await_ready(replica, folder)
    finally:
        replica.end()
