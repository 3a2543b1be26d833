"""The hf engine in a process of its own: `python -m understudy.engines.hosted.process --model PATH …`.

    bind the port ─> load ─> serve ─> write the ready file

The port is bound first, so that a port in use is reported before minutes of loading; it listens only when the engine can
write. The process ends on SIGTERM, and at once when the pipe given by `--watch-fd` closes: its launcher is gone, and no process
is left to stop it. What a trainer that is gone too left in the weights folder is removed then, because it lies in memory.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.types import ASGIApp
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from understudy.engines.base import Detokenize
from understudy.engines.hosted.app import HostApp
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.scheduler import Batching
from understudy.errors import EngineError
from understudy.media.processor import PictureProcessor, PictureReader
from understudy.media.store import MediaStore
from understudy.nn.determinism import keep_to_repeatable
from understudy.nn.pretrained import AUTO, CannotLoadError, load_causal_lm
from understudy.observability.owned_folder import remove_if_abandoned
from understudy.serving.process import Process, process_arguments, process_main
from understudy.serving.server import serve
from understudy.weights.adapters import AdaptedModel
from understudy.weights.broadcast import gpu_id

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def arguments() -> argparse.ArgumentParser:
    parser = process_arguments("understudy.engines.hosted.process", __doc__)
    parser.add_argument("--model", required=True, help="folder or hub id; weights published later replace it")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--max-batch", type=int, default=128, help="rows decoded together")
    parser.add_argument("--max-length", type=int, required=True, help="prompt and new tokens of one row")
    parser.add_argument("--kv-cache", default=KVFormat.MODEL, choices=[one.value for one in KVFormat])
    parser.add_argument(
        "--keep-kv", action="store_true", help="keep keys and values of running rows under new weights"
    )
    parser.add_argument("--pad-id", type=int, default=0, help="filling that is never attended to")
    parser.add_argument("--batching", default=Batching.COMPOSED, choices=[mode.value for mode in Batching])
    parser.add_argument("--deterministic", action="store_true", help="only algorithms that repeat to the bit")
    parser.add_argument("--weights", type=Path, help="the folder snapshots of new weights appear in")
    parser.add_argument("--media", type=Path, help="the folder of the run's pictures")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that comes with the model; a hub id needs --revision",
    )
    parser.add_argument("--attention", default=AUTO, help="auto, or one of transformers' implementations")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return arguments().parse_args(argv)


def load_engine(args: argparse.Namespace) -> tuple[HFEngine, AdaptedModel]:
    """The engine, and the same model wrapped for adapters."""
    model = load_model(args)
    return engine_over(model, args), AdaptedModel(model)


def load_model(args: argparse.Namespace) -> Any:
    """Loads the student as the trainer does (safetensors only, the same attention), so that bits agree."""
    if args.trust_remote_code and args.revision is None and not Path(args.model).is_dir():
        raise EngineError(
            f"--trust-remote-code for {args.model} runs code from the hub: pin it with --revision"
        )
    try:
        # Parameters keep requires_grad, as in training: without it torch picks kernels with other last bits.
        return load_causal_lm(args.model, dtype=DTYPES[args.dtype], attention=args.attention, **_source(args))
    except CannotLoadError as error:
        raise EngineError(f"the model {args.model} cannot be loaded: {error}") from error


def engine_over(model: Any, args: argparse.Namespace) -> HFEngine:
    return HFEngine(
        model,
        max_batch=args.max_batch,
        device=args.device,
        pad_id=args.pad_id,
        max_length=args.max_length,
        batching=Batching(args.batching),
        detokenize=_detokenize(args.model, _source(args)),
        kv_format=KVFormat(args.kv_cache),
        recompute_kv=not args.keep_kv,
        pictures=_pictures(args),
    )


def _source(args: argparse.Namespace) -> dict[str, Any]:
    return {"trust_remote_code": args.trust_remote_code, "revision": args.revision}


def _pictures(args: argparse.Namespace) -> PictureReader | None:
    processor = None if args.media is None else PictureProcessor.load(args.model, args.revision)
    return None if processor is None else PictureReader(processor, MediaStore(args.media))


def _detokenize(model: str, options: dict[str, Any]) -> Detokenize | None:
    """Needed for stop strings only; without a tokenizer in the folder everything else works."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError):
        return None
    return lambda ids: str(tokenizer.decode(ids))


def begin(process: Process) -> socket.socket:
    """Binds the port and sets up torch, before anything is loaded."""
    args, sock = process.args, process.bind()
    if args.threads:
        torch.set_num_threads(args.threads)
    keep_to_repeatable(args.deterministic, args.device)
    return sock


async def serve_engine(
    process: Process,
    sock: socket.socket,
    engine: HFEngine,
    adapted: AdaptedModel,
    beside: Sequence[tuple[str, ASGIApp]] = (),
) -> None:
    """Serves until a signal. `beside`: further applications, by the prefix of their paths."""
    args = process.args
    app = HostApp(
        engine,
        token=process.token,
        weights=args.weights,
        address=sock.getsockname()[0],
        device=args.device,
        adapted=adapted,
        beside=beside,
    )
    await serve(process, app.asgi, sock, what="the engine writes", gpu=gpu_id(args.device))
    await engine.close()


async def run(process: Process) -> None:
    sock = begin(process)
    engine, adapted = load_engine(process.args)
    await serve_engine(process, sock, engine, adapted)


def main(argv: Sequence[str] | None = None) -> int:
    return engine_main(run, parse_args(argv))


def engine_main(body: Callable[[Process], Coroutine[Any, Any, None]], args: argparse.Namespace) -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    tidy = None if args.weights is None else partial(remove_if_abandoned, args.weights)
    return process_main(body, args, before_orphaned_exit=tidy)


if __name__ == "__main__":
    sys.exit(main())
