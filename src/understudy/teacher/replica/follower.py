"""New weights for a running replica, whose teacher follows the student.

    POST /v1/weights ──> tensors arrive ──> no batch is being scored ──> copied in ──> manifest of the version

Every batch is scored by one version. Its reply names the version, and so does the manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from understudy.errors import EngineError, TeacherError
from understudy.serving.http import Refused, as_json, read_body
from understudy.teacher.manifest import Manifest
from understudy.teacher.replica.scoring_queue import ScoringWorker
from understudy.teacher.scoring.model import weights_sha256
from understudy.teacher.scoring.scorer import TORN
from understudy.weights.broadcast import TransferBroken
from understudy.weights.orders import BROKEN_TRANSFER, LARGEST_ORDER, OrderedWeights, WeightsOrder

REFUSED = (
    (TransferBroken, BROKEN_TRANSFER, "transfer"),
    (EngineError, 422, "weights"),
    (TeacherError, 422, "weights"),
)


class Follower:
    """Changes a replica's weights, and its manifest with them. Used on the server's event loop."""

    def __init__(self, worker: ScoringWorker, manifest: Manifest, incoming: OrderedWeights) -> None:
        self.manifest = manifest
        self._worker = worker
        self._incoming = incoming
        self._taking = asyncio.Lock()

    async def take(self, http: Request) -> Response:
        body = await read_body(http, LARGEST_ORDER)
        try:
            order = msgspec.json.decode(body, type=WeightsOrder)
        except msgspec.MsgspecError as error:
            raise Refused(400, "order", f"expected a WeightsOrder as JSON: {error}") from error
        async with self._taking:
            tensors = await self._incoming.tensors(order)
            await asyncio.to_thread(
                self._worker.between_batches, lambda: self._replace(order.version, tensors)
            )
        return as_json({"version": self.manifest.version})

    def _replace(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        scorer = self._worker.scorer
        self.manifest = msgspec.structs.replace(self.manifest, weights_sha256="", version=TORN)
        scorer.take_weights(version, tensors)
        digest = weights_sha256(scorer.frozen.model)
        self.manifest = msgspec.structs.replace(self.manifest, weights_sha256=digest, version=version)
