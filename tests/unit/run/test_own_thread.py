"""A run on its own thread ends at the first interrupt, however the caller runs its event loop."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal, sys, threading, time
from understudy.run.own_thread import OwnThread

signal.signal(signal.SIGINT, signal.default_int_handler)

async def work():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    await asyncio.sleep(30)

async def cell():
    before = signal.getsignal(signal.SIGINT)
    start = time.monotonic()
    try:
        OwnThread(asyncio.run).result(work())
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - start < 20, signal.getsignal(signal.SIGINT) is before)

if sys.argv[1] == "asyncio.run":
    asyncio.run(cell())
else:
    asyncio.new_event_loop().run_until_complete(cell())
"""


@pytest.mark.parametrize("way", ["asyncio.run", "run_until_complete"])
def test_the_first_interrupt_ends_a_run_on_its_own_thread(way: str) -> None:
    command = [sys.executable, "-c", PROGRAM, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["interrupted", "True", "True"], done.stdout + done.stderr
