"""The binary format of one cell: a small frame of our own, never pickle.

    byte 0   kind         which of the kinds below
    byte 1   dimensions   0 for anything but arrays
    2 … 7    zero
    8 …      shape        one u64 per dimension
    …        payload      little-endian values, UTF-8 text, JSON, or a reference into a spill file

Memory, the journal and spill files all hold the same frames, so a row reads the same before and after a
crash.

A row's columns written together make one *pack*: u16 count, then per column u16 name length, u64 frame
length, name, frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from understudy.dataplane.base import ARRAY_DTYPES
from understudy.errors import DataPlaneError

JSON, TEXT, FLOAT, SPILLED = 0, 1, 2, 3
FIRST_ARRAY = 16
_DTYPE_OF_KIND: dict[int, np.dtype[Any]] = {FIRST_ARRAY + i: dtype for i, dtype in enumerate(ARRAY_DTYPES)}
_KIND_OF_DTYPE = {dtype: kind for kind, dtype in _DTYPE_OF_KIND.items()}

_HEAD = struct.Struct("<BB6x")
_HEAD_OF_DIMS = (_HEAD, struct.Struct("<BB6xQ"), struct.Struct("<BB6xQQ"))
_FLOAT = struct.Struct("<BB6xd")
_REFERENCE = struct.Struct("<BB6xIQQI")
_COUNT = struct.Struct("<H")
_ENTRY = struct.Struct("<HQ")
_NOTHING = bytearray()

_SMALL = 4096
"""Below this many bytes, one more copy is cheaper than avoiding it."""

JSON_HEAD, TEXT_HEAD = _HEAD.pack(JSON, 0), _HEAD.pack(TEXT, 0)
_NULL = JSON_HEAD + b"null"
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode
"""Made once: `json.dumps` and `json.loads` check their options, and the encoding of bytes, at every call."""
_PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types whose values JSON can always encode."""


class SpillRef(NamedTuple):
    """The location of a large frame in a spill file."""

    segment: int
    offset: int
    length: int
    crc: int


def encode(column: str, value: Any) -> bytes:
    """The frame of one cell."""
    kind = type(value)  # the most common kinds first
    if kind is float:
        return _FLOAT.pack(FLOAT, 0, value)
    if value is None:
        return _NULL
    if kind is int:
        return JSON_HEAD + b"%d" % value
    if kind is str:
        return TEXT_HEAD + value.encode("utf-8", "surrogatepass")
    if kind is ndarray or isinstance(value, ndarray):
        head = _array_head(value.dtype, value.shape)
        if head is None:
            names = ", ".join(str(dtype) for dtype in ARRAY_DTYPES)
            raise DataPlaneError(
                f"column {column!r}: an array of {value.dtype} {value.shape}; arrays are 1-D or 2-D of {names}: cast it"
            )
        if value.nbytes < _SMALL:
            return head + value.tobytes()
        return b"".join((head, np.ascontiguousarray(value).data))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return _FLOAT.pack(FLOAT, 0, value)
    if isinstance(value, str):
        return TEXT_HEAD + value.encode("utf-8", "surrogatepass")
    if isinstance(value, dict | list | tuple) and not is_plain(value):
        _refuse_other_keys(column, value)
    try:
        return JSON_HEAD + _to_json(value).encode()
    except (TypeError, ValueError) as error:
        raise DataPlaneError(
            f"column {column!r}: {type(value).__name__} is neither a numpy array nor JSON ({error}); "
            "use `.numpy()` for tensors and plain numbers, strings, lists and dicts otherwise"
        ) from None


def check_encodable(column: str, value: Any) -> None:
    """Raise what `encode` would raise, without copying arrays."""
    if type(value) in _PLAIN or is_plain(value):
        return
    if not isinstance(value, ndarray) or _array_head(value.dtype, value.shape) is None:
        encode(column, value)


@lru_cache(maxsize=4096)
def _array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes | None:
    """The bytes before an array's values; None for a dtype or number of dimensions that cells do not
    support."""
    kind = _KIND_OF_DTYPE.get(dtype)
    if kind is None or len(shape) not in (1, 2):
        return None
    return _HEAD_OF_DIMS[len(shape)].pack(kind, len(shape), *shape)


