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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="for example http://127.0.0.1:8100")
    parser.add_argument(
        "file",
        type=Path,
        help='jsonl, one {"tokens": [...], "positions": [...]} a line; positions default to 1 … end',
    )
    parser.add_argument(
        "--topk", type=int, default=0, help="candidates per position; 0 asks for the written token alone"
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
    from understudy.teacher.client import ReplicaClient
    from understudy.types.scores import ScoreItem, Signal

    signal = Signal.TOPK if options.topk else Signal.SAMPLED
    items = [
        ScoreItem(str(i), *_row(line, i, options.file), signal, k=options.topk)
        for i, line in enumerate(_lines(options.file))
    ]
    async with ReplicaClient(options.url, options.token) as client:
        scores = await client.score(items)
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


def _row(line: str, number: int, path: Path) -> tuple[Any, Any]:
    import numpy as np

    try:
        row = json.loads(line)
        tokens = np.asarray(row["tokens"], dtype=np.int32)
        positions = np.asarray(row.get("positions", range(1, len(tokens))), dtype=np.int32)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f'{path}, line {number + 1}: expected {{"tokens": [ids], "positions": [indexes]}}, got {line[:60]!r} ({error})'
        ) from None
    return tokens, positions
