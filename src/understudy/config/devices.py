"""Validates device names in a recipe, before any device is opened."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d*))?")
_VISIBLE = re.compile(r"\d+|(GPU|MIG)-[\w/.-]+")
"""One entry of CUDA_VISIBLE_DEVICES: an index, or the identifier of a GPU or of a part of one."""


def _known_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise PydanticCustomError(
            "device", "expected 'auto', 'cpu', 'cuda' or 'cuda:N', where N counts visible GPUs from 0"
        )
    return device


def _visible_devices(devices: str) -> str:
    if not all(_VISIBLE.fullmatch(name) for name in devices.split(",")):
        raise PydanticCustomError(
            "devices", "expected GPUs as CUDA_VISIBLE_DEVICES names them, for example '1' or '2,3'"
        )
    return devices


Device = Annotated[
    str,
    AfterValidator(_known_device),
    WithJsonSchema({"type": "string", "pattern": f"^({_DEVICE.pattern})$"}),
]
"""`auto`, `cpu`, `cuda` or `cuda:N`."""
VisibleDevices = Annotated[str, AfterValidator(_visible_devices)]
"""GPUs of one process, as its CUDA_VISIBLE_DEVICES."""


def asks_for_gpu(device: str) -> bool:
    """Whether the name requires a GPU; `auto` uses one if present and does not require it."""
    return device.startswith("cuda")
