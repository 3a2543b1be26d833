"""Remembers a SIGINT that arrives before a run starts, while modules are imported.

    main ── remembering_interrupts() ──> imports ── raise_if_interrupted() ──> command ─┐
                                           └── SIGINT: recorded, then KeyboardInterrupt  │
    asyncio <── give_back_sigint() ── run_to_its_end <──────────────────────────────────┘

An import can discard a KeyboardInterrupt (a bare `except:`, an extension module that clears the error) or turn
it into an ImportError. The record survives both.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_interrupted = False


@contextmanager
def remembering_interrupts() -> Iterator[None]:
    """Records a SIGINT until `give_back_sigint` or the end of the block. Does nothing where Python's own handler is
    not installed: on other threads, inside another such block, in a program with a handler of its own."""
    global _interrupted
    if not _on_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _interrupted = False
    signal.signal(signal.SIGINT, _record)
    try:
        yield
    finally:
        _restore()
        _interrupted = False


def raise_if_interrupted() -> None:
    if _interrupted:
        raise KeyboardInterrupt


def give_back_sigint() -> None:
    """Gives SIGINT back to Python, whose handler `asyncio.Runner` replaces by one that cancels its task."""
    _restore()  # first: a SIGINT from here on raises in code of ours, which discards nothing
    raise_if_interrupted()


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _restore() -> None:
    if _on_main_thread() and signal.getsignal(signal.SIGINT) is _record:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _record(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    signal.default_int_handler(number, frame)
