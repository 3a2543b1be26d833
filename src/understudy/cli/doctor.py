"""Report what this machine offers a run: versions, devices, memory, disk, isolation."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

import psutil
from rich.console import Console

_PACKAGES = (
    "understudy",
    "torch",
    "transformers",
    "triton",
    "pydantic",
    "httpx",
    "uvicorn",
    "peft",
    "ray",
    "TransferQueue",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(options: argparse.Namespace) -> None:
    del options
    import torch

    console = Console()

    def line(name: str, value: object) -> None:
        console.print(f"{name:<16} {value}", highlight=False, markup=False, soft_wrap=True)

    line("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    for package in _PACKAGES:
        try:
            line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            line(package, "not installed")
    memory = psutil.virtual_memory()
    line("cores", f"{os.cpu_count()} ({torch.get_num_threads()} torch threads)")
    line("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    line("disk here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            line(f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        line("cuda", "none; runs use the CPU")
    line(
        "tool isolation",
        "bubblewrap"
        if shutil.which("bwrap")
        else 'no bubblewrap: model-written tools are refused unless isolation = "none"',
    )
