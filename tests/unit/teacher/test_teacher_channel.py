"""The connection to a replica does not look for what is not there."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from understudy.errors import TeacherUnavailable
from understudy.teacher.channel import Channel


class Searches:
    """The first to be asked for a module that has not been imported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.names.append(name)


def test_requests_search_for_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches()

    async def ask() -> None:
        # What httpx looks for and may be missing (sniffio) comes with the package.
        channel = Channel("http://127.0.0.1:1", None, "teacher", "r0", connect_timeout=2.0)
        with pytest.raises(TeacherUnavailable):
            await channel.ask("GET", "/manifest")
        monkeypatch.setattr(sys, "meta_path", [searches, *sys.meta_path])
        with pytest.raises(TeacherUnavailable):
            await channel.ask("GET", "/manifest")
        monkeypatch.undo()
        await channel.close()

    asyncio.run(ask())
    assert searches.names == []
