from collections.abc import Iterator
from pathlib import Path

import pytest
from plane_rig import IMPLEMENTATIONS, ON_THE_QUEUE, Rig, start_queue

PARAMETERS = [
    pytest.param(name, marks=pytest.mark.ray) if name in ON_THE_QUEUE else name
    for name in sorted(IMPLEMENTATIONS)
]


@pytest.fixture(params=PARAMETERS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    if request.param in ON_THE_QUEUE:
        request.getfixturevalue("queue")
    return Rig(
        IMPLEMENTATIONS[request.param], tmp_path / "plane", reloads=request.param != "transfer_queue_all"
    )


@pytest.fixture(scope="session")
def queue() -> Iterator[None]:
    """A small Ray cluster with a TransferQueue."""
    with start_queue():
        yield
