"""A LoRA student's frozen base as its teacher, in a process that holds the student: the trainer or an engine process.

    student  modules with adapters, or merged ─┐
                                               ├── the same base tensors: frozen, in memory once
    teacher  modules without                  ─┘

The teacher's modules are those of a plain model, so no adapter is ever switched off or on. It is scored by the code
of any replica, on a thread of its own, and asked by HTTP. So the pool, its checks and the clients are the same.

| `placement` | serves | its launcher |
|---|---|---|
| `trainer` | on a loopback socket of its own | `LoraBaseTeacher` |
| `engine` | beside the engine's routes (`assembly/processes/scoring_engine.py`) | `EngineTeachers` (`assembly/teachers/launchers.py`) |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
from starlette.types import ASGIApp

from understudy.config import TeacherConfig
from understudy.errors import TeacherError
from understudy.nn.pretrained import sharing_copy
from understudy.serving.bind import bind_socket
from understudy.serving.endpoint import Endpoint
from understudy.serving.server import serving_here
from understudy.teacher.replica.app import build_app
from understudy.teacher.replica.assemble import build_worker
from understudy.teacher.replica.server import parse_args
from understudy.teacher.scoring.model import FrozenModel


class LoraBaseReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a replica over the base; all others are the student's."""

    name: str
    batching: str
    max_batch_tokens: int
    context_length: int | None
    revision: str | None

    @classmethod
    def of(cls, name: str, teacher: TeacherConfig, batching: str) -> LoraBaseReplica:
        return cls(name, batching, teacher.max_batch_tokens, teacher.context_length, teacher.revision)

    def arguments(self, base: FrozenModel) -> list[str]:
        """Those of a replica in a process of its own (`server.py`)."""
        arguments = [
            "--model", base.path, "--name", self.name, "--dtype", base.dtype, "--device", str(base.device),
            "--batching", self.batching, "--max-batch-tokens", str(self.max_batch_tokens),
        ]  # fmt: skip
        if self.context_length is not None:
            arguments += ["--max-length", str(self.context_length)]
        if self.revision is not None:
            arguments += ["--revision", self.revision]
        return arguments


@asynccontextmanager
async def scoring_with(
    replica: LoraBaseReplica, base: FrozenModel, token: str | None
) -> AsyncIterator[ASGIApp]:
    """The HTTP application of a replica over a model in memory, and its thread until the end."""
    # Modules of its own: a scorer switches their attention, and several replicas score over the same tensors.
    base = replace(base, model=sharing_copy(base.model).eval())
    worker, manifest, vocabulary, media = await asyncio.to_thread(
        build_worker, parse_args(replica.arguments(base)), base
    )
    worker.start()
    try:
        yield build_app(worker, manifest, vocabulary, token, media=media)
    finally:
        worker.stop()
        if media is not None:
            media.close()


@dataclass
class LoraBaseTeacher:
    """The only replica of a teacher in the trainer's process. Started by its pool, on the event loop."""

    replica: LoraBaseReplica
    token: str
    base: FrozenModel
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    following: None = None
    _open: AsyncExitStack | None = None

    async def start(self, replica: str) -> Endpoint:
        if replica != "0":
            raise TeacherError(
                f"teacher {self.replica.name} sits in the trainer's process (placement = 'trainer'), which has one replica"
            )
        await self.stop(replica)
        async with AsyncExitStack() as stack:
            app = await stack.enter_async_context(scoring_with(self.replica, self.base, self.token))
            sock = stack.enter_context(bind_socket("127.0.0.1:0", self.token))
            url = await stack.enter_async_context(serving_here(app, sock))
            self._open = stack.pop_all()
        self.endpoints[replica] = Endpoint(url, self.token)
        return self.endpoints[replica]

    async def stop(self, replica: str) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened.aclose()

    def alive(self, replica: str) -> bool:
        return self._open is not None

    def end_of_log(self, replica: str) -> str:
        return ""

    def forget(self, replica: str) -> None:
        self.endpoints.pop(replica, None)
