"""The messages between the run and its rollout workers: length-prefixed msgpack, no pickle.

| message | from | meaning |
|---|---|---|
| `Hello` | worker | first message of a worker on another machine: token and number |
| `Setup`, `Ready` | run, worker | what the worker needs to make loops; it has made them |
| `Begin` | run | start a session |
| `Done`, `Stored`, `Failed` | worker | end of a session: its trajectories; or the `RowHandler`'s answer; or an error |
| `Judging` | worker | the loop has returned, the `RowHandler` computes rewards |
| `WorkRequest`, `WorkDone` | run, worker | other work of the `RowHandler`, and its answer |
| `CancelSession` | run | cancel a session or a work request |
| `Generate`, `Generated` | worker, run | a generation: its context, and what was written |
| `CancelGeneration` | worker | the loop no longer waits for this generation |

A message names its session by `session_id`, which the run assigns; a work request has one too. The bodies of work
requests and of `Stored` are bytes here; the worker's `RowHandler` and its counterpart in the run define them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.rollout.agents.agent import LostOutput
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory
from understudy.types.usable_ids import UsableIds

LARGEST_MESSAGE = 1 << 30
_LARGEST_HELLO = 4096
_HEAD = 4
"""Bytes before each message: its length."""


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
    extra: bytes = b""
    """Configuration of the worker's `RowHandler`."""


class Begin(msgspec.Struct, tag=True):
    session_id: int
    prompt: dict[str, Any]
    session: int
    sampling: dict[str, Any]
    context: int
    max_generated: int | None = None
    ticket: int | None = None
    """Set if the worker keeps the trajectories itself: the segment it writes them to."""


class WorkRequest(msgspec.Struct, tag=True):
    session_id: int
    name: str
    body: bytes
    ticket: int | None = None


class Generated(msgspec.Struct, tag=True):
    session_id: int
    generation_id: int
    tokens: bytes
    logprobs: bytes
    weight_versions: bytes
    stop_reason: str
    candidates: tuple[int, bytes] | None = None
    """K, and the bytes of int32 [N, K]."""


class CancelSession(msgspec.Struct, tag=True):
    session_id: int


class Ready(msgspec.Struct, tag=True):
    pass


class Generate(msgspec.Struct, tag=True):
    session_id: int
    generation_id: int
    tokens: bytes
    sampling: dict[str, Any]
    turn: int


class CancelGeneration(msgspec.Struct, tag=True):
    """The loop no longer waits for this generation."""

    session_id: int
    generation_id: int


class Done(msgspec.Struct, tag=True):
    session_id: int
    outputs: list[dict[str, Any]]
    """Trajectories, and `LostOutput`s in place of those that could not be packed."""


class Judging(msgspec.Struct, tag=True):
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


class Failed(msgspec.Struct, tag=True):
    session_id: int
    data_error: bool
    """Whether the row is at fault and `message` is for users; otherwise the loop raised, and it is a
    traceback."""
    message: str


ToWorker = Setup | Begin | WorkRequest | Generated | CancelSession
ToRun = Ready | Generate | CancelGeneration | Done | Judging | Stored | WorkDone | Failed
OF_GENERATION = (Generate, Generated, CancelGeneration)

_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_from_run = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(ToRun)


_loose = msgspec.msgpack.Decoder(dict[str, dict[Any, Any]])
_hellos = msgspec.msgpack.Decoder(Hello)


def frame(message: ToWorker | ToRun | Hello) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_HEAD, "little") + body


async def read_from_run(reader: asyncio.StreamReader) -> ToWorker | None:
    body = await _read(reader)
    return None if body is None else _from_run.decode(body)


async def read_from_worker(reader: asyncio.StreamReader) -> tuple[ToRun, int] | None:
    """The next message and its size in bytes; None once the worker is gone."""
    body = await _read(reader)
    return None if body is None else (_from_worker.decode(body), len(body) + _HEAD)


async def read_hello(reader: asyncio.StreamReader) -> Hello | None:
    """Reads from an unauthenticated peer: at most 4 KiB, and anything but a `Hello` raises `ValueError`."""
    body = await _read(reader, _LARGEST_HELLO)
    try:
        return None if body is None else _hellos.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


