"""The binary format of messages between our processes: a msgpack header, then raw little-endian arrays.

    frame  = prefix (16 bytes) · header (msgpack, zero-padded to a multiple of 8) · arrays (each padded to 8)
    prefix = magic "UDFR" · header bytes u32 · array bytes u64

A message is a `msgspec.Struct`, a dataclass or plain data, with numpy arrays and scalars anywhere in it. In the header an
array is an extension of type 1: its dtype, number of dimensions, place and shape. An integer of more than 64 bits is one of type 2.
Nothing is pickled and no array is converted to text. A frame that was truncated, extended or damaged raises `FrameError` before
anything is computed.

    decoder = Decoder(Answer)
    answer = decoder.decode(encode(Answer(3, tokens)))

Two formats stay apart: the teacher protocol, which other programs speak (`teacher/protocol.py`), and the cells
that the journal keeps on disk (`dataplane/frame.py`).
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from understudy.errors import UnderstudyError

MAGIC = b"UDFR"
PREFIX = struct.Struct("<4sIQ")
_ARRAY, _INTEGER = 1, 2
_KEPT = (msgspec.msgpack.Ext, bytes, bytearray, memoryview, datetime)
"""What msgpack has and JSON has not."""
_NOTE = struct.Struct("<3sBQ")
_SHAPES = [struct.Struct(f"<{dims}Q") for dims in range(9)]
_ALIGNED = 8
_PADDING = [bytes(-size % _ALIGNED) for size in range(_ALIGNED)]
"""By size modulo 8."""
_DTYPES = {
    np.dtype(name).str.encode(): np.dtype(name)
    for name in ("?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_body: ContextVar[memoryview] = ContextVar("body")
"""The arrays of the frame being decoded."""
Message = TypeVar("Message")


class FrameError(UnderstudyError):
    """Bytes arrived that are not a frame of the expected message."""


def encode(message: Any, other: Callable[[Any], Any] | None = None) -> bytes:
    """The frame of a message. `other` converts values that are neither arrays nor known to msgspec."""
    parts: list[Any] = []
    size = 0

    def note(value: Any) -> Any:
        nonlocal size
        if not isinstance(value, np.ndarray):
            if isinstance(value, np.generic):
                return value.item()
            if other is None:
                raise TypeError(f"a frame cannot hold a {type(value).__name__}")
            return other(value)
        code = _CODES.get(value.dtype)
        if code is None or not value.flags.c_contiguous:
            value = np.array(value, value.dtype.newbyteorder("<"), order="C")
            code = _CODES.get(value.dtype)
            if code is None:
                raise TypeError(f"a frame cannot hold an array of {value.dtype}")
        packed = _NOTE.pack(code, value.ndim, size) + _SHAPES[value.ndim].pack(*value.shape)
        parts.append(value)
        size += value.nbytes
        if rest := size % _ALIGNED:
            parts.append(_PADDING[rest])
            size += _ALIGNED - rest
        return msgspec.msgpack.Ext(_ARRAY, packed)

    try:
        header = msgspec.msgpack.encode(message, enc_hook=note)
    except OverflowError:  # an integer of more than 64 bits
        parts, size = [], 0
        plain = msgspec.to_builtins(message, enc_hook=note, builtin_types=_KEPT)
        header = msgspec.msgpack.encode(_with_wide_integers(plain))
    return b"".join([PREFIX.pack(MAGIC, len(header), size), header, _PADDING[len(header) % _ALIGNED], *parts])


def _with_wide_integers(value: Any) -> Any:
    """Plain data in which an integer that msgpack does not know is an extension of type 2."""
    if isinstance(value, dict):
        return {key: _with_wide_integers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_wide_integers(one) for one in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return msgspec.msgpack.Ext(_INTEGER, digits)
    return value


# msgspec before 0.22 raises TypeError for a map with an array as key.
_DAMAGED = (msgspec.MsgspecError, UnderstudyError, UnicodeDecodeError, RecursionError, TypeError)


class Decoder(Generic[Message]):
    """Decodes frames of one type of message. Has no state: any thread may use it."""

    def __init__(self, kind: type[Message] | Any, error: type[UnderstudyError] = FrameError) -> None:
        """`error` is raised for anything that is not a frame of `kind`."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind, ext_hook=_extension)
        self._error = error

    def decode(self, frame: bytes | bytearray | memoryview) -> Message:
        """The message. Its arrays are views of `frame`: writable if that is."""
        view = memoryview(frame)
        try:
            header_bytes, body_bytes = _sizes(view)
            body_start = PREFIX.size + header_bytes + -header_bytes % _ALIGNED
            if body_start + body_bytes != len(view):
                raise FrameError(
                    f"the prefix promises {body_start} + {body_bytes} bytes; the frame has {len(view)}"
                )
            token = _body.set(view[body_start:])
            try:
                return self._decoder.decode(view[PREFIX.size : PREFIX.size + header_bytes])
            finally:
                _body.reset(token)
        except FrameError as error:
            raise self._error(str(error)) from error
        except _DAMAGED as error:
            raise self._error(f"the header of a frame cannot be read: {error}") from error


async def read(reader: asyncio.StreamReader, most: int) -> bytearray | None:
    """The next frame of a stream, of at most `most` bytes; None once the peer is gone."""
    try:
        frame = bytearray(await reader.readexactly(PREFIX.size))
        header_bytes, body_bytes = _sizes(frame)
        size = header_bytes + -header_bytes % _ALIGNED + body_bytes
        if PREFIX.size + size > most:
            raise FrameError(f"a frame of {PREFIX.size + size} bytes; at most {most} are read")
        frame += await reader.readexactly(size)
        return frame
    except (asyncio.IncompleteReadError, OSError):
        # OSError: a write that failed raises its error (EPIPE, no route) in the reader.
        return None


def _sizes(frame: bytearray | memoryview) -> tuple[int, int]:
    """The bytes of header and arrays that a frame's prefix promises."""
    if len(frame) < PREFIX.size:
        raise FrameError(f"a frame has at least {PREFIX.size} bytes; {len(frame)} came")
    magic, header_bytes, body_bytes = PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {MAGIC!r}; {magic!r} came")
    return header_bytes, body_bytes


def _extension(code: int, note: memoryview) -> np.ndarray | int:
    """The array that a header's extension describes, or the integer that it is."""
    if code == _INTEGER:
        return int.from_bytes(note, "little", signed=True)
    body = _body.get()
    try:
        name, dims, start = _NOTE.unpack_from(note)
        shape = _SHAPES[dims].unpack(note[_NOTE.size :])
        dtype = _DTYPES[name]
    except (struct.error, KeyError, IndexError):
        raise FrameError(f"an extension of type {code} in the header describes no array") from None
    size = math.prod(shape) * dtype.itemsize
    if code != _ARRAY or start > len(body) or size > len(body) - start:
        raise FrameError(f"an array of {size} bytes at {start} in a frame with {len(body)} bytes of arrays")
    try:
        return np.ndarray(shape, dtype, body, start)
    except (ValueError, OverflowError) as error:  # an empty array with an impossible shape
        raise FrameError(f"an array of shape {shape}: {error}") from None
