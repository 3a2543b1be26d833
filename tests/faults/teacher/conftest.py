from pathlib import Path

import pytest
from teacher_rig import ReplicaForkServer, shared_fork_server, write_model


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> ReplicaForkServer:
    return shared_fork_server(tmp_path_factory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("faults") / "model")
