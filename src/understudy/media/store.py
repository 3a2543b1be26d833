"""The pictures of a run: one file each, named by the SHA-256 of its bytes.

    run directory/media/ab/abcdef…      the bytes as they came, whatever the format

Rows, prompts and requests hold hashes only. A file is written once and never changed, so processes on this
machine read it without a lock. Imports no torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from hashlib import sha256
from pathlib import Path

from understudy.errors import DataError

REPLICA_FOLDER = "understudy-media-"
"""How the names of teacher replicas' folders of pictures begin, in the folder for temporary files."""
_HASH = re.compile(r"[0-9a-f]{64}")


def hash_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def is_hash(name: str) -> bool:
    return _HASH.fullmatch(name) is not None


class MediaStore:
    """A folder of pictures; any process and thread may read and write it."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        if not is_hash(name):
            raise DataError(f"{name!r} is not the hash of a picture; expected 64 hexadecimal digits")
        return self.folder / name[:2] / name

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def put(self, data: bytes) -> str:
        """Stores the bytes, if they are not here yet; returns their hash."""
        name = hash_of(data)
        path = self.path(name)
        if path.is_file():
            return name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        return name

    def get(self, name: str) -> bytes:
        path = self.path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"the picture {name[:12]}… is not in {self.folder} ({error.strerror or error})"
            ) from None
        if hash_of(data) != name:
            raise DataError(f"the picture {path} was changed: its bytes have another hash than its name")
        return data
