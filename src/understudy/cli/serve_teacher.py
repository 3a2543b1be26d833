"""Serve one teacher by hand, here or on another machine."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument(
        "--bind", default="127.0.0.1:8100", help="host:port; anything but loopback needs --token"
    )
    parser.add_argument(
        "--token", help="bearer token that clients must send; by default one is made and printed"
    )
    parser.add_argument("--name", help="the teacher's name in replies and errors; the model's own by default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-batch-tokens", type=int, default=16384, help="tokens of one forward")


def run(options: argparse.Namespace) -> int:
    from understudy.teacher import server
    from understudy.trainers.loading import resolve_device

    host = options.bind.rpartition(":")[0].strip("[]")
    token = options.token
    if token is None and server.is_loopback(host):
        token = secrets.token_urlsafe(24)
        Console(stderr=True).print(f"token: {token}", highlight=False, markup=False)
    if token is not None:
        # Through the environment, so that it shows in no process list.
        os.environ["UNDERSTUDY_TOKEN"] = token
    return server.main(
        [
            "--model", options.model,
            "--name", options.name or Path(options.model).name,
            "--bind", options.bind,
            "--dtype", options.dtype,
            "--device", str(resolve_device(options.device)),
            "--batching", "by_arrival",
            "--max-batch-tokens", str(options.max_batch_tokens),
        ]
    )  # fmt: skip