async def _read(reader: asyncio.StreamReader, most: int = LARGEST_MESSAGE) -> bytes | None:
    """One message; None once the peer is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(_HEAD), "little")
        if size > most:
            raise ValueError(f"a message of {size} bytes; at most {most} are read")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


def pack_prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "key": prompt.key,
        "ordinal": prompt.ordinal,
        "epoch": prompt.epoch,
        "data_source": prompt.data_source,
        "messages": [dict(message) for message in prompt.messages],
        "text": prompt.text,
        "columns": dict(prompt.columns),
    }


def unpack_prompt(fields: dict[str, Any]) -> Prompt:
    return Prompt(**{**fields, "messages": tuple(fields["messages"])})


def pack_sampling(sampling: Sampling) -> dict[str, Any]:
    fields = {name: getattr(sampling, name) for name in Sampling.__slots__}
    usable = sampling.usable
    return {**fields, "usable": None if usable is None else [usable.limit, *usable.holes]}


def unpack_sampling(fields: dict[str, Any]) -> Sampling:
    tuples = {name: tuple(fields[name]) for name in ("stop_ids", "stop_strings")}
    usable = fields["usable"] and UsableIds(fields["usable"][0], tuple(fields["usable"][1:]))
    return Sampling(**{**fields, **tuples, "usable": usable})


def pack_generation(session_id: int, generation_id: int, generation: Generation) -> Generated:
    return Generated(
        session_id,
        generation_id,
        generation.tokens.astype("<i4").tobytes(),
        generation.logprobs.astype("<f4").tobytes(),
        generation.weight_versions.astype("<i4").tobytes(),
        str(generation.stop_reason),
        _packed_ids(generation.candidate_ids),
    )


def unpack_generation(message: Generated) -> Generation:
    return Generation(
        np.frombuffer(message.tokens, "<i4").astype(np.int32),
        np.frombuffer(message.logprobs, "<f4").astype(np.float32),
        np.frombuffer(message.weight_versions, "<i4").astype(np.int32),
        StopReason(message.stop_reason),
        _unpacked_ids(message.candidates),
    )


def _packed_ids(ids: np.ndarray | None) -> tuple[int, bytes] | None:
    return None if ids is None else (ids.shape[1], ids.astype("<i4").tobytes())


def _unpacked_ids(packed: Sequence[Any] | None) -> np.ndarray | None:
    if packed is None:
        return None
    width, rows = packed
    return np.frombuffer(rows, "<i4").astype(np.int32).reshape(-1, width)


_STREAMS = {"tokens": "<i4", "loss_mask": "|b1", "behaviour_logprobs": "<f4", "weight_versions": "<i4"}


def pack_output(one: Trajectory) -> dict[str, Any]:
    """The trajectory, or the reason why it cannot be sent: a loop may put anything into `metrics` and
    `extra`."""
    try:
        return _pack_trajectory(one)
    except Exception as error:
        return {"key": one.key, "lost": f"{type(error).__name__}: {error}"}


def unpack_output(fields: dict[str, Any]) -> Trajectory | LostOutput:
    key = fields["key"]
    if "lost" in fields:
        why = f"its metrics or extra cannot be sent by its worker ({fields['lost']})"
        return LostOutput(key, f"row {key}: {why}; use plain texts, numbers, lists and tables")
    return _unpack_trajectory(fields)


def _pack_trajectory(one: Trajectory) -> dict[str, Any]:
    streams = {name: getattr(one, name).astype(kind).tobytes() for name, kind in _STREAMS.items()}
    rest = {"key": one.key, "stop_reason": str(one.stop_reason), "turns": one.turns, "reward": one.reward}
    ids = _packed_ids(one.candidate_ids)
    loose = _encoder.encode({"metrics": dict(one.metrics), "extra": dict(one.extra)})
    return {**streams, **rest, "loose": loose, "candidate_ids": ids}


def _unpack_trajectory(fields: dict[str, Any]) -> Trajectory:
    streams = {name: np.frombuffer(fields[name], kind).copy() for name, kind in _STREAMS.items()}
    ids = _unpacked_ids(fields["candidate_ids"])
    rest = {"stop_reason": StopReason(fields["stop_reason"]), "candidate_ids": ids}
    loose = _loose.decode(fields.pop("loose"))
    return Trajectory(**{**fields, **loose, **streams, **rest})
