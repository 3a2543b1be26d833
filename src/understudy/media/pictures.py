"""Reads pictures from paths, data URLs and bytes, and refuses what cannot or should not be decoded.

A picture in a message is a content part `{"type": "image", "image": source}`. The source is a path, a data
URL, or, once the picture is stored, `sha256:…`. A picture that cannot be used is a part with `error`, and its
row becomes a dead letter with that reason when it is rendered. Imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.errors import DataError
from understudy.media.sources import PictureSources
from understudy.media.store import MediaStore, hash_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Formats that are decoded; PIL knows others, some of which run programs."""
STORED = "sha256:"
MAX_BYTES = 20 << 20
MAX_PIXELS = 1 << 25
_TURNED = (5, 6, 7, 8)
"""Values of the EXIF orientation under which width and height change places."""
_ORIENTATION = 0x0112
_OPENING = threading.Lock()
"""Held while warnings are off: they are off for all threads, and two that restore them would mix."""


class PictureError(DataError):
    """A picture that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class PictureLimits:
    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS


def size_of(data: bytes, name: str = "the picture", limits: PictureLimits | None = None) -> tuple[int, int]:
    """(width, height) as decoded, read from the header."""
    with _opened(data, name, limits or PictureLimits()) as image:
        return _shown_size(image)


def check_picture(data: bytes, name: str, limits: PictureLimits) -> tuple[int, int]:
    """Decodes the picture once; (width, height), or `PictureError` with the reason."""
    if len(data) > limits.max_bytes:
        raise PictureError(f"{name} has {len(data)} bytes; data.max_image_bytes is {limits.max_bytes}")
    with _opened(data, name, limits) as image:
        try:
            image.load()
        except Exception as error:  # decoders raise many kinds of errors
            raise PictureError(f"{name} cannot be decoded: {_short(error)}") from None
        return _shown_size(image)


def decoded(data: bytes, name: str = "the picture") -> Any:
    """The picture as a PIL image, turned as its EXIF data says. The model's processor converts its colours."""
    with _opened(data, name, PictureLimits(max_pixels=1 << 40)) as image:
        return _pil().ImageOps.exif_transpose(image)


def as_plain_url(data: bytes, size: tuple[int, int] | None = None, resample: Any = None) -> str:
    """A data URL for another program: pictures that it could turn or mix with a background become plain RGB.
    `size`: (width, height) to resize to."""
    with _opened(data, "the picture", PictureLimits(max_pixels=1 << 40)) as image:
        plain = image.mode == "RGB" and image.getexif().get(_ORIENTATION, 1) == 1
        resized = size is not None and _shown_size(image) != size
    if not plain or resized:
        image, buffer = decoded(data).convert("RGB"), io.BytesIO()
        (image.resize(size, resample) if resized else image).save(buffer, format="PNG")
        data = buffer.getvalue()
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def _opened(data: bytes, name: str, limits: PictureLimits) -> Any:
    pil = _pil()
    try:
        with _OPENING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of large pictures; `limits` decides
            image = pil.Image.open(io.BytesIO(data), formats=FORMATS)
    except pil.Image.DecompressionBombError:
        raise PictureError(
            f"{name} claims far more pixels than data.max_image_pixels = {limits.max_pixels} allows"
        ) from None
    except Exception:  # decoders raise many kinds of errors, and say little
        raise PictureError(f"{name} is not a readable picture ({', '.join(FORMATS)})") from None
    width, height = image.size
    problem = ""
    if width * height > limits.max_pixels:
        problem = f"has {width} × {height} pixels; data.max_image_pixels is {limits.max_pixels}"
    elif getattr(image, "n_frames", 1) > 1:
        problem = f"is animated ({image.n_frames} frames); give a single picture"
    if problem:
        image.close()
        raise PictureError(f"{name} {problem}")
    return image


