"""The hf engine in a process of its own: `python -m understudy.engines.host --model PATH …`.

    bind the port ─> load ─> serve ─> write the ready file

The port is bound first, so that a port in use is said before minutes of loading; it listens only when the engine can
write. The process ends on SIGTERM, and at once when the pipe given by `--watch-fd` closes: whoever launched it is gone, and
nobody is left to stop it. What that launcher left in the weights folder is removed then, because it lies in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from understudy.engines.hf import HFEngine
from understudy.engines.host_app import HostApp, is_loopback
from understudy.engines.hosted_weights import remove_snapshots
from understudy.engines.schedule import Batching
from understudy.engines.writing import Detokenize
from understudy.errors import EngineError, UnderstudyError

log = logging.getLogger("understudy.engines.host")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m understudy.engines.host", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id; weights published later replace it")
    parser.add_argument(
        "--bind", default="127.0.0.1:0", help="HOST:PORT on loopback; port 0 takes a free one"
    )
    parser.add_argument("--token-env", default="UNDERSTUDY_TOKEN", help="environment variable with the token")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--max-batch", type=int, default=128, help="rows decoded together")
    parser.add_argument("--max-length", type=int, required=True, help="prompt and new tokens of one row")
    parser.add_argument("--pad-id", type=int, default=0, help="filling that is never attended to")
    parser.add_argument("--batching", default=Batching.COMPOSED, choices=[mode.value for mode in Batching])
    parser.add_argument("--deterministic", action="store_true", help="only algorithms that repeat to the bit")
    parser.add_argument("--weights", type=Path, help="the folder snapshots of new weights appear in")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run a model's own code; needs --revision"
    )
    parser.add_argument("--ready-file", type=Path, help='written when able to write: {"url": …, "pid": …}')
    parser.add_argument("--watch-fd", type=int, help="exit when this inherited pipe closes")
    return parser.parse_args(argv)


def load_engine(args: argparse.Namespace) -> HFEngine:
    """The student as the trainer loads it: safetensors only, the same attention, so that bits agree."""
    if args.trust_remote_code and args.revision is None and not Path(args.model).is_dir():
        raise EngineError(
            f"--trust-remote-code for {args.model} runs code from the hub: pin it with --revision"
        )
    options = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    try:
        config = AutoConfig.from_pretrained(args.model, **options)
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        model = AutoModelForCausalLM.from_pretrained(
            args.model,
            dtype=DTYPES[args.dtype],
            attn_implementation="eager" if capped else "sdpa",
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise EngineError(f"the model {args.model} cannot be loaded: {first}") from error
    # The parameters keep requires_grad, as the trained ones do: without it torch picks other kernels, and other last bits.
    return HFEngine(
        model,
        max_batch=args.max_batch,
        device=args.device,
        pad_id=args.pad_id,
        max_length=args.max_length,
        batching=Batching(args.batching),
        detokenize=_detokenize(args.model, options),
    )


def _detokenize(model: str, options: dict[str, Any]) -> Detokenize | None:
    """Only stop strings need one; a folder without a tokenizer serves everything else."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError):
        return None
    return lambda ids: str(tokenizer.decode(ids))


def bind_socket(bind: str) -> socket.socket:
    """A bound socket that does not listen yet."""
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    if not is_loopback(host) or not port.isdigit() or int(port) > 65535:
        raise EngineError(
            f"--bind {bind!r}: expected a loopback HOST:PORT, for example 127.0.0.1:0; weights come by shared memory, so "
            "an engine process serves its own machine alone"
        )
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, int(port)))
    except OSError as error:
        sock.close()
        raise EngineError(f"cannot bind {bind}: {error.strerror}; choose port 0 for a free one") from error
    return sock


def watch_pipe(fd: int, weights: Path | None) -> None:
    """End this process when the launcher's end of the pipe closes, even while a token is being computed."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        if weights is not None:
            remove_snapshots(weights)
        os._exit(3)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()


class _Uvicorn(uvicorn.Server):
    """Uvicorn re-raises signals after its shutdown, so SIGTERM would look like a crash to whoever waits for us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask_to_stop)
        yield

    should_exit: bool

    def _ask_to_stop(self) -> None:
        """Whoever ends an engine wants nothing more from it: requests in flight are not waited for."""
        self.should_exit = self.force_exit = True


async def serve(args: argparse.Namespace, sock: socket.socket, token: str | None) -> None:
    engine = load_engine(args)
    app = HostApp(engine, token=token, weights=args.weights)
    config = uvicorn.Config(
        app.asgi, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=3600
    )
    server = _Uvicorn(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if args.ready_file is not None and not serving.done():
        temporary = args.ready_file.with_name(f".{args.ready_file.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        temporary.replace(args.ready_file)
    log.info("the engine writes at %s (%s, %s, %s)", url, args.model, args.dtype, args.device)
    await serving
    await engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if args.watch_fd is not None:
        watch_pipe(args.watch_fd, args.weights)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(args.deterministic, warn_only=True)
    try:
        with bind_socket(args.bind) as sock:
            asyncio.run(serve(args, sock, os.environ.get(args.token_env) or None))
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
