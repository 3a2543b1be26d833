"""Pictures of a row as parts of its messages: from an `images` column, or from content parts.

| shape                                                          | seen in                 |
|----------------------------------------------------------------|-------------------------|
| `images` column, `<image>` in a text message                   | verl, TRL               |
| `images` column, parts `{"type": "image"}`, perhaps with `index` | Hugging Face            |
| `images` column, neither: before the first user message        | TRL                     |
| part `{"type": "image", "image" or "url" or "path": …}`         | Hugging Face            |
| part `{"type": "image_url", "image_url": {"url": "data:…"}}`    | OpenAI                  |

A picture whose source cannot be used is a part with `error`; its row becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.errors import DataError
from understudy.media.pictures import PictureError, as_source, source_of

IMAGES = ("images", "image")
NOT_READ = ("videos", "video", "audios", "audio")
_MARKER = "<image>"
"""Where a picture stands in a text message of a row with an `images` column."""

Part = str | dict[str, Any]
"""Text, or a picture; `{"type": "image"}` alone takes the next of the row's images."""


def images_of(place: str, row: Mapping[str, Any]) -> list[Any]:
    name = next((name for name in IMAGES if row.get(name)), None)
    given = row.get(name) if name else []
    if name is None or isinstance(given, list | tuple):
        return list(given or ())
    if isinstance(given, str | bytes | Mapping) or hasattr(given, "save"):
        return [given]
    raise DataError(f"{place}: {name} is a {type(given).__name__}; expected a list of paths or bytes")


def part_of(place: str, part: Any, folder: Path | None) -> Part:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("image", "image_url"):
        given = source_of(part)
        return _picture(given, folder) if given else {"type": "image", **_index(place, part)}
    if kind in ("video", "video_url", "audio", "audio_url", "input_audio"):
        raise DataError(f"{place} is of type {kind!r}; only text and images are read")
    raise DataError(
        f'{place} is of type {kind!r}; expected {{"type": "text", "text": "…"}} or {{"type": "image", "image": "path"}}'
    )


def _index(place: str, part: Mapping[str, Any]) -> dict[str, int]:
    number = part.get("index")
    if number is not None and not (type(number) is int and number >= 0):
        raise DataError(
            f"{place} has index = {number!r}; expected the number of one of the row's images, from 0"
        )
    return {} if number is None else {"index": number}


def _picture(given: Any, folder: Path | None) -> dict[str, Any]:
    try:
        return {"type": "image", "image": as_source(given, folder)}
    except PictureError as error:
        return {"type": "image", "error": str(error)}


def merged(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts if part != ""]


def with_images(place: str, messages: list[Any], images: Sequence[Any], folder: Path | None) -> list[Any]:
    """The messages with the pictures of the row's `images` column at their places."""
    left = [_picture(image, folder) for image in images]
    empty = [part for message in messages for part in _parts(message) if _is_empty(part)]
    if not left and not empty:
        return messages
    marks = sum(message["content"].count(_MARKER) for message in messages if _is_asked(message))
    room = len(empty) or marks
    if room and len(left) != room:
        where = "parts of type image" if empty else _MARKER
        raise DataError(
            f"{place} has {len(left)} image(s), and its messages have room for {room} ({where}); expected as many"
        )
    coming = iter(left)
    if empty:
        named = [part["index"] for part in empty if "index" in part]
        if named:  # each of them once, in any order
            if sorted(named) != list(range(len(left))):
                raise DataError(
                    f"{place} has {len(left)} image(s), and the parts of type image name {named} (`index`); expected each once"
                )
            coming = (left[number] for number in named)
        return [
            {**message, "content": [next(coming) if _is_empty(part) else part for part in _parts(message)]}
            if _parts(message)
            else message
            for message in messages
        ]
    if marks:
        return [_marked(message, coming) if _is_asked(message) else message for message in messages]
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DataError(f"{place} has images and no user message to show them in")
    asked = messages[first]
    own = _parts(asked) or [{"type": "text", "text": asked["content"]}]
    return [*messages[:first], {**asked, "content": [*left, *own]}, *messages[first + 1 :]]


def _is_empty(part: Mapping[str, Any]) -> bool:
    """Whether it stands for one of the row's images."""
    return part.get("type") == "image" and not {"image", "error"} & part.keys()


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_asked(message: Mapping[str, Any]) -> bool:
    """Whether markers in it stand for pictures."""
    return isinstance(message.get("content"), str) and message["role"] != "assistant"


def _marked(message: Mapping[str, Any], coming: Iterator[dict[str, Any]]) -> dict[str, Any]:
    texts = str(message["content"]).split(_MARKER)
    if len(texts) == 1:
        return dict(message)
    parts: list[Part] = [texts[0]]
    for text in texts[1:]:
        parts += [next(coming), text]
    return {**message, "content": merged(parts)}
