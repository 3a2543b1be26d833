"""The critic's process.

    python -m understudy.assembly.processes.critic --run RUN --device cpu …

    bind the port ─> read the run's recipe ─> load ─> serve ─> write the ready file

It holds the same `Critic` as the trainer's process would, with the same threads and determinism settings. It
carries out one command at a time (`trainers/critic/messages.py`) on its own thread, so that it answers
/health while it computes. It ends on SIGTERM, and at once when the pipe given by `--watch-fd` closes, because
then its launcher is gone.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from understudy.assembly.cpu_threads import onednn_as_resolved, set_up_torch
from understudy.assembly.critic import critic_of
from understudy.assembly.this_machine import settings_of_run
from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.faults import point
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.ranks.rank_thread import RankThread
from understudy.policy.ranks.wire import batch_from, jagged_columns, jagged_from, pack, unpack
from understudy.policy.refused import RefusedRows
from understudy.serving.frames import FrameError
from understudy.serving.http import Gate, answering, as_json, read_body
from understudy.serving.process import Process, process_arguments, process_main
from understudy.serving.server import serve
from understudy.trainers.critic.local import Critic
from understudy.trainers.critic.messages import (
    PATH,
    refusal_as_json,
    result_as_json,
    sizes,
)

log = logging.getLogger("understudy.assembly.processes.critic")
_LARGEST_COMMAND = 1 << 35
"""The byte limit of a command: a batch, or a part of a state, which may be one large tensor."""
Answer = tuple[dict[str, Any], dict[str, torch.Tensor]]


class CriticCommands:
    """Carries out the trainer's commands, one at a time, on the critic's thread."""

    def __init__(self, critic: Critic) -> None:
        self._critic = critic
        critic.policy.on_bad_rows = self._remember
        self._refused: RefusedRows | None = None
        self._leaving: dict[str, torch.Tensor] = {}
        """The state that is being sent."""
        self._coming: dict[str, torch.Tensor] = {}
        """The state that is being received."""

    def carry_out(self, message: bytes) -> bytes:
        head, tensors = unpack(message)
        self._refused = None
        point("critic.after_command")
        try:
            answer, found = self._execute(head, tensors)
        except (UnderstudyError, torch.OutOfMemoryError) as error:
            log.warning("%s: %s", head["do"], error)
            answer, found = self._refusal(error), {}
        return pack({**answer, "step": self._critic.policy.step}, found)

    def _execute(self, head: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
        critic = self._critic
        match head["do"]:
            case "values":
                values = critic.values(batch_from(head["batch"], tensors), head["max_tokens"])
                return {}, jagged_columns("values", values)
            case "update":
                weights = jagged_from("weights", tensors)
                assert weights is not None
                result = critic.update(
                    batch_from(head["batch"], tensors), weights, head["max_tokens"], head["ends_step"]
                )
                return {"result": result_as_json(result)}, {}
            case "skip_step":
                critic.skip_step()
            case "state":
                state = critic.state()
                self._leaving = state.tensors()
                return {"progress": dict(state.progress), "bytes": sizes(self._leaving)}, {}
            case "part":
                return {}, {name: self._leaving.pop(name) for name in head["names"]}
            case "take":
                self._coming |= tensors
            case "load_state":
                coming, self._coming = self._coming, {}
                critic.load_state(PolicyState.of_tensors(coming, head["progress"]))
            case other:
                raise ConfigError(f"a critic knows no command {other!r}")
        return {}, {}

    def _refusal(self, error: UnderstudyError | torch.OutOfMemoryError) -> dict[str, Any]:
        answer: dict[str, Any] = {"refused": refusal_as_json(error), "untouched": self._critic.untouched}
        if self._refused is not None:
            answer["rows"] = {"keys": list(self._refused.rows.keys), "reason": self._refused.reason}
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return answer

    def _remember(self, refused: RefusedRows) -> None:
        """Keeps the refused rows, whose keys go into the answer. The trainer has the rows themselves."""
        self._refused = refused


def app_of(commands: CriticCommands, token: str | None) -> ASGIApp:
    thread = RankThread()

    async def command(http: Request) -> Response:
        message = await read_body(http, _LARGEST_COMMAND)
        answer = await asyncio.wrap_future(thread.submit(lambda: commands.carry_out(message)))
        return Response(answer, media_type="application/octet-stream")

    async def health(_: Request) -> Response:
        return as_json({"status": "ok"})

    routes = [
        Route(PATH, answering(command, (FrameError, 400, "frame")), methods=["POST"]),
        Route("/health", answering(health)),
    ]
    return Gate(Starlette(routes=routes), token)


async def run(process: Process) -> None:
    args, sock = process.args, process.bind()
    settings = settings_of_run(RunDir.open(args.run))
    if settings.critic is None:
        raise ConfigError(
            f"loss.advantage = {settings.learn.loss.advantage!r} has no critic; it is for 'gae'"
        )
    set_up_torch(settings.compute)
    with onednn_as_resolved(settings.compute):
        critic = critic_of(settings.critic, None, args.device)
        app = app_of(CriticCommands(critic), process.token)
        await serve(process, app, sock, what="the critic answers")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = process_arguments("understudy.assembly.processes.critic", __doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--device", required=True, help="cpu, cuda, cuda:1, …")
    return process_main(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
