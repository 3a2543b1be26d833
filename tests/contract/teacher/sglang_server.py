"""A real SGLang server, in the environment that UNDERSTUDY_SGLANG_PYTHON names (docs/teachers.md says how it was made)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm_server import answering, free_port

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ON_A_CPU = "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 16384"


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
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model), *ON_A_CPU.split()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--context-length", "256"]
    command += [
        "--mem-fraction-static",
        "0.5",
        "--max-running-requests",
        "32",
        "--skip-server-warmup",
        "--sleep-on-idle",
    ]
    with answering([*command, *options], port, log, ENVIRONMENT) as url:
        yield url
