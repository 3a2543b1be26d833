"""A recorded run whose rows have pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image
from recorded_run import recorded_run, summary, token_columns

from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper
from understudy.media.store import MediaStore
from understudy.observability.rundir import RunDir


def png(colour: str, size: tuple[int, int] = (48, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def noise(side: int) -> bytes:
    """A PNG that is too large for a report."""
    buffer = io.BytesIO()
    Image.effect_noise((side, side), 90).save(buffer, format="PNG")
    return buffer.getvalue()


def pictured_run(folder: Path, hostile: str, broken: bool = True) -> tuple[RunDir, dict[str, str]]:
    """The run, and the hashes of its pictures by name. With `broken`, a row has a picture that is missing from the store and
    one that is not a picture."""
    run = recorded_run(folder)
    store = MediaStore(run.media)
    names = {
        "red": store.put(png("red")),
        "blue": store.put(png("blue")),
        "large": store.put(noise(700)),
        "script": store.put(b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        "gone": "ab" * 32,
    }
    keeper = RowKeeper(run.path / FOLDER_NAME, 1 << 20)
    rows = {
        "two": ["red", "blue"],
        "other": ["blue", "red"],
        "large": ["large"],
    }
    if broken:
        rows["broken"] = ["gone", "script"]
    keeper.write(
        20,
        [
            (
                summary(
                    f"{key}_0_0",
                    token_columns(),
                    prompt="which colour?",
                    kl=3.0,
                    media=[names[name] for name in own],
                ),
                token_columns(),
            )
            for key, own in rows.items()
        ],
    )
    sample = {
        "step": 0,
        "key": "eval-9",
        "source": "sums",
        "prompt": "[picture]",
        "text": "red",
        "reward": 1.0,
    }
    with run.samples.open("a") as handle:
        handle.write(json.dumps({**sample, "media": [names["red"], hostile, 7]}) + "\n")
    return run, names
