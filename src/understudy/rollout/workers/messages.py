"""The messages between the run and its rollout workers, as frames (`serving/frames.py`).

| message | from | meaning |
|---|---|---|
| `Hello` | worker | first message of a worker on another machine: token and number |
| `Setup`, `Ready` | run, worker | what the worker needs to make loops; it has made them |
| `Begin` | run | start a session |
| `Done`, `Stored`, `LoopFailed` | worker | end of a session: its trajectories; or the `RowHandler`'s answer; or an error |
| `LoopReturned` | worker | the loop has returned, the `RowHandler` computes rewards |
| `WorkRequest`, `WorkDone` | run, worker | other work of the `RowHandler`, and its answer |
| `CancelSession` | run | cancel a session or a work request |
| `GenerateCall`, `Generated` | worker, run | a generation: its context, and what was written |
| `CancelGeneration` | worker | the loop no longer waits for this generation |

A message names its session by `session_id`, which the run assigns; a work request has one too. The bodies of work
requests and of `Stored` are bytes here; the worker's `RowHandler` and its counterpart in the run define them.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.errors import DataError
from understudy.rollout.agents.agent import LostOutput, check_kinds
from understudy.serving import frames
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Origin, StopReason, Trajectory

LARGEST_MESSAGE = 1 << 30
_LARGEST_HELLO = 4096


class Hello(msgspec.Struct):
    """The first message of a worker on another machine."""

    token: str
    number: int


class Setup(msgspec.Struct, tag=True):
    """The run's first message: what the worker needs to make loops."""

    tokenizer: str
    agent: str
    options: dict[str, dict[str, Any]]
    context: int
    reserve: int
    template_options: dict[str, Any]
    import_paths: list[str]
    max_prompt: int | None = None
    truncate: bool = False
    pictures: str = ""
    """The folder of the run's pictures, if the student reads them; its processor is beside the tokenizer."""
    own_code: bool = False
    """Whether the tokenizer's class is code of the model's folder, which the recipe trusts."""
    extra: bytes = b""
    """Configuration of the worker's `RowHandler`."""


class Begin(msgspec.Struct, tag=True):
    session_id: int
    prompt: Prompt
    session: int
    sampling: Sampling
    context: int
    max_generated: int | None = None
    segment: int | None = None
    """Set if the worker keeps the trajectories itself: the segment it writes them to."""
    given: str | None = None
    """The prompt's column with the answer, instead of an agent loop."""


class WorkRequest(msgspec.Struct, tag=True):
    session_id: int
    name: str
    body: bytes
    segment: int | None = None


class Generated(msgspec.Struct, tag=True):
    session_id: int
    generation_id: int
    generation: Generation


class CancelSession(msgspec.Struct, tag=True):
    session_id: int


class Ready(msgspec.Struct, tag=True):
    pass


class GenerateCall(msgspec.Struct, tag=True):
    session_id: int
    generation_id: int
    tokens: np.ndarray
    sampling: Sampling
    turn: int
    media: list[str] = []


class CancelGeneration(msgspec.Struct, tag=True):
    """The loop no longer waits for this generation."""

    session_id: int
    generation_id: int


class Done(msgspec.Struct, tag=True):
    session_id: int
    outputs: list[tuple[str, bytes, str]]
    """Each output's key, the frame of its `Trajectory`'s fields, and why it cannot be sent, if so."""


class LoopReturned(msgspec.Struct, tag=True):
    """The loop returned this many trajectories; the worker's `RowHandler` now computes their rewards."""

    session_id: int
    outputs: int


class Stored(msgspec.Struct, tag=True):
    """The session is over and the `RowHandler` has stored its trajectories."""

    session_id: int
    body: bytes


class WorkDone(msgspec.Struct, tag=True):
    session_id: int
    body: bytes


class LoopFailed(msgspec.Struct, tag=True):
    session_id: int
    data_error: bool
    """Whether the row is at fault and `message` is for users; otherwise the loop raised, and it is a
    traceback."""
    message: str


ToWorker = Setup | Begin | WorkRequest | Generated | CancelSession
ToRun = Ready | GenerateCall | CancelGeneration | Done | LoopReturned | Stored | WorkDone | LoopFailed
OF_GENERATION = (GenerateCall, Generated, CancelGeneration)

_from_run: frames.Decoder[ToWorker] = frames.Decoder(ToWorker)
_from_worker: frames.Decoder[ToRun] = frames.Decoder(ToRun)
_hellos: frames.Decoder[Hello] = frames.Decoder(Hello)
# The fields, not the class: agent loops put anything into `metrics` and `extra`, and the run decides what to do
# with it.
_trajectories: frames.Decoder[dict[str, Any]] = frames.Decoder(dict[str, Any])


def frame(message: ToWorker | ToRun | Hello) -> bytes:
    return frames.encode(message, other=repr)


async def read_from_run(reader: asyncio.StreamReader) -> ToWorker | None:
    body = await frames.read(reader, LARGEST_MESSAGE)
    return None if body is None else _from_run.decode(body)


async def read_from_worker(reader: asyncio.StreamReader) -> tuple[ToRun, int] | None:
    """The next message and its size in bytes; None once the worker is gone."""
    body = await frames.read(reader, LARGEST_MESSAGE)
    return None if body is None else (_from_worker.decode(body), len(body))


async def read_hello(reader: asyncio.StreamReader) -> Hello | None:
    """Reads from an unauthenticated peer: at most 4 KiB, and anything but a `Hello` raises `FrameError`."""
    body = await frames.read(reader, _LARGEST_HELLO)
    return None if body is None else _hellos.decode(body)


_STREAMS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "weight_versions": np.int32,
    "candidate_ids": np.int32,
}


def pack_output(one: Trajectory) -> tuple[str, bytes, str]:
    """The trajectory, or the reason why it cannot be sent: a loop may put anything into it."""
    try:
        check_kinds(one)
        found = {field.name: getattr(one, field.name) for field in fields(one)}
        for name, kind in _STREAMS.items():
            if found[name] is not None:
                found[name] = found[name].astype(kind, copy=False)
        return one.key, frames.encode(found, other=repr), ""
    except DataError as error:
        return one.key, b"", str(error)
    except Exception as error:
        why = f"its metrics or extra cannot be sent by its worker ({type(error).__name__}: {error})"
        return one.key, b"", f"row {one.key}: {why}; use plain texts, numbers, lists and tables"


def unpack_output(key: str, body: bytes, lost: str) -> Trajectory | LostOutput:
    if lost:
        return LostOutput(key, lost)
    found = _trajectories.decode(bytearray(body))
    media = found["media"]
    own = {
        "stop_reason": StopReason(found["stop_reason"]),
        "media": None if media is None else tuple(media),
        "origin": Origin(found["origin"]),
    }
    return Trajectory(**{**found, **own})
