"""The pictures that clients sent to a replica, by hash.

    client                                    replica
    POST /v1/media/missing {"hashes": […]} ─> {"missing": […]}        once per picture it has not sent yet
    POST /v1/media                 bytes   ─> {"hash": …}             once per missing picture
    POST /v1/score         hashes in media ─> scores, or 409 if a picture is gone again

The replica keeps the latest ones in a folder of its own, up to a number of bytes. If the replica is killed, its launcher
or the next replica removes the folder.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from understudy.media.pictures import PictureLimits, check_picture
from understudy.media.store import REPLICA_FOLDER, MediaStore, hash_of
from understudy.observability.owned_folder import OwnedFolder
from understudy.teacher.scoring.probe import PROBE_PICTURE

KEPT_BYTES = 4 << 30


class ReplicaMedia:
    """Used by the HTTP handlers; scoring threads read the store."""

    def __init__(self, limits: PictureLimits, kept_bytes: int = KEPT_BYTES) -> None:
        self._folder = OwnedFolder(REPLICA_FOLDER, None)
        self.store = MediaStore(self._folder.path)
        self.limits, self._kept_bytes = limits, kept_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()
        self.probe = self.store.put(PROBE_PICTURE)

    def missing(self, names: Iterable[str]) -> list[str]:
        """The pictures that are not stored here, each once. Those that are count as just used, and are dropped last."""
        with self._lock:
            absent = []
            for name in dict.fromkeys(names):
                if name in self._sizes:
                    self._sizes.move_to_end(name)
                elif name != self.probe:
                    absent.append(name)
            return absent

    def put(self, data: bytes) -> str:
        """Stores a picture; raises `PictureError` for one that cannot be decoded."""
        check_picture(data, f"the picture {hash_of(data)[:12]}…", self.limits)
        with self._lock:
            name = self.store.put(data)
            if name != self.probe and name not in self._sizes:
                self._sizes[name] = len(data)
                self._total += len(data)
            while self._total > self._kept_bytes and len(self._sizes) > 1:
                old, size = self._sizes.popitem(last=False)
                self._total -= size
                self.store.path(old).unlink(missing_ok=True)
        return name

    def close(self) -> None:
        self._folder.close()