def _shown_size(image: Any) -> tuple[int, int]:
    width, height = image.size
    try:
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    except Exception:
        turned = False
    return (height, width) if turned else (width, height)


def reduced(data: bytes, side: int) -> bytes:
    """The picture as a JPEG whose longer side has at most `side` pixels."""
    try:
        image = decoded(data).convert("RGB")
        image.thumbnail((side, side))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=80)
    except PictureError:
        raise
    except Exception as error:  # decoders raise many kinds of errors
        raise PictureError(f"the picture cannot be decoded: {_short(error)}") from None
    return buffer.getvalue()


_SIGNS = (
    (rb"\x89PNG\r\n\x1a\n", "image/png"),
    (rb"\xff\xd8\xff", "image/jpeg"),
    (rb"GIF8[79]a", "image/gif"),
    (rb"BM", "image/bmp"),
    (rb"RIFF....WEBP", "image/webp"),
)


def media_type(data: bytes) -> str | None:
    """The type of a picture by its first bytes; None for any other file."""
    return next((name for sign, name in _SIGNS if re.match(sign, data, re.DOTALL)), None)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _pil() -> Any:
    try:
        importlib.import_module("PIL.ImageOps")
        return importlib.import_module("PIL")
    except ImportError:
        raise DataError('pictures need Pillow: pip install "understudy[images]"') from None


