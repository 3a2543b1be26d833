import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from teacher_rig import Nursery, shared_nursery, write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Nursery:
    return shared_nursery(tmp_path_factory)


@pytest.fixture(scope="session")
def server(model: Path, nursery: Nursery) -> str:
    """The URL of a real replica process with small limits; it ends with the nursery."""
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
    return asyncio.run(nursery.fork(model, limits).ready()).url
