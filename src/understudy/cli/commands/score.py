"""Send token ids to a running teacher and print or save its scores."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from understudy.errors import DataError

_ROWS_PER_REQUEST = 64
"""Rows per request: a file may be larger than what a replica accepts at once."""

EXAMPLE = "understudy score http://127.0.0.1:8100 rows.jsonl --topk 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="for example http://127.0.0.1:8100")
    parser.add_argument(
        "file",
        type=Path,
        help='jsonl, one {"tokens": [...], "positions": [...], "ids": [[...]]} a line; positions default to 1 … end, and '
        "ids (several per position) ask for exactly these candidates",
    )
    parser.add_argument(
        "--topk", type=int, default=0, help="candidates per position; 0 scores only the written token"
    )
    parser.add_argument(
        "--token",
        default=os.environ.get("UNDERSTUDY_TOKEN"),
        help="bearer token; UNDERSTUDY_TOKEN when not given",
    )
    parser.add_argument("--out", type=Path, help="where to save the scores as jsonl; printed when not given")


def run(options: argparse.Namespace) -> None:
    lines = asyncio.run(_score(options))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if options.out:
        options.out.write_text(text)
    else:
        sys.stdout.write(text)


async def _score(options: argparse.Namespace) -> list[dict[str, Any]]:
    from understudy.teacher.clients.native import ReplicaClient
    from understudy.types.scores import ScoreItem, Signal

    plain = Signal.TOPK if options.topk else Signal.SAMPLED
    items = []
    for i, line in enumerate(_lines(options.file)):
        tokens, positions, ids = _row(line, i, options.file)
        signal, k = (plain, options.topk) if ids is None else (Signal.AT_IDS, 0)
        items.append(ScoreItem(str(i), tokens, positions, signal, k=k, ids=ids))
    async with ReplicaClient(options.url, options.token) as client:
        scores = [
            one
            for start in range(0, len(items), _ROWS_PER_REQUEST)
            for one in await client.score(items[start : start + _ROWS_PER_REQUEST])
        ]
    return [
        {
            "sampled_logprobs": one.sampled_logprobs.tolist(),
            **(
                {}
                if one.ids is None or one.logprobs is None
                else {"ids": one.ids.tolist(), "logprobs": one.logprobs.tolist()}
            ),
        }
        for one in scores
    ]


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(f"no file {path}; give a jsonl file of token ids")
    return [line for line in path.read_text().splitlines() if line.strip()]


def _row(line: str, number: int, path: Path) -> tuple[Any, Any, Any]:
    import numpy as np

    try:
        row = json.loads(line)
        tokens = np.asarray(row["tokens"], dtype=np.int32)
        positions = np.asarray(row.get("positions", range(1, len(tokens))), dtype=np.int32)
        ids = None if row.get("ids") is None else np.asarray(row["ids"], dtype=np.int32)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f'{path}, line {number + 1}: expected {{"tokens": [ids], "positions": [indexes]}}, got {line[:60]!r} ({error})'
        ) from None
    return tokens, positions, ids
