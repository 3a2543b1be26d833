"""One replica process: `python -m understudy.teacher.replica.server --model PATH --name NAME …`.

    bind the port ─> load ─> warm up (score once, prove it) ─> serve ─> write the ready file

The port is bound first, so that a port in use is said before minutes of loading; it listens only when the replica
can score. The process ends on SIGTERM after the requests in flight, and at once when the pipe given by
`--watch-fd` closes: its launcher is gone, and no process is left to stop it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from understudy.errors import UnderstudyError
from understudy.nn.pretrained import AUTO
from understudy.serving.bind import StartError, bind_socket, url_of
from understudy.serving.child import end_with_launcher, write_ready_file
from understudy.serving.server import serve
from understudy.teacher.manifest import Batching, Limits
from understudy.teacher.replica.app import build_app
from understudy.teacher.replica.assemble import build_worker, follow
from understudy.teacher.scoring.body import Layout
from understudy.teacher.scoring.model import DTYPES
from understudy.teacher.scoring.scorer import ScorerOptions

log = logging.getLogger("understudy.teacher.replica.server")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m understudy.teacher.replica.server", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--name", required=True, help="the teacher's name, as in the recipe")
    parser.add_argument("--bind", default="127.0.0.1:0", help="HOST:PORT; port 0 takes a free one")
    parser.add_argument(
        "--token-env", default="UNDERSTUDY_TOKEN", help="environment variable with the bearer token"
    )
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--batching", default=Batching.BY_REQUEST, choices=[mode.value for mode in Batching])
    parser.add_argument("--max-batch-tokens", type=int, default=ScorerOptions().max_batch_tokens)
    parser.add_argument("--world-size", type=int, default=1, help="processes that share this replica's model")
    parser.add_argument("--rank", type=int, default=0, help="which of them this is; 0 answers requests")
    parser.add_argument("--rendezvous", default="", help="where they meet: tcp://HOST:PORT or file:///PATH")
    parser.add_argument("--layout", default=Layout.AUTO, choices=[layout.value for layout in Layout])
    parser.add_argument(
        "--chunk-mib", type=int, default=0, help="fp32 logits at once; 0: 64, or 2048 on CUDA"
    )
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers (faster on GPUs)")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that comes with the model; a hub id needs --revision",
    )
    parser.add_argument("--attention", default=AUTO, help="auto, or one of transformers' implementations")
    parser.add_argument(
        "--max-length", type=int, default=0, help="tokens of one sequence; 0: what the model holds"
    )
    parser.add_argument("--max-k", type=int, default=Limits().max_k)
    parser.add_argument("--max-request-tokens", type=int, default=Limits().max_request_tokens)
    parser.add_argument("--max-request-bytes", type=int, default=Limits().max_request_bytes)
    parser.add_argument("--ready-file", type=Path, help='written when able to score: {"url": …, "pid": …}')
    parser.add_argument("--watch-fd", type=int, help="exit when this inherited pipe closes")
    return parser.parse_args(argv)


def check_place(args: argparse.Namespace) -> None:
    if not 0 <= args.rank < args.world_size:
        raise StartError(
            f"--rank {args.rank}: expected 0 … {args.world_size - 1} with --world-size {args.world_size}"
        )
    if args.world_size > 1 and not args.rendezvous:
        raise StartError(
            "--world-size above 1 needs --rendezvous, where the processes meet (tcp://HOST:PORT)"
        )


async def run(args: argparse.Namespace, sock: socket.socket, token: str | None) -> None:
    worker, manifest, vocabulary = build_worker(args)
    worker.start()

    def ready() -> None:
        if args.ready_file is not None:
            write_ready_file(args.ready_file, url=url_of(sock))
        log.info(
            "teacher %s scores at %s (%s, %s, %s)",
            args.name,
            url_of(sock),
            args.model,
            args.dtype,
            args.device,
        )

    await serve(build_app(worker, manifest, vocabulary, token), sock, ready, keep_alive=75, hurried=False)
    worker.stop()
    worker.scorer.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if args.watch_fd is not None:
        end_with_launcher(args.watch_fd)
    if args.threads:
        torch.set_num_threads(args.threads)
    token = os.environ.get(args.token_env) or None
    try:
        check_place(args)
        if args.rank > 0:
            if args.ready_file is not None:
                # This rank runs and will join its peers; rank 0's ready file says that all can score.
                write_ready_file(args.ready_file, url="")
            follow(args)
            return 0
        with bind_socket(args.bind, token) as sock:
            asyncio.run(run(args, sock, token))
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
