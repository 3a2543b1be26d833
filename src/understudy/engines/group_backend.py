"""Which library carries a broadcast of weights: NCCL between GPUs of their own, gloo through host memory otherwise.

    trainer on GPU a, engines on GPUs b, c, …, all different     nccl
    nobody on a GPU                                              gloo
    some on GPUs, or two on the same one                         gloo, and a note that says because of whom

A choice over what every member says of itself; nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist


class GroupBackend(StrEnum):
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group, as it describes itself."""

    name: str
    gpu: str | None = None
    """The id of the GPU its weights are on, the same for whoever sees that GPU; None: in host memory, or it has no NCCL."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    backend: GroupBackend
    note: str | None = None
    """Why it is not the faster one, where somebody might have expected that."""


def choose_backend(members: Sequence[Member]) -> BackendChoice:
    on_gpus = [member for member in members if member.gpu is not None]
    if not on_gpus:
        return BackendChoice(GroupBackend.GLOO)
    without = [member.name for member in members if member.gpu is None]
    if without:
        return BackendChoice(
            GroupBackend.GLOO,
            f"{', '.join(without)} of {len(members)} members have no GPU that NCCL can use, so weights travel through host memory",
        )
    owners: dict[str, str] = {}
    for member in on_gpus:
        assert member.gpu is not None
        if member.gpu in owners:
            return BackendChoice(
                GroupBackend.GLOO,
                f"{owners[member.gpu]} and {member.name} share GPU {member.gpu}, and NCCL wants one for each member, so weights "
                "travel through host memory",
            )
        owners[member.gpu] = member.name
    return BackendChoice(GroupBackend.NCCL)


def gpu_id(device: torch.device | str) -> str | None:
    """What to call the GPU that a process's weights are on; None where there is none, or NCCL is missing."""
    found = torch.device(device)
    if found.type != "cuda" or not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(found).uuid)
