"""The GPUs of this machine, counted without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """The CUDA_VISIBLE_DEVICES entry of each GPU this process may use, in CUDA's order.

    CUDA stops reading CUDA_VISIBLE_DEVICES at the first -1, and so does this function.
    """
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        found = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return [str(index) for index in range(len(found))]
    names = [name.strip() for name in named.split(",") if name.strip()]
    return names[: names.index("-1")] if "-1" in names else names
