"""Publishing through a folder that engines on the same file system read.

    snapshots/
      version-000041/  model.safetensors  config.json tokenizer files …   a folder a server can load as it stands
      version-000042/
      current          the name of the newest, replaced atomically

A snapshot gets its name by one rename, after its bytes are on disk, so a reader never meets half of one. The few
newest are kept: a server may still be reading the one before.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from understudy.errors import EngineError
from understudy.weights.base import WeightSource

_CURRENT = "current"
_NAME = re.compile(r"version-(\d{6,})")
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
               "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")  # fmt: skip


class DiskWeights:
    """Writes each version as a folder, then tells whoever loads it.

    `base_model` is a model folder whose config and tokenizer files go into every snapshot; without one a snapshot holds
    the weights alone. `announce(version, folder)` asks the engine to load, and publishing is done when it returns.
    """

    def __init__(
        self,
        source: WeightSource,
        root: Path | str,
        base_model: Path | str | None = None,
        announce: Callable[[int, Path], Awaitable[None]] | None = None,
        keep: int = 2,
    ) -> None:
        if keep < 1:
            raise EngineError(f"keep = {keep}: at least the newest snapshot is kept")
        self._source = source
        self._root = Path(root)
        self._base_model = Path(base_model) if base_model is not None else None
        self._announce = announce
        self._keep = keep
        self._version = -1
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in self._root.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink()

    @property
    def version(self) -> int:
        return self._version

    async def publish(self, version: int) -> None:
        folder = await asyncio.to_thread(self._write, version)
        if self._announce is not None:
            await self._announce(version, folder)
        self._version = version
        await asyncio.to_thread(self._prune)

    def _write(self, version: int) -> Path:
        final = self._root / f"version-{version:06d}"
        temporary = self._root / f".tmp-{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            tensors = {
                name: tensor.detach().contiguous().cpu() for name, tensor in self._source.named_weights()
            }
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
            for name in _SIDE_FILES:
                if self._base_model is not None and (self._base_model / name).is_file():
                    shutil.copyfile(self._base_model / name, temporary / name)
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            pointer = self._root / f".tmp-{_CURRENT}"
            pointer.write_text(final.name + "\n", encoding="utf-8")
            _sync(pointer)
            os.replace(pointer, self._root / _CURRENT)
            _sync(self._root)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise EngineError(
                f"weights of version {version} could not be written to {self._root}: {error}"
            ) from error
        return final

    def _prune(self) -> None:
        found = sorted(path for path in self._root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
        others = [path for path in found if path.name != f"version-{self._version:06d}"]
        for path in others[: max(0, len(others) - (self._keep - 1))]:
            shutil.rmtree(path, ignore_errors=True)


def current_snapshot(root: Path | str) -> tuple[int, Path] | None:
    """The newest complete snapshot under `root` as (version, folder), or None before the first."""
    try:
        name = (Path(root) / _CURRENT).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    match = _NAME.fullmatch(name)
    return (int(match[1]), Path(root) / name) if match else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
