"""Snapshots of weights for engine processes on this machine: safetensors files in shared memory.

    trainer ──write v7.safetensors──> /dev/shm/understudy-engine-…/ ──mapped──> engine 0, engine 1, …

A file is renamed to its name after its last byte, so an engine never reads half of one. The newest file is
kept, because a restarted engine needs it. The folder is owned by the trainer
(`observability/owned_folder.py`). If the trainer is killed, its engines or the next run remove the folder.
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
    """The trainer's own folder of snapshots; `need_bytes` is the size of one."""

    _claimed = 0
    """Bytes of shared memory that the open folders of this process may come to need. They are opened before the first
    of them is written, so free memory alone does not show what is left."""

    def __init__(self, need_bytes: int, parent: Path | None = None) -> None:
        memory = None if parent else memory_for(2 * need_bytes + Snapshots._claimed)
        self._claim = 2 * need_bytes if memory else 0
        Snapshots._claimed += self._claim
        self._owned = OwnedFolder("understudy-engine-", parent or memory)
        self.folder = self._owned.path

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """Writes a snapshot and returns the file's name; None if there are no tensors."""
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
        Snapshots._claimed -= self._claim
        self._claim = 0
        self._owned.close()


def memory_for(size: int) -> Path | None:
    """/dev/shm if it has room (containers often limit it to 64 MiB); None means the temporary folder."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size + _MARGIN:
        return _MEMORY
    return None
