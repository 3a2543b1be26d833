"""Serve one teacher by hand, here or on another machine."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path
from typing import get_args

from rich.console import Console

from understudy.config.models import Attention
from understudy.planning.models.opened import check_present

EXAMPLE = "understudy serve-teacher Qwen/Qwen3-8B --bind 127.0.0.1:8100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument(
        "--bind", default="127.0.0.1:8100", help="host:port; anything but loopback needs a token"
    )
    parser.add_argument(
        "--token",
        help="bearer token that clients must send; better in the environment as UNDERSTUDY_TOKEN, because command lines can "
        "be read by every user of a machine. On loopback one is made and printed when there is none",
    )
    parser.add_argument("--name", help="the teacher's name in replies and errors; the model's own by default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="processes, and GPUs, that share the model"
    )
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers (faster on GPUs)")
    parser.add_argument("--quantize", choices=["int8", "fp8"], help="weights in eight bits")
    parser.add_argument(
        "--offload", default="0", help="last decoder layers that stay in host memory: a number, or all"
    )
    parser.add_argument("--layout", default="auto", choices=["auto", "packed", "padded"])
    parser.add_argument(
        "--batching",
        default="by_arrival",
        choices=["by_arrival", "by_request"],
        help="by_request scores each request alone, to the bit (for runs with determinism = 'full')",
    )
    parser.add_argument("--max-batch-tokens", type=int, default=16384, help="tokens of one forward")
    parser.add_argument(
        "--max-length", type=int, default=0, help="tokens of one sequence; 0: what the model holds"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that comes with the model; a hub id needs --revision",
    )
    parser.add_argument(
        "--attention",
        default="auto",
        choices=get_args(Attention),
        help="transformers' implementation; auto: sdpa, or eager where the model has no sdpa",
    )


def run(options: argparse.Namespace) -> int:
    check_present(options.model, "model", options.revision)
    from understudy.serving.bind import is_loopback
    from understudy.teacher.replica import server
    from understudy.teacher.replica.ranks import with_ranks
    from understudy.trainers.models import resolve_device

    token = options.token or os.environ.get("UNDERSTUDY_TOKEN")
    host = options.bind.rpartition(":")[0].strip("[]")
    console = Console(stderr=True)
    if not token and is_loopback(host):
        token = secrets.token_urlsafe(24)
        console.print(f"token: {token}", highlight=False, markup=False)
    if token:
        # Through the environment, so that it does not show in the process list.
        os.environ["UNDERSTUDY_TOKEN"] = token
    arguments = [
        "--model", options.model,
        "--name", options.name or Path(options.model).name,
        "--bind", options.bind,
        "--dtype", options.dtype,
        "--device", str(resolve_device(options.device)),
        "--batching", options.batching,
        "--layout", options.layout,
        "--max-batch-tokens", str(options.max_batch_tokens),
        "--max-length", str(options.max_length),
        "--threads", str(options.threads),
        "--attention", options.attention,
    ]  # fmt: skip
    if options.compile:
        arguments.append("--compile")
    if options.offload != "0":
        arguments += ["--offload", options.offload]
    if options.quantize:
        arguments += ["--quantize", options.quantize]
    if options.revision:
        arguments += ["--revision", options.revision]
    if options.trust_remote_code:
        arguments.append("--trust-remote-code")
    if options.tensor_parallel == 1:
        return server.main(arguments)
    return with_ranks(arguments, options.tensor_parallel)
