"""Cuts pictures into patches as a model's own image processor does, and says which tokens stand for them.

| family             | a picture in the text                                   | goes into the model as               |
|--------------------|---------------------------------------------------------|--------------------------------------|
| Qwen2.5-VL, 3-VL   | one run of `<|image_pad|>`, one per merged patch        | `pixel_values`, `image_grid_thw`     |
| SmolVLM, Idefics3  | a block of `<image>` per tile, with row and column tags | `pixel_values`, `pixel_attention_mask` |

The renderer needs only a picture's size: it expands the one marker that the chat template writes. The model's
arrays are made where a forward runs (engine, trainer, teacher), from the bytes, once per picture and process.
transformers' PIL processors are used on every machine, so that all of them compute the same numbers.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from understudy.errors import DataError
from understudy.media.pictures import PictureError, as_plain_url, decoded, size_of
from understudy.media.store import MediaStore

QWEN = ("qwen2_5_vl", "qwen3_vl")
IDEFICS = ("smolvlm", "idefics3")
FAMILIES = (*QWEN, *IDEFICS)
NAMES = "Qwen2.5-VL, Qwen3-VL, SmolVLM and Idefics3"
VISION_PARTS = r".*\b(visual|vision_model|connector)\b.*"
"""Names of modules in their vision parts."""
_CACHED_BYTES = 256 << 20
_KEPT_URLS = 64
_THREADS = 4
"""Pictures that are read and cut at a time."""


def vision_family(config: Any) -> str | None:
    """The model_type of a vision-language model whose pictures are supported, else None."""
    family = getattr(config, "model_type", "")
    return str(family) if family in FAMILIES else None


@dataclass(slots=True)
class PictureProcessor:
    """One model's way of reading pictures. Used by any thread."""

    family: str
    image_processor: Any
    image_token: str
    image_token_id: int
    placeholder_ids: tuple[int, ...]
    """Ids that stand for media. They are part of prompts, and are never sampled."""
    placeholder_texts: tuple[str, ...]
    """Their texts: in a message they are ordinary text."""
    tile_tokens: int = 0
    """Placeholders per tile (SmolVLM and Idefics3)."""
    config: Any = None
    """The model's config."""
    tokenizer: Any = None
    _cache: OrderedDict[str, dict[str, np.ndarray]] = field(default_factory=OrderedDict)
    _cached_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def load(model: str, revision: str | None = None) -> PictureProcessor | None:
        """The processor of a model; None if it reads no pictures, or is of a family not supported here."""
        # Not imported at the top: it takes seconds, and `understudy check` imports this module without needing it.
        transformers: Any = importlib.import_module("transformers")
        # Asked of the file first: a model of another family may bring a config class of its own, which would have to be trusted.
        settings, _ = transformers.PretrainedConfig.get_config_dict(model, revision=revision)
        if settings.get("model_type") not in FAMILIES:
            return None
        config = transformers.AutoConfig.from_pretrained(model, revision=revision)
        try:
            images = transformers.AutoImageProcessor.from_pretrained(model, revision=revision, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise DataError(f"the image processor of {model} cannot be loaded: {reason}") from None
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
        return PictureProcessor.of(config, images, tokenizer)

    @staticmethod
    def of(config: Any, images: Any, tokenizer: Any) -> PictureProcessor:
        """From transformers' own parts."""
        ids = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
        known = [one for one in ids if isinstance(one, int) and 0 <= one < len(tokenizer)]
        if ids[0] not in known:
            raise DataError(
                f"the model's image_token_id is {ids[0]}; its tokenizer has {len(tokenizer)} tokens"
            )
        texts = tuple(str(text) for text in tokenizer.convert_ids_to_tokens(known))
        tile = 0
        if config.model_type in IDEFICS:
            vision = config.vision_config
            tile = int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
        return PictureProcessor(
            config.model_type, images, texts[0], known[0], tuple(known), texts, tile, config, tokenizer
        )

    def save(self, folder: Path | str) -> None:
        """Writes what `load` reads besides the tokenizer."""
        self.image_processor.save_pretrained(str(folder))
        if self.config is not None:
            self.config.save_pretrained(str(folder))

    @property
    def patching(self) -> dict[str, Any]:
        """What decides how many tokens a picture has. Student and teacher must agree on it."""
        images, own = self.image_processor, {"family": self.family, "image_token_id": self.image_token_id}
        if self.family in QWEN:
            own |= {"patch_size": images.patch_size, "merge_size": images.merge_size}
            return own | {"do_resize": bool(images.do_resize), "size": _plain(images.size)}
        own |= {"tile_tokens": self.tile_tokens, "splitting": bool(images.do_image_splitting)}
        return own | {"size": _plain(images.size), "max_image_size": _plain(images.max_image_size)}

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers a picture becomes."""
        images = self.image_processor
        names = (
            "do_normalize",
            "image_mean",
            "image_std",
            "rescale_factor",
            "resample",
            "temporal_patch_size",
        )
        own = {name: _plain(getattr(images, name)) for name in names if hasattr(images, name)}
        return {**self.patching, **own}

    def text_of(self, size: tuple[int, int]) -> str:
        """What stands for a picture of (width, height) in the text, in place of the template's marker."""
        if self.family in QWEN:
            return self.image_token * self.count(size)
        rows, columns = self._tiles(size)
        block = self.image_token * self.tile_tokens
        end = f"<fake_token_around_image><global-img>{block}<fake_token_around_image>"
        if not rows:
            return end
        lines = (
            "".join(f"<fake_token_around_image><row_{r + 1}_col_{c + 1}>{block}" for c in range(columns))
            + "\n"
            for r in range(rows)
        )
        return "".join(lines) + "\n" + end

    def ids_of(self, size: tuple[int, int]) -> list[int]:
        """The ids of `text_of`."""
        return list(self.tokenizer(self.text_of(size), add_special_tokens=False)["input_ids"])

    def count(self, size: tuple[int, int]) -> int:
        """Placeholder ids of a picture of (width, height)."""
        if self.family in QWEN:
            return int(self._patches(size)) // int(self.image_processor.merge_size) ** 2
        rows, columns = self._tiles(size)
        return (rows * columns + 1) * self.tile_tokens

    def _tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        _, rows, columns = self._patches(size)
        return int(rows), int(columns)

    def _patches(self, size: tuple[int, int]) -> Any:
        width, height = size
        try:
            return self.image_processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise PictureError(f"a picture of {width} × {height} pixels is refused: {error}") from None

    def arrays(self, name: str, store: MediaStore) -> dict[str, np.ndarray]:
        """The model's inputs for one stored picture; the latest ones are kept."""
        with self._lock:
            if (found := self._cache.get(name)) is not None:
                self._cache.move_to_end(name)
                return found
        made = self.process(store.get(name))
        with self._lock:
            if name not in self._cache:
                self._cache[name] = made
                self._cached_bytes += _bytes(made)
            while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= _bytes(self._cache.popitem(last=False)[1])
        return made

    def process(self, data: bytes) -> dict[str, np.ndarray]:
        """float32 and integer arrays by the name under which the model takes them. The first axis counts
        patches (Qwen) or tiles, the grid's first axis pictures."""
        try:
            found = self.image_processor(images=[decoded(data)], return_tensors="np")
        except ValueError as error:
            raise PictureError(f"a picture is refused by the model's processor: {error}") from None
        if self.family in QWEN:
            return {name: np.asarray(found[name]) for name in ("pixel_values", "image_grid_thw")}
        return {name: np.asarray(found[name])[0] for name in ("pixel_values", "pixel_attention_mask")}


class PictureReader:
    """A processor with the store that it reads from: hashes in, sizes, counts and arrays out. `size` is for
    pictures that are not stored (`PictureSizes`)."""

    def __init__(
        self,
        processor: PictureProcessor,
        store: MediaStore,
        size: Callable[[str], tuple[int, int]] | None = None,
    ) -> None:
        self.processor, self.store = processor, store
        self.size = size or lru_cache(maxsize=65_536)(self._size)
        self.url = lru_cache(maxsize=_KEPT_URLS)(self._url)

    def _size(self, name: str) -> tuple[int, int]:
        return size_of(self.store.get(name), f"the picture {name[:12]}…")

    def count(self, name: str) -> int:
        return self.processor.count(self.size(name))

    def _url(self, name: str) -> str:
        """A data URL of the picture in the size in which it is cut, for a server that cuts it itself: most resize
        by torchvision, which gives other pixels than Pillow."""
        data, own = self.store.get(name), self.processor
        if own.family not in QWEN or not own.image_processor.do_resize:
            return as_plain_url(data)
        _, rows, columns = (int(side) for side in own.arrays(name, self.store)["image_grid_thw"][0])
        size = columns * own.image_processor.patch_size, rows * own.image_processor.patch_size
        if own.count(size) != rows * columns // own.image_processor.merge_size**2:
            return as_plain_url(data)  # so long and narrow that it would be resized once more
        return as_plain_url(data, size, own.image_processor.resample)

    def arrays(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """The model's inputs for each picture. Several are read and cut at a time: decoding and resizing
        release the interpreter's lock."""
        different = list(dict.fromkeys(names))
        if len(different) == 1:
            return {names[0]: self.processor.arrays(names[0], self.store)}
        with ThreadPoolExecutor(_THREADS, "pictures") as pool:
            made = pool.map(lambda name: self.processor.arrays(name, self.store), different)
            return dict(zip(different, made, strict=True))

    def within(self, key: str, tokens: np.ndarray, media: tuple[str, ...]) -> tuple[str, ...]:
        """Those of a row's pictures whose placeholders are in `tokens`, the row or its beginning. `DataError`
        if the placeholders are not those of its pictures."""
        found = int(np.count_nonzero(np.isin(tokens, self.processor.placeholder_ids)))
        needed = 0
        for i, name in enumerate((*media, "")):
            if needed == found:
                return media[:i]
            needed += self.count(name) if name else 0
        raise DataError(
            f"row {key} has {found} placeholder tokens; its {len(media)} picture(s) need {needed}. Keep the tokens of the "
            "rendered prompt together, and append to `context.media` the pictures that are appended to the tokens"
        )


def patching_difference(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> str:
    """In words, where two ways of cutting pictures differ; empty if they do not."""
    names = sorted({*student, *teacher})
    return "; ".join(
        f"{name}: student {json.dumps(student.get(name))}, teacher {json.dumps(teacher.get(name))}"
        for name in names
        if student.get(name) != teacher.get(name)
    )


def _plain(value: Any) -> Any:
    """As JSON has it, without fields that are not set."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if hasattr(value, "items"):
        return {str(name): _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def _bytes(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())
