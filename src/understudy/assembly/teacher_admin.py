"""Replicas that join and leave while a run goes on, asked for from another terminal.

    understudy teachers RUN add math ──> RUN/teachers/<id>.ask ──> the run looks twice a second, does it,
                                    <── RUN/teachers/<id>.done <── and says how it went

Files, because whoever may write into a run's folder may command it, and nobody else can: no port, no token.
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

if TYPE_CHECKING:
    from understudy.assembly.teachers import Teachers  # brings torch, which whoever asks does not need

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5


def folder_of(run: RunDir) -> Path:
    return run.path / "teachers"


@asynccontextmanager
async def open_for_requests(run: RunDir, teachers: Teachers) -> AsyncIterator[None]:
    """While this is open, `ask_run` is answered."""
    folder = folder_of(run)
    folder.mkdir(exist_ok=True)
    for stale in [
        *folder.glob("*.ask"),
        *folder.glob("*.done"),
    ]:  # of an earlier launch; nobody waits for these
        stale.unlink()
    listening = asyncio.create_task(_listen(folder, teachers), name="teacher-admin")
    try:
        yield
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


def ask_run(path: Path, request: Mapping[str, Any], patience: float = 600.0) -> dict[str, Any]:
    """Ask a running run and wait for its answer: `{"do": "list" | "add" | "remove", "teacher": …, …}`."""
    run = RunDir.open(path)
    _check_running(run)
    name = secrets.token_hex(8)
    asked, done = folder_of(run) / f"{name}.ask", folder_of(run) / f"{name}.done"
    if not folder_of(run).is_dir():
        raise TeacherError(f"{path} has not started its teachers yet; ask again in a moment")
    write_atomically(asked, json.dumps(dict(request)))
    until = time.monotonic() + patience
    while not done.exists():
        try:
            _check_running(run)
            if time.monotonic() > until:
                raise TeacherError(f"{path} did not answer within {patience:.0f} s; its log is in {run.logs}")
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
    except PermissionError:  # somebody else's process, and alive
        return
    raise TeacherError(f"{run.path} is not running; replicas can only join and leave a run that goes on")


async def _listen(folder: Path, teachers: Teachers) -> None:
    while True:
        for asked in sorted(folder.glob("*.ask")):
            try:
                answer = await _answered(teachers, asked)
                asked.unlink(missing_ok=True)
                write_atomically(asked.with_suffix(".done"), json.dumps(answer))
            except (
                OSError
            ):  # a full disk, a folder taken away: whoever asked hears nothing, and the run goes on
                logger.exception("could not answer %s", asked.name)
        await asyncio.sleep(_LOOK_SECONDS)


async def _answered(teachers: Teachers, asked: Path) -> dict[str, Any]:
    try:
        answer = await _carry_out(teachers, read_json(asked))
    except UnderstudyError as error:
        answer = {"error": str(error)}
    except Exception as error:  # an address with a port there cannot be, half a file: no request ends a run
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
