"""Runs coroutines concurrently: all results, or the first error, with the remaining ones cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
