"""Rows with pictures as vLLM's token route takes them: ids with one placeholder per picture, the pictures beside them.

vLLM cuts the pictures and expands the placeholders. Its answer holds the ids that it read, which are compared with the
row's, so a row is generated and scored with exactly its own ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.media.processor import QWEN, PictureReader


def vllm_parts(reader: PictureReader, key: str, tokens: np.ndarray, media: tuple[str, ...]) -> dict[str, Any]:
    """The part of a question that differs for a row with pictures."""
    urls = [reader.url(name) for name in reader.within(key, tokens, media)]
    return {
        "token_ids": one_marker_each(reader, key, tokens, media).tolist(),
        "content_parts": [{"type": "image_url", "url": url} for url in urls],
        "return_token_ids": True,
    }


def one_marker_each(
    reader: PictureReader, key: str, tokens: np.ndarray, media: tuple[str, ...]
) -> np.ndarray:
    """The tokens with one placeholder for each picture, for a server that expands it itself."""
    places = np.flatnonzero(tokens == reader.processor.image_token_id)
    # Tiles have tags: two before the first, one after the last.
    before, after = (0, 0) if reader.processor.family in QWEN else (2, 1)
    keep = np.ones(len(tokens), dtype=bool)
    done = 0
    for name in reader.within(key, tokens, media):
        first, last = places[done], places[done + reader.count(name) - 1]
        keep[max(first - before, 0) : last + after + 1] = False
        keep[first] = True
        done += reader.count(name)
    return tokens[keep]


def other_ids(read: list[int] | None, tokens: np.ndarray) -> str:
    """In words, why the ids that vLLM read are not the row's; empty if they are."""
    if read is None:
        return "the server does not say which ids it read for a row with pictures"
    if read != tokens.tolist():
        return (
            f"the server read {len(read)} ids for a row with pictures, which has {len(tokens)}: it cuts them into other "
            "tokens than the student"
        )
    return ""
