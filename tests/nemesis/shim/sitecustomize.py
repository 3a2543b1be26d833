"""Imported by every Python process of a disturbed run before anything else: lets the driver move clocks and fail `fsync`.

The driver writes what is wrong at the moment into the file that UNDERSTUDY_NEMESIS_SHIM names. Without the variable
nothing is changed. SQLite flushes its files without Python: `flush.c` is for those.

With UNDERSTUDY_NEMESIS_PROXY, a port, connections between processes of this machine go through the driver's proxy there.
The first line that is sent to it names the port that was meant.
"""

import errno
import json
import os
import time


def _by_file(file: str) -> None:
    clock, fsync = time.time, os.fsync
    settings = {"clock": 0.0, "swings": False, "fsync": ""}
    looked = [0.0]

    def now_wrong() -> dict:
        if time.monotonic() - looked[0] > 0.02:
            looked[0] = time.monotonic()
            try:
                with open(file) as text:
                    settings.update(json.loads(text.read()))
            except (OSError, ValueError):
                pass
        return settings

    def moved() -> float:
        wrong = now_wrong()
        right = wrong["swings"] and int(2 * time.monotonic()) % 2  # every other half second
        return clock() + (0.0 if right else wrong["clock"])

    def flush(descriptor) -> None:
        wrong = now_wrong()["fsync"]
        if wrong == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if wrong == "slow":
            time.sleep(1.0)
        fsync(descriptor)

    time.time, os.fsync = moved, flush


def _by_proxy(proxy: int) -> None:
    import asyncio.selector_events

    loop = asyncio.selector_events.BaseSelectorEventLoop
    connect = loop.sock_connect

    async def sock_connect(self, sock, address):
        local = isinstance(address, tuple) and address[0] == "127.0.0.1"
        await connect(self, sock, ("127.0.0.1", proxy) if local else address)
        if local:
            await self.sock_sendall(sock, b"%d\n" % address[1])

    loop.sock_connect = sock_connect


def install() -> None:
    if file := os.environ.get("UNDERSTUDY_NEMESIS_SHIM"):
        _by_file(file)
    if proxy := os.environ.get("UNDERSTUDY_NEMESIS_PROXY"):
        _by_proxy(int(proxy))


install()
