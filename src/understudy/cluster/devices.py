"""The GPUs of this machine and their memory, without torch."""

from __future__ import annotations

import os
import re
import subprocess
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


def gpu_memory() -> list[int]:
    """Bytes of each GPU of this machine, by nvidia-smi; empty without it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in found.stdout.split() if line.isdigit()]