def as_source(value: Any, folder: Path | None) -> str:
    """What a data file has for one picture, as a path or a data URL.

    Known shapes: a path (relative to `folder`, that of the data file), a data URL, bytes, a PIL image, and
    mappings with `bytes`, `path`, `image`, `url`, `base64` or `image_url`.
    """
    if isinstance(value, Mapping):
        return _of_mapping(value, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return data_url(bytes(value))
    if isinstance(value, str) and value:
        return _of_text(value, folder)
    if hasattr(value, "save") and hasattr(value, "size"):  # a PIL image
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return data_url(buffer.getvalue())
    raise PictureError(f"a picture is given as {type(value).__name__}; expected a path, bytes or a data URL")


def _of_mapping(value: Mapping[str, Any], folder: Path | None) -> str:
    for name in ("bytes", "path", "image", "url", "image_url", "base64"):
        inner = value.get(name)
        if inner is None:
            continue
        return data_url_of_text(inner) if name == "base64" else as_source(inner, folder)
    raise PictureError(
        f"a picture has the keys {', '.join(map(str, value)) or 'none'}; expected bytes or path"
    )


def _of_text(value: str, folder: Path | None) -> str:
    if value.startswith(("data:", STORED)):
        return value
    if value.startswith(("http://", "https://")):
        raise PictureError(f"{value[:80]} is not fetched; download pictures and name their files")
    value = value.removeprefix("file://")
    path = Path(value)
    with suppress(RuntimeError):  # a file whose name begins with ~, and no user's folder
        path = path.expanduser()
    return str(path if path.is_absolute() or folder is None else (folder / path).absolute())


def source_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a content part names as its picture. Columnar formats give it the `text` of text parts too; one with an `index`
    alone stands for one of the row's images."""
    return {
        name: value
        for name, value in part.items()
        if name not in ("type", "text", "index") and value is not None
    }


def portable_row(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row with its pictures as absolute paths and data URLs, which JSON can hold."""
    changed = dict(row)
    for name in ("images", "image"):
        if (given := row.get(name)) is not None:
            changed[name] = [
                _portable(one, folder) for one in (given if isinstance(given, list | tuple) else [given])
            ]
    for name in ("messages", "prompt"):
        if isinstance(given := row.get(name), list | tuple):
            changed[name] = [_portable_message(message, folder) for message in given]
    return changed


def _portable(value: Any, folder: Path) -> Any:
    try:
        return as_source(value, folder)
    except PictureError:
        return value  # the row's check says what is wrong with it


def _portable_message(message: Any, folder: Path) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message

    def portable(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
            return part
        given = source_of(part)
        return {"type": "image", "image": _portable(given, folder)} if given else part

    return {**message, "content": [portable(part) for part in content]}


def data_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def data_url_of_text(text: Any) -> str:
    if not isinstance(text, str):
        raise PictureError(f"a picture's base64 is a {type(text).__name__}; expected text")
    return f"data:;base64,{text}"


@dataclass(slots=True)
class Pictures:
    """Puts the pictures of prompts into a store. Used by the process that reads the dataset."""

    store: MediaStore
    limits: PictureLimits = field(default_factory=PictureLimits)
    sources: PictureSources | None = None
    """Which files gave the pictures of earlier launches; None: files are read as they are now."""
    _known: dict[str, str] = field(default_factory=dict)
    """File → hash of those stored in this launch."""

    def stored(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with every picture stored, or with the reason why it cannot be."""
        return [
            {**message, "content": [self._part(part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _part(self, part: Any) -> Any:
        source = part.get("image") if isinstance(part, Mapping) and part.get("type") == "image" else None
        if not isinstance(source, str) or source.startswith(STORED):
            return part
        try:
            return {"type": "image", "image": STORED + self._put(source)}
        except DataError as error:
            return {"type": "image", "error": str(error)}

    def _put(self, source: str) -> str:
        if (known := self._known.get(source)) is not None:
            return known
        if source.startswith("data:"):
            return self.store.put(self.read(source))
        name = self.sources.stored(source) if self.sources is not None else None
        if name is None:
            name = self.store.put(self.read(source))
            if self.sources is not None:
                self.sources.add(source, name)
        self._known[source] = name
        return name

    def read(self, source: str) -> bytes:
        """The checked bytes of a source."""
        name, data = _read(source, self.limits)
        check_picture(data, name, self.limits)
        return data


@dataclass(slots=True)
class PictureSizes(Pictures):
    """Stores nothing: a picture is known by the hash of its source, and its size is read from the header. Enough
    to render prompts for their lengths."""

    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def _put(self, source: str) -> str:
        name = hash_of(source.encode())
        if name not in self.sizes:
            self.sizes[name] = self.size(source)
        return name

    def size(self, source: str) -> tuple[int, int]:
        """(width, height)."""
        name, data = _read(source, self.limits)
        return size_of(data, name, self.limits)


def _read(source: str, limits: PictureLimits) -> tuple[str, bytes]:
    if source.startswith("data:"):
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise PictureError("a picture's data URL is not base64; expected data:image/png;base64,…")
        if len(body) > limits.max_bytes * 4 // 3 + 4:
            raise PictureError(
                f"a picture's data URL has {len(body)} characters; data.max_image_bytes is {limits.max_bytes}"
            )
        try:
            return "the picture of a data URL", base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise PictureError(f"a picture's data URL is not base64: {error}") from None
    path = Path(source)
    try:
        if not path.is_file():
            raise PictureError(f"the picture {source} {'is no file' if path.exists() else 'does not exist'}")
        if (size := path.stat().st_size) > limits.max_bytes:
            raise PictureError(
                f"the picture {source} has {size} bytes; data.max_image_bytes is {limits.max_bytes}"
            )
        return f"the picture {source}", path.read_bytes()
    except OSError as error:
        raise PictureError(f"the picture {source} cannot be read ({error.strerror or error})") from None


def usable_hashes(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hashes of the stored pictures; none if one of them is not usable, which rendering reports."""
    try:
        return list(hashes_in(messages))
    except PictureError:
        return []


def hashes_in(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Hashes of the stored pictures, in the order of their parts; `PictureError` for one that is not usable."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or part.get("type") != "image":
                continue
            if error := part.get("error"):
                raise PictureError(str(error))
            source = part.get("image")
            if not isinstance(source, str) or not source.startswith(STORED):
                raise PictureError("a message holds a picture that was not stored")
            found.append(source.removeprefix(STORED))
    return tuple(found)
