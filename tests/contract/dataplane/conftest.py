from pathlib import Path

import pytest
from plane_rig import IMPLEMENTATIONS, Rig


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(IMPLEMENTATIONS[request.param], tmp_path / "plane")
