"""The hardware's name in result file names."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch


def cpu_name() -> str:
    """aarch64-2core, or the processor's own name if the system reports it."""
    name = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", facts.read_text()) if facts.exists() else None
    name = found.group(1) if found else name
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{name}-{os.cpu_count()}core").strip("-").lower()


def gpu_name() -> str:
    """nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
