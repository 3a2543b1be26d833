"""Work that is queued on a device: events in it, and copies that nothing waits for.

On a CPU work is done when the call that makes it returns. So both devices have one path.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class Event(Protocol):
    """A point in the work queued on a device, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Blocks until the device has reached it."""


class HostEvent:
    """The event of a CPU: always reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def event_on(device: torch.device) -> Event:
    """After all work that this thread has queued so far."""
    if device.type != "cuda":
        return HostEvent()
    event = torch.cuda.Event()
    event.record()
    return event


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On CUDA complete when a later event is reached."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
