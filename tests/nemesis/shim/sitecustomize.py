"""Imported by every Python process of a disturbed run before anything else: lets the driver move clocks and fail `fsync`.

The driver writes what is wrong at the moment into the file that UNDERSTUDY_NEMESIS_SHIM names. Without the variable
nothing is changed. SQLite flushes its files without Python, so its own flushes do not pass here.
"""

import errno
import json
import os
import time

_FILE = os.environ.get("UNDERSTUDY_NEMESIS_SHIM")


def _install(file: str) -> None:
    clock, fsync = time.time, os.fsync
    told = {"clock": 0.0, "fsync": ""}
    looked = [0.0]

    def now_wrong() -> dict:
        if time.monotonic() - looked[0] > 0.02:
            looked[0] = time.monotonic()
            try:
                with open(file) as text:
                    told.update(json.loads(text.read()))
            except (OSError, ValueError):
                pass
        return told

    def moved() -> float:
        return clock() + now_wrong()["clock"]

    def flush(descriptor) -> None:
        wrong = now_wrong()["fsync"]
        if wrong == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if wrong == "slow":
            time.sleep(1.0)
        fsync(descriptor)

    time.time, os.fsync = moved, flush


if _FILE:
    _install(_FILE)
