import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from teacher_rig import ReplicaForkServer, shared_fork_server, write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> ReplicaForkServer:
    return shared_fork_server(tmp_path_factory)


@pytest.fixture(scope="session")
def server(model: Path, fork_server: ReplicaForkServer) -> str:
    """The URL of a real replica process with small limits; it ends with the fork server."""
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
    return asyncio.run(fork_server.fork(model, limits).ready()).url