def is_plain(value: Any) -> bool:
    """Whether this is a flat dict from strings to strings, numbers and None: always valid JSON, nothing to
    search."""
    return (
        type(value) is dict
        and _PLAIN.issuperset(map(type, value.values()))
        and set(map(type, value)) <= {str}
    )


def _refuse_other_keys(column: str, value: Any) -> None:
    """Raise for dict keys that are not strings: JSON would silently turn the key 1 into "1"."""
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise DataPlaneError(f"column {column!r}: the dict key {wrong!r} is not a string; JSON keys are")
        value = value.values()
    for item in value:
        if isinstance(item, dict | list | tuple):
            _refuse_other_keys(column, item)


def decode(frame: bytes) -> Any:
    """The cell a frame holds; arrays are read-only views of it."""
    kind = frame[0]
    if kind >= FIRST_ARRAY:
        dims = frame[1]
        shape = _HEAD_OF_DIMS[dims].unpack_from(frame)[2:]
        return np.frombuffer(frame, _DTYPE_OF_KIND[kind], offset=8 + 8 * dims).reshape(shape)
    if kind == FLOAT:
        return _FLOAT.unpack(frame)[2]
    if kind == TEXT:
        return frame[8:].decode("utf-8", "surrogatepass")
    if kind == JSON:
        return _from_json(frame[8:].decode())
    raise DataPlaneError(f"a frame of unknown kind {kind}: the journal is from a newer version or damaged")


def joined_arrays(frames: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray] | None:
    """(concatenated values, int64 [frames + 1] offsets) of frames that hold arrays of one dtype and width;
    else None.

    Joins the bytes of all frames at once: one numpy array per frame costs more than its few bytes."""
    first = frames[0] if frames else b"\0\0"
    kind, dims = first[0], first[1]
    if kind < FIRST_ARRAY:
        return None
    start = 8 + 8 * dims
    # Heads may differ only in the first dimension's length.
    alike, width = first[:8], first[16:start]
    if any(frame[:8] != alike or frame[16:start] != width for frame in frames):
        return None
    offsets = np.zeros(len(frames) + 1, np.int64)
    np.cumsum([int.from_bytes(frame[8:16], "little") for frame in frames], out=offsets[1:])
    body = _NOTHING.join(
        [frame[start:] if len(frame) < _SMALL else memoryview(frame)[start:] for frame in frames]
    )
    values = np.frombuffer(body, _DTYPE_OF_KIND[kind])
    if dims == 2:
        values = values.reshape(int(offsets[-1]), int.from_bytes(width, "little"))
    return values, offsets


def encode_reference(ref: SpillRef) -> bytes:
    return _REFERENCE.pack(SPILLED, 0, *ref)


def pack(frames: Mapping[str, bytes | SpillRef]) -> bytearray:
    """Columns written together, as one blob.

    A `bytearray`, because Python's sqlite3 binds those directly but looks for an adapter of `bytes` first.
    """
    parts = [_count(len(frames))]
    for name, cell in frames.items():
        frame = cell if type(cell) is bytes else encode_reference(cell)  # type: ignore[arg-type]
        parts += (_entry(name, len(frame)), frame)
    return _NOTHING.join(parts)


@lru_cache(maxsize=256)
def _count(columns: int) -> bytes:
    return _COUNT.pack(columns)


@lru_cache(maxsize=4096)
def _entry(name: str, length: int) -> bytes:
    """A frame's header in a pack: name length, frame length, name."""
    encoded = name.encode()
    return _ENTRY.pack(len(encoded), length) + encoded


def unpack(body: bytes) -> dict[str, bytes | SpillRef]:
    """The reverse of `pack`; references are not followed."""
    frames: dict[str, bytes | SpillRef] = {}
    place = _COUNT.size
    for _ in range(_COUNT.unpack_from(body)[0]):
        name_length, length = _ENTRY.unpack_from(body, place)
        start = place + _ENTRY.size + name_length
        name = body[start - name_length : start].decode()
        place = start + length
        frame = body[start:place]
        if len(frame) != length:
            raise DataPlaneError(f"column {name!r}: {len(frame)} of {length} bytes; the journal is damaged")
        frames[name] = SpillRef(*_REFERENCE.unpack(frame)[2:]) if frame[0] == SPILLED else frame
    return frames
