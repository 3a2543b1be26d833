"""The GSM8K reward for a run that is timed alone: it blocks the first reward until the run's turn.

All runs to be timed start up together and then wait here, before their first step, with the device idle. The
turn is a file, named by the variable UNDERSTUDY_STUDY_TURN.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from understudy.rollout.rewards.builtin import gsm8k

TURN = "UNDERSTUDY_STUDY_TURN"
_LOOK_SECONDS = 0.1


async def gsm8k_in_turn(row: Mapping[str, Any], text: str) -> dict[str, float]:
    turn = Path(os.environ[TURN])
    if not turn.exists():
        waiting = turn.with_suffix(".waiting")
        waiting.touch()
        while not turn.exists():
            await asyncio.sleep(_LOOK_SECONDS)
    return gsm8k(row, text)
