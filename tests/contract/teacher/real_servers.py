"""Real vLLM and SGLang servers, in the environments that UNDERSTUDY_VLLM_PYTHON and UNDERSTUDY_SGLANG_PYTHON name."""

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
SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SGLANG_OPTIONS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --context-length 256 "
    "--max-total-tokens 16384 --max-running-requests 32 --mem-fraction-static 0.5 --skip-server-warmup --sleep-on-idle"
)
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


def sglang_python() -> str:
    """The Python that can import sglang. Skips the test if there is none."""
    python = os.environ.get("UNDERSTUDY_SGLANG_PYTHON")
    if not python:
        pytest.skip("UNDERSTUDY_SGLANG_PYTHON names no Python with sglang")
    return python


@contextmanager
def serving_sglang(model: Path, log: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server that is ready."""
    port = free_port()
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *SGLANG_OPTIONS.split()]
    with answering([*command, *options], port, log, SGLANG_ENVIRONMENT) as url:
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
