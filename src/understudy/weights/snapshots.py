"""New weights for engine processes on this machine: one safetensors file in memory, read by all of them.

    trainer ──write v7.safetensors──> /dev/shm/understudy-engine-…/ ──mapped──> engine 0, engine 1, …

A file gets its name by a rename after its last byte, so nobody reads half of one. The newest stays: an engine that was
started again needs it. The folder is the trainer's (`owned_folder`); one that a killed trainer left is removed by its engines, or
by the next run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from understudy.errors import EngineError
from understudy.observability.owned_folder import OwnedFolder

_MEMORY = Path("/dev/shm")
_MARGIN = 64 << 20


class Snapshots:
    """A folder of our own for snapshots; `need_bytes` is what one of them takes."""

    def __init__(self, need_bytes: int, parent: Path | None = None) -> None:
        self._owned = OwnedFolder("understudy-engine-", parent or _memory_for(2 * need_bytes))
        self.folder = self._owned.path

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """The file's name; None where there were no tensors to write."""
        named = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
        if not named:
            return None
        name = f"v{version}.safetensors"
        temporary = self.folder / f".{name}"
        try:
            save_file(named, temporary)
            temporary.replace(self.folder / name)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise EngineError(
                f"weights of version {version} could not be written to {self.folder}: {error}"
            ) from error
        return name

    def read(self, name: str) -> list[tuple[str, Tensor]]:
        return list(load_file(self.folder / name).items())

    def forget_all_but(self, name: str) -> None:
        for path in self.folder.glob("v*.safetensors"):
            if path.name != name:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._owned.close()


def _memory_for(size: int) -> Path | None:
    """Shared memory where it has the room (containers often give it 64 MiB); otherwise the temporary folder."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size + _MARGIN:
        return _MEMORY
    return None
