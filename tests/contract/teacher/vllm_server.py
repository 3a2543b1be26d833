"""A real vLLM server, in the environment that UNDERSTUDY_VLLM_PYTHON names."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
START_SECONDS = 600


def vllm_python() -> str:
    """The Python that can import vllm. Skips the test if there is none."""
    python = os.environ.get("UNDERSTUDY_VLLM_PYTHON")
    if not python:
        pytest.skip("UNDERSTUDY_VLLM_PYTHON names no Python with vllm")
    return python


@contextmanager
def serving(
    model: Path, log: Path, options: Sequence[str], more: dict[str, str] | None = None
) -> Iterator[str]:
    """The address of a server that is ready. `more`: variables of its environment."""
    port = free_port()
    command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    with answering(
        [*command, "--enforce-eager", *options], port, log, {**ENVIRONMENT, **(more or {})}
    ) as url:
        yield url


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def answering(command: Sequence[str], port: int, log: Path, more: dict[str, str]) -> Iterator[str]:
    """Runs a server until the block ends; its address, once /health answers. `more`: variables of its environment."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env={**os.environ, **more}, stdout=stream, stderr=stream, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)
