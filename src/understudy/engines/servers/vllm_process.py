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
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from understudy.errors import UnderstudyError
from understudy.serving.bind import bind_socket, url_of
from understudy.serving.child import write_ready_file
from understudy.serving.server import serve

_SIDE = Path(__file__).parent / "vllm_side"
_WORKER = "understudy_vllm_worker.UnderstudyWorker"
_POLL_S = 0.25
_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def command(arguments: argparse.Namespace, socket: str) -> list[str]:
    """The server's command line for the installed version of vLLM."""
    words = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", "--uds", socket]
    words += ["--model", arguments.model, "--served-model-name", arguments.name, "--seed", "0"]
    words += ["--max-model-len", str(arguments.max_length), "--max-num-seqs", str(arguments.max_batch)]
    words += ["--dtype", arguments.dtype, "--worker-extension-cls", _WORKER]
    # Logprobs of the distribution that is sampled from, not of the raw logits.
    words += ["--logprobs-mode", "processed_logprobs"]
    if _knows(arguments.python, "enable_scale_out"):  # newer versions need it for the token route
        words += ["--enable-scale-out"]
    return words + list(arguments.option)


def _knows(python: str, option: str) -> bool:
    """Whether the installed vLLM has an option, read from its source: importing it takes half a minute."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if found.returncode:
        raise SystemExit(f"{python} has no vLLM: {found.stderr.strip().splitlines()[-1:]}")
    entrypoints = Path(found.stdout.strip()) / "entrypoints"
    return any(option in path.read_text(errors="ignore") for path in entrypoints.rglob("cli_args.py"))


def environment() -> dict[str, str]:
    """Our environment, with vLLM's development mode (its weight routes) on and its usage reports off."""
    path = os.pathsep.join([str(_SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**os.environ, **own, "PYTHONPATH": path}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Runs a vLLM server for understudy.")
    parser.add_argument("--python", required=True, help="the interpreter of an environment that has vLLM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="student")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--option", action="append", default=[], help="one more word for vLLM's command line")
    parser.add_argument(
        "--bind", help="HOST:PORT of a door to the network; a Unix socket alone when not given"
    )
    parser.add_argument("--token-env", default="UNDERSTUDY_TOKEN", help="environment variable with its token")
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--watch-fd", type=int, required=True)
    arguments = parser.parse_args(words)

    folder = tempfile.mkdtemp(prefix="understudy-vllm-")
    socket = f"{folder}/socket"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = subprocess.Popen(
        command(arguments, socket), env=environment(), stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent
    )
    try:
        if arguments.bind is None:
            _run(server, socket, arguments.ready_file, arguments.watch_fd)
        else:
            asyncio.run(_keep_door(server, socket, arguments))
    except UnderstudyError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        _end(server)
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    """Runs in the child before exec: Linux sends it SIGTERM even if this process is killed by SIGKILL."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _keep_door(server: subprocess.Popen[bytes], socket: str, arguments: argparse.Namespace) -> None:
    """Starts the proxy once vLLM answers, and stops it when vLLM or our launcher is gone."""
    from understudy.engines.servers.vllm_proxy import VLLMDoor  # noqa: PLC0415 - imports torch, which most servers need not

    token = os.environ.get(arguments.token_env) or None
    with bind_socket(arguments.bind, token) as listening:
        door = VLLMDoor(socket, token=token, address=listening.getsockname()[0])
        ending = asyncio.ensure_future(_until_the_end(server, arguments.watch_fd))
        try:
            transport = httpx.AsyncHTTPTransport(uds=socket)
            async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=5) as client:
                while not ending.done() and not await _answers_now(client):
                    await asyncio.sleep(_POLL_S)
            if not ending.done():

                def ready() -> None:
                    write_ready_file(arguments.ready_file, url=url_of(listening), server=server.pid)

                serving = asyncio.ensure_future(
                    serve(door.asgi, listening, ready, keep_alive=3600, hurried=True)
                )
                await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
            if ending.done():
                ending.result()
        finally:
            ending.cancel()
            await door.close()


async def _until_the_end(server: subprocess.Popen[bytes], watch_fd: int) -> None:
    """Raises when vLLM has ended; returns when our launcher is gone."""
    while not select.select([watch_fd], [], [], 0)[0]:
        if server.poll() is not None:
            raise UnderstudyError(f"vLLM ended with code {server.returncode}")
        await asyncio.sleep(_POLL_S)


async def _answers_now(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


def _run(server: subprocess.Popen[bytes], socket: str, ready_file: Path, watch_fd: int) -> None:
    ready = False
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://vllm", timeout=5) as client:
        while True:
            if server.poll() is not None:
                raise SystemExit(f"vLLM ended with code {server.returncode}")
            if not ready and _answers(client):
                ready = True
                temporary = ready_file.with_suffix(".tmp")
                temporary.write_text(json.dumps({"url": "http://vllm", "socket": socket, "pid": server.pid}))
                temporary.replace(ready_file)
            # Readable means closed: our launcher is gone.
            if select.select([watch_fd], [], [], _POLL_S)[0]:
                return


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


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
    main()
