"""Every request for a replica gets an answer, malformed ones too, and the run continues."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from understudy.assembly.teachers.admin import ask_run, open_for_requests
from understudy.assembly.teachers.running import Teachers
from understudy.errors import TeacherError
from understudy.observability.rundir import RunDir
from understudy.serving.endpoint import Endpoint
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.pool import TeacherPool


@pytest.mark.parametrize("url", ["http://localhost:99999", "http://[half", "localhost", "http://127.0.0.1:1"])
def test_adding_a_replica_at_an_unusable_address_returns_an_error_and_the_run_continues(
    tmp_path: Path, url: str
) -> None:
    run = RunDir(tmp_path)
    run.recipe.write_text("{}")
    run.state.write_text(json.dumps({"status": "running", "pid": os.getpid()}))
    pool = TeacherPool("add", [ReplicaSpec("0", Endpoint("http://127.0.0.1:1"))])

    async def asked() -> None:
        async with open_for_requests(run, Teachers({"add": pool})):
            with pytest.raises(TeacherError):
                await asyncio.to_thread(
                    ask_run, tmp_path, {"do": "add", "teacher": "add", "url": url}, timeout_s=10.0
                )
            assert await asyncio.to_thread(ask_run, tmp_path, {"do": "list"}, timeout_s=10.0) == {"add": []}

    asyncio.run(asyncio.wait_for(asked(), 60))
