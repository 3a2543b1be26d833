"""Work kept to a share of a GPU's multiprocessors, so that whoever else computes there always finds some free.

Training and scoring are long kernels that fill a GPU; decoding is many short ones, each of which then waits until a
multiprocessor is free, and while it waits the memory it would have read idles. On equal terms they take turns. With a share for
each, they run side by side. What a share costs is less than it takes away: on an H200 an update takes 1.4 s on all 132
multiprocessors, 1.9 on 80 and 2.2 on 64.

The driver calls it a green context; its streams are used like any other, with all tensors of the process. Limits that the
multi-process service sets for a whole process (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE) are something else and no substitute: under
them a teacher's scores came out wrong on the same GPU. So a share is tried before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from understudy.errors import EngineError

try:
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # a CPU build of torch comes without it
    driver = None

WHOLE = 1.0


class GpuShare:
    """`with share.inside():` what is queued on the device runs there, after what was queued before, and is done at the end."""

    def __init__(self, device: torch.device | str, share: float, key: str) -> None:
        """`key`: of the recipe, for messages."""
        self._device, self._key = torch.device(device), key
        self._stream: torch.cuda.Stream | None = None
        if share == WHOLE:
            return
        if self._device.type != "cuda":
            raise EngineError(f"{key} = {share} is a share of a GPU, and this runs on {device}; leave it out")
        self._stream = self._narrow_stream(share)
        with self.inside():
            found = _product(self._device)
        if not torch.equal(found, _product(self._device)):
            raise EngineError(
                f"{key} = {share}: a product on a share of the GPU differs from the same on all of it; leave {key} out"
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def _narrow_stream(self, share: float) -> torch.cuda.Stream:
        if driver is None:
            raise EngineError(
                f"{self._key} = {share} needs the package cuda-bindings (it comes with torch for CUDA 13): install it, or "
                f"leave {self._key} out"
            )
        torch.zeros(1, device=self._device)  # starts the driver, and gives the process its context
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        place = self._made(driver.cuDeviceGet(index))
        every = self._made(driver.cuDeviceGetDevResource(place, kind))
        # Rounded up by the driver to what it can split, 8 on most GPUs.
        count = max(1, round(every.sm.smCount * share))
        groups = self._made(driver.cuDevSmResourceSplitByCount(1, every, 0, count))[0]
        described = self._made(driver.cuDevResourceGenerateDesc(list(groups), 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._made(driver.cuGreenCtxCreate(described, place, flags))
        unblocked = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._made(driver.cuGreenCtxStreamCreate(context, unblocked, 0))
        return torch.cuda.ExternalStream(int(stream), device=self._device)

    def _made(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if int(error) != 0:
            raise EngineError(f"the driver gives no share of this GPU: {error.name}; leave {self._key} out")
        return values[0] if len(values) == 1 else tuple(values)


def _product(device: torch.device) -> torch.Tensor:
    """The same numbers each time, large enough for the kernels that training uses."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(2048, 2048, device=device, generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    return left @ right
