"""Adds and removes teacher replicas of a running run, on requests from another process.

    understudy teachers RUN add math ──> RUN/teachers/<id>.ask  ──> the run, which looks twice a second
                                     <── RUN/teachers/<id>.done <── the result

Requests are files, so the permissions of the run's folder decide who may send them. No port and no token is
needed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import TeacherError, UnderstudyError
from understudy.observability.rundir import RunDir, read_json, write_atomically

if TYPE_CHECKING:  # the module imports torch, which the asking process does not need
    from understudy.assembly.teachers.running import Teachers

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5


def folder_of(run: RunDir) -> Path:
    return run.path / "teachers"


@asynccontextmanager
async def open_for_requests(run: RunDir, teachers: Teachers) -> AsyncIterator[None]:
    """While this context is open, the run answers `ask_run`."""
    folder = folder_of(run)
    folder.mkdir(exist_ok=True)
    for stale in [
        *folder.glob("*.ask"),
        *folder.glob("*.done"),
    ]:  # left by an earlier launch
        stale.unlink()
    listening = asyncio.create_task(_listen(folder, teachers), name="teacher-admin")
    try:
        yield
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


def ask_run(path: Path, request: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
    """Send a request to a running run and wait for its answer.

    A request is `{"do": "list" | "add" | "remove", "teacher": …, …}`."""
    run = RunDir.open(path)
    _check_running(run)
    name = secrets.token_hex(8)
    asked, done = folder_of(run) / f"{name}.ask", folder_of(run) / f"{name}.done"
    if not folder_of(run).is_dir():
        raise TeacherError(f"{path} has not started its teachers yet; ask again in a moment")
    write_atomically(asked, json.dumps(dict(request)))
    until = time.monotonic() + timeout_s
    while not done.exists():
        try:
            _check_running(run)
            if time.monotonic() > until:
                raise TeacherError(
                    f"{path} did not answer within {timeout_s:.0f} s; its log is in {run.logs}"
                )
        except TeacherError:
            asked.unlink(missing_ok=True)
            raise
        time.sleep(_LOOK_SECONDS / 5)
    answer = dict(read_json(done))
    done.unlink()
    if "error" in answer:
        raise TeacherError(str(answer["error"]))
    return answer


def _check_running(run: RunDir) -> None:
    state = read_json(run.state)
    try:
        if state.get("status") == "running":
            os.kill(int(state["pid"]), 0)
            return
    except ProcessLookupError:
        pass
    except PermissionError:  # alive, and owned by another user
        return
    raise TeacherError(
        f"{run.path} is not running; replicas can only be added to and removed from a live run"
    )


async def _listen(folder: Path, teachers: Teachers) -> None:
    while True:
        for asked in sorted(folder.glob("*.ask")):
            try:
                answer = await _answered(teachers, asked)
                asked.unlink(missing_ok=True)
                write_atomically(asked.with_suffix(".done"), json.dumps(answer))
            except OSError:
                # A full disk, a removed folder: the asking process gets no answer, and the run continues.
                logger.exception("could not answer %s", asked.name)
        await asyncio.sleep(_LOOK_SECONDS)


async def _answered(teachers: Teachers, asked: Path) -> dict[str, Any]:
    try:
        answer = await _carry_out(teachers, read_json(asked))
    except UnderstudyError as error:
        answer = {"error": str(error)}
    except Exception as error:  # an invalid port, half a file: no request ends a run
        answer = {"error": f"{type(error).__name__}: {error}"}
    logger.info("asked for %s: %s", asked.name, answer)
    return answer


async def _carry_out(teachers: Teachers, request: Mapping[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "add":
            return {"added": await teachers.add(request["teacher"], request.get("url"))}
        case "remove":
            await teachers.remove(request["teacher"], request["replica"])
            return {"removed": request["replica"]}
        case "list":
            pools = [pool.metrics() for pool in teachers.pools.values()]
            return {pool.teacher: [asdict(replica) for replica in pool.replicas] for pool in pools}
        case other:
            raise TeacherError(f"asked to {other!r}; expected list, add or remove")
