"""New weights for vLLM servers on the trainer's own GPU: CUDA handles opened once, then device copies.

The server opens the trained tensors by their CUDA handles and keeps them open. Handles are sent as text,
not as pickles. An optimizer step changes the tensors in place, so a publish is one small request and a copy
at memory speed. Servers on other GPUs decline and get a snapshot instead.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from understudy.errors import EngineError

Call = Callable[[str, list[str]], Awaitable[dict[str, Any]]]
"""(method, arguments) → the answer of a server's `/collective_rpc`."""


class GpuHandover:
    """Which tensors each server of one engine has mapped. Called on the engine's event loop."""

    def __init__(self) -> None:
        self._attached: dict[str, tuple[int, ...]] = {}
        """By replica: the addresses of the tensors it has open."""
        self._declined: set[str] = set()
        self.copy_seconds = 0.0
        """Duration of the last copy inside a server, without the request."""

    def forget(self, replica: str) -> None:
        """After a restart the replica has no tensors open."""
        self._attached.pop(replica, None)

    async def attach(self, replica: str, call: Call, tensors: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether the replica has these tensors open, all writes finished; False if it needs a snapshot."""
        if replica in self._declined or not tensors or any(not tensor.is_cuda for _, tensor in tensors):
            return False
        addresses = tuple(tensor.data_ptr() for _, tensor in tensors)
        device = tensors[0][1].device
        torch.cuda.current_stream(
            device
        ).synchronize()  # the optimizer's writes end before the server reads them
        if self._attached.get(replica) != addresses:
            self._attached.pop(replica, None)
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            listed = json.dumps([(name, shared_fields(tensor)) for name, tensor in tensors])
            if _results(await call("understudy_attach", [gpu, listed]))[0].get("attached") != len(tensors):
                self._declined.add(replica)
                return False
            self._attached[replica] = addresses
        return True

    async def copy(self, replica: str, call: Call, version: int) -> None:
        """The replica copies the open tensors into its model, as this version."""
        answers = _results(await call("understudy_copy", [str(version)]))
        if any(answer.get("version") != str(version) for answer in answers):
            raise EngineError(f"{replica} did not take over weights version {version}: {str(answers)[:300]}")
        self.copy_seconds = max(float(answer.get("seconds", 0.0)) for answer in answers)


def shared_fields(tensor: Tensor) -> dict[str, Any]:
    """The fields another process needs to open a CUDA tensor, as JSON."""
    _, arguments = reduce_tensor(tensor.detach())
    (_, size, stride, offset, _, dtype, _, handle, storage_size, storage_offset, _,
     counter, counter_offset, event, event_sync) = arguments  # fmt: skip
    return {
        "size": list(size),
        "stride": list(stride),
        "offset": offset,
        "dtype": str(dtype).removeprefix("torch."),
        "storage_handle": base64.b64encode(handle).decode(),
        "storage_size": storage_size,
        "storage_offset": storage_offset,
        "ref_counter_handle": base64.b64encode(counter).decode(),
        "ref_counter_offset": counter_offset,
        "event_handle": base64.b64encode(event).decode(),
        "event_sync": event_sync,
    }


def _results(reply: dict[str, Any]) -> list[dict[str, Any]]:
    results = reply.get("results")
    if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
        raise EngineError(f"a vLLM server answered /collective_rpc with {str(reply)[:300]}")
    return results
