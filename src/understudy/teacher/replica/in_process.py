"""A LoRA student's frozen base as its teacher, in the trainer's process (a `teacher.pool.launch.Launcher`).

    student  modules with adapters ─┐
                                    ├── the same base tensors: frozen, in memory once
    teacher  modules without       ─┘

The teacher's modules are those of a plain model, so no adapter is ever switched off or on. It is scored by the code
of any replica and asked by HTTP on the loopback. So the pool, its checks and the clients are the same.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from understudy.config import TeacherConfig
from understudy.errors import TeacherError
from understudy.serving.bind import bind_socket
from understudy.serving.endpoint import Endpoint
from understudy.serving.server import serving_here
from understudy.teacher.replica.app import build_app
from understudy.teacher.replica.assemble import build_worker
from understudy.teacher.replica.server import parse_args
from understudy.teacher.scoring.model import FrozenModel


@dataclass
class BaseTeacher:
    """The only replica of such a teacher. Started by its pool, on the event loop."""

    name: str
    teacher: TeacherConfig
    batching: str
    token: str
    base: FrozenModel
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    following: None = None
    _open: AsyncExitStack | None = None

    async def start(self, replica: str) -> Endpoint:
        if replica != "0":
            raise TeacherError(
                f"teacher {self.name} sits in the trainer's process (placement = 'trainer'), which has one replica"
            )
        await self.stop(replica)
        worker, manifest, vocabulary, media = await asyncio.to_thread(
            build_worker, self._arguments(), self.base
        )
        async with AsyncExitStack() as stack:
            worker.start()
            stack.callback(worker.stop)
            if media is not None:
                stack.callback(media.close)
            app: Any = build_app(worker, manifest, vocabulary, self.token, media=media)
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

    def last_words(self, replica: str) -> str:
        return ""

    def forget(self, replica: str) -> None:
        self.endpoints.pop(replica, None)

    def _arguments(self) -> Any:
        teacher = self.teacher
        words = [
            "--model", teacher.model, "--name", self.name, "--dtype", teacher.dtype, "--device", str(self.base.device),
            "--batching", self.batching, "--max-batch-tokens", str(teacher.max_batch_tokens),
        ]  # fmt: skip
        if teacher.context_length is not None:
            words += ["--max-length", str(teacher.context_length)]
        if teacher.revision is not None:
            words += ["--revision", teacher.revision]
        return parse_args(words)
