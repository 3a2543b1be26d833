"""One replica process: `python -m understudy.teacher.replica.server --model PATH --name NAME …`.

    bind the port ─> load ─> warm up (score once, prove it) ─> serve ─> write the ready file

The port is bound first, so that a port in use is reported before minutes of loading; it listens only when the replica
can score. The process ends on SIGTERM after the requests in flight, and at once when the pipe given by
`--watch-fd` closes: its launcher is gone, and no process is left to stop it.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from understudy.nn.pretrained import AUTO
from understudy.observability.owned_folder import remove_if_abandoned
from understudy.serving.bind import StartError
from understudy.serving.process import Process, process_arguments, process_main
from understudy.serving.server import serve
from understudy.teacher.manifest import Limits, RequestBatching
from understudy.teacher.replica.app import build_app
from understudy.teacher.replica.assemble import build_worker, follow
from understudy.teacher.replica.follower import Follower
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.model import DTYPES
from understudy.teacher.scoring.offload import ALL
from understudy.teacher.scoring.scorer import ScorerOptions
from understudy.weights.broadcast import gpu_id
from understudy.weights.orders import OrderedWeights


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = process_arguments("understudy.teacher.replica.server", __doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--name", required=True, help="the teacher's name, as in the recipe")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument(
        "--batching", default=RequestBatching.BY_REQUEST, choices=[mode.value for mode in RequestBatching]
    )
    parser.add_argument("--max-batch-tokens", type=int, default=ScorerOptions().max_batch_tokens)
    parser.add_argument(
        "--world-size", type=int, default=1, help="ranks (processes) that share this replica's model"
    )
    parser.add_argument("--rank", type=int, default=0, help="of this process; rank 0 answers requests")
    parser.add_argument(
        "--rendezvous", default="", help="where the ranks join: tcp://HOST:PORT or file:///PATH"
    )
    parser.add_argument(
        "--layout", default=ScoringLayout.AUTO, choices=[layout.value for layout in ScoringLayout]
    )
    parser.add_argument(
        "--chunk-mib", type=int, default=0, help="fp32 logits at once; 0: 64, or 2048 on CUDA"
    )
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers (faster on GPUs)")
    parser.add_argument("--quantize", choices=["int8", "fp8"], help="weights in eight bits")
    parser.add_argument(
        "--quantize-tolerance",
        type=float,
        default=0.05,
        help="nats of KL that it may change on the fixed tokens",
    )
    parser.add_argument(
        "--offload", default="0", help="last decoder layers that stay in host memory: a number, or all"
    )
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
    parser.add_argument(
        "--weights", type=Path, help="take new weights on request; the folder their snapshots appear in"
    )
    parser.add_argument("--max-k", type=int, default=Limits().max_k)
    parser.add_argument("--max-request-tokens", type=int, default=Limits().max_request_tokens)
    parser.add_argument("--max-request-bytes", type=int, default=Limits().max_request_bytes)
    return parser.parse_args(argv)


def check_place(args: argparse.Namespace) -> None:
    if args.offload != ALL and not args.offload.isdigit():
        raise StartError(f"--offload {args.offload}: expected a number of layers, or all")
    against = [
        option
        for option, given in (
            ("--quantize", args.quantize is not None), ("--compile", args.compile), ("--world-size", args.world_size > 1),
        )
        if given
    ]  # fmt: skip
    if args.offload != "0" and against:
        raise StartError(f"--offload {args.offload} with {against[0]}: leave one of the two out")
    if args.weights is not None and args.world_size > 1:
        raise StartError("--weights: a replica over several processes cannot take new weights")
    if not 0 <= args.rank < args.world_size:
        raise StartError(
            f"--rank {args.rank}: expected 0 … {args.world_size - 1} with --world-size {args.world_size}"
        )
    if args.world_size > 1 and not args.rendezvous:
        raise StartError(
            "--world-size above 1 needs --rendezvous, the address where the ranks join (tcp://HOST:PORT)"
        )


def run(process: Process) -> Coroutine[Any, Any, None] | None:
    args = process.args
    check_place(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.rank > 0:
        # This rank runs and will join its peers; rank 0's ready file says that all can score.
        process.ready(url="")
        follow(args)
        return None
    return score(process, process.bind())


async def score(process: Process, sock: socket.socket) -> None:
    worker, manifest, vocabulary, media = build_worker(process.args)
    worker.start()
    args, follower = process.args, None
    if args.weights is not None:
        incoming = OrderedWeights(args.weights, sock.getsockname()[0], args.device)
        follower = Follower(worker, manifest, incoming)
    app = build_app(worker, manifest, vocabulary, process.token, follower, media)
    what = f"teacher {args.name} scores"
    gpu = {} if follower is None else {"gpu": gpu_id(args.device)}
    await serve(process, app, sock, what=what, keep_alive=75, hurried=False, **gpu)
    worker.stop()
    worker.scorer.close()
    if media is not None:
        media.close()


def main(argv: Sequence[str] | None = None) -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    args = parse_args(argv)
    tidy = None if args.weights is None else partial(remove_if_abandoned, args.weights)
    return process_main(run, args, before_orphaned_exit=tidy)


if __name__ == "__main__":
    sys.exit(main())
