"""The parent process of one vLLM server: starts it, reports when it is ready, stops it on exit.

    python -m understudy.engines.servers.vllm_process \\
        --python /venvs/vllm/bin/python --model DIR … --ready-file F --watch-fd N

We never import vLLM: its pinned dependencies need an environment of their own. The server listens on a Unix
domain socket in a folder that only this user can enter, because vLLM's control routes have no
authentication. With `--bind` this process is also its proxy on the network (`vllm_proxy.py`), for clients
with the token in UNDERSTUDY_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from socket import socket as Socket

from understudy.errors import UnderstudyError
from understudy.observability.owned_folder import OwnedFolder
from understudy.serving.client import ServerClient
from understudy.serving.endpoint import Endpoint
from understudy.serving.process import Process, process_arguments, process_main
from understudy.serving.server import serve

_SIDE = Path(__file__).parent / "vllm_side"
_WORKER = "understudy_vllm_worker.UnderstudyWorker"
_POLL_S = 0.25
_HEALTH_S = 5.0
_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def command(arguments: argparse.Namespace, socket: str) -> list[str]:
    """The server's command line for the installed version of vLLM."""
    parts = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", "--uds", socket]
    parts += ["--model", arguments.model, "--served-model-name", arguments.name, "--seed", "0"]
    parts += ["--max-num-seqs", str(arguments.max_batch), "--dtype", arguments.dtype]
    if arguments.max_length is not None:
        parts += ["--max-model-len", str(arguments.max_length)]
    if arguments.scores:
        # Prompt logprobs need every position of the forward, so cached prefixes are of no use.
        parts += ["--no-enable-prefix-caching"]
    else:
        parts += ["--worker-extension-cls", _WORKER]
        # Logprobs of the distribution that is sampled from, not of the raw logits.
        parts += ["--logprobs-mode", "processed_logprobs"]
    if _knows(arguments.python, "enable_scale_out"):  # newer versions need it for the token route
        parts += ["--enable-scale-out"]
    return parts + list(arguments.option)


def _knows(python: str, option: str) -> bool:
    """Whether the installed vLLM has an option, read from its source: importing it takes half a minute."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        raise SystemExit(f"{python} has no vLLM: {found.stderr.strip().splitlines()[-1:]}")
    entrypoints = Path(found.stdout.strip()) / "entrypoints"
    return any(option in path.read_text(errors="ignore") for path in entrypoints.rglob("cli_args.py"))


def environment(scores: bool) -> dict[str, str]:
    """Our environment, without vLLM's usage reports; for a student with its development mode (the weight routes)."""
    own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not scores:
        path = os.pathsep.join([str(_SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        own |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    return {**os.environ, **own}


def main(argv: Sequence[str] | None = None) -> int:
    parser = process_arguments("understudy.engines.servers.vllm_process", __doc__)
    parser.set_defaults(bind=None)  # then a Unix socket alone
    parser.add_argument("--python", required=True, help="the interpreter of an environment that has vLLM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="student")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-length", type=int, help="the model's own limit when not given")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--scores", action="store_true", help="a teacher: prompt logprobs of fixed weights")
    parser.add_argument("--option", action="append", default=[], help="one more word for vLLM's command line")
    return process_main(_host, parser.parse_args(argv), watches_launcher=True)


def _host(process: Process) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = OwnedFolder("understudy-vllm-", None)
    socket = f"{folder.path}/socket"
    try:
        server = subprocess.Popen(
            command(process.args, socket),
            env=environment(process.args.scores),
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        try:
            asyncio.run(_monitor(process, server, socket))
        finally:
            _end(server)
    finally:
        folder.close()


def _end_with_parent() -> None:
    """Runs in the child before exec: Linux sends it SIGTERM even if this process is killed by SIGKILL."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _monitor(process: Process, server: subprocess.Popen[bytes], socket: str) -> None:
    """Reports that vLLM is ready once it answers, and serves the proxy if asked to, until vLLM or our launcher
    is gone."""
    listening = None if process.args.bind is None else process.bind()
    ending = asyncio.ensure_future(_until_the_end(server, process.args.watch_fd))
    vllm = ServerClient("vLLM", Endpoint("http://vllm", socket=socket))
    try:
        while not ending.done() and not await vllm.answers(_HEALTH_S):
            await asyncio.sleep(_POLL_S)
        if listening is None and not ending.done():
            process.ready(url="http://vllm", socket=socket, server=server.pid)
        elif listening is not None and not ending.done():
            serving = asyncio.ensure_future(_serve_proxy(process, socket, listening, server.pid))
            done, _ = await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for task in done:
                task.result()
            return
        await ending
    finally:
        ending.cancel()
        await vllm.close()


async def _serve_proxy(process: Process, socket: str, listening: Socket, server: int) -> None:
    from understudy.engines.servers.vllm_proxy import VLLMProxy  # noqa: PLC0415 - imports torch, which most servers need not

    proxy = VLLMProxy(socket, token=process.token, address=listening.getsockname()[0])
    try:
        await serve(process, proxy.asgi, listening, what="the proxy of vLLM answers", server=server)
    finally:
        await proxy.close()


async def _until_the_end(server: subprocess.Popen[bytes], watch_fd: int | None) -> None:
    """Raises when vLLM has ended; returns when our launcher is gone."""
    while watch_fd is None or not select.select([watch_fd], [], [], 0)[0]:
        if server.poll() is not None:
            raise UnderstudyError(f"vLLM ended with code {server.returncode}")
        await asyncio.sleep(_POLL_S)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Terminates vLLM, which ends its own children; then kills what is left of our process group."""
    server.terminate()
    deadline = time.monotonic() + _GRACE_S
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if os.getpgrp() == os.getpid():  # we lead the group: it holds only our own descendants
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in _group_members():
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    elif server.poll() is None:
        server.kill()
    server.wait()


def _group_members() -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == os.getpgrp():
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members


if __name__ == "__main__":
    sys.exit(main())
