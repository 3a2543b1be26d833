"""An engine process in which the base of a LoRA student is a teacher too (`teachers.NAME.placement = "engine"`).

    python -m understudy.assembly.processes.scoring_engine --model PATH --base JSON …

    engine   merged weights of adapted layers ─┐
                                               ├── the same tensors of the other layers
    teacher  kept base of adapted layers      ─┘

An engine that takes adapters keeps the base of adapted layers, to merge the next ones. The teacher has modules of its own
over that base, so nothing is in memory twice on its account. It is scored on a thread of its own beside the engine's;
on a GPU decoding has the stream of higher priority. The process is an engine process in all else
(`engines/hosted/process.py`): its socket, its token, its end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import torch

from understudy.engines.hosted.process import (
    arguments,
    begin,
    engine_main,
    engine_over,
    load_model,
    serve_engine,
)
from understudy.nn.pretrained import sharing_copy
from understudy.nn.vision import is_vision
from understudy.policy.load import context_length
from understudy.policy.lora import adapted_weights
from understudy.serving.process import Process
from understudy.teacher.replica.in_process import LoraBaseReplica, scoring_with
from understudy.teacher.scoring.model import FrozenModel
from understudy.weights.adapters import AdaptedModel


class EngineBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--base`: the teachers over the base, and which layers get adapters."""

    replicas: list[LoraBaseReplica]
    targets: list[str]
    """`student.lora.targets`."""
    freeze_vision: bool
    """Of a vision-language student only the language part gets adapters."""


def path_of(place: int) -> str:
    """Where the teacher at this place of `EngineBase.replicas` is asked, below the engine's address."""
    return f"/teachers/{place}"


async def run(process: Process) -> None:
    sock, args = begin(process), process.args
    asked = msgspec.json.decode(args.base, type=EngineBase)
    model = load_model(args).to(args.device)
    plain = sharing_copy(model).eval()  # before the engine puts kernels into its own modules
    engine, adapted = engine_over(model, args), AdaptedModel(model)
    language_only = asked.freeze_vision and is_vision(model)
    adapted.keep_base(plain, adapted_weights(plain, asked.targets, language_only=language_only))
    base = FrozenModel(plain, args.model, args.dtype, torch.device(args.device), context_length(plain))
    async with AsyncExitStack() as stack:
        beside = [
            (path_of(place), await stack.enter_async_context(scoring_with(one, base, process.token)))
            for place, one in enumerate(asked.replicas)
        ]
        await serve_engine(process, sock, engine, adapted, beside)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    parser.prog = "python -m understudy.assembly.processes.scoring_engine"
    parser.add_argument("--base", required=True, help="the teachers over the base, as JSON (`EngineBase`)")
    return engine_main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
