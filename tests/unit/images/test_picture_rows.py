"""Pictures in data files: every supported form gives the same prompt, and a bad file fails only its own row."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from vision_models import picture

from understudy.errors import DataError
from understudy.media.pictures import (
    PictureError,
    PictureLimits,
    Pictures,
    as_plain_url,
    as_source,
    hashes_in,
    size_of,
)
from understudy.media.store import MediaStore, hash_of
from understudy.rollout.dataset import load_dataset
from understudy.rollout.sources import write_rows

RED, BLUE = picture("red"), picture("blue")
URL = "data:image/png;base64," + base64.b64encode(RED).decode()


def prompt_of(row: dict[str, Any], store: MediaStore, folder: Path | None = None) -> Any:
    if folder is None:
        dataset = load_dataset([row])
    else:
        path = folder / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        dataset = load_dataset(path)
    return dataset.storing(Pictures(store)).prompt(0, key="k", epoch=0)


def user_message(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


TEXT = {"type": "text", "text": "what?"}
SHAPES: dict[str, dict[str, Any]] = {
    "verl, path": {"messages": user_message("<image>what?"), "images": [{"image": "red.png"}]},
    "verl, bytes": {"prompt": user_message("<image>what?"), "images": [{"bytes": RED, "path": None}]},
    "a column of paths": {"messages": user_message("<image>what?"), "images": ["red.png"]},
    "one picture": {"messages": user_message("<image>what?"), "image": "red.png"},
    "no place": {"messages": user_message("what?"), "images": ["red.png"]},
    "empty part": {"messages": user_message({"type": "image"}, TEXT), "images": ["red.png"]},
    "numbered part": {
        "messages": user_message({"type": "image", "index": 0, "text": None}, {**TEXT, "index": None}),
        "images": ["red.png"],
    },
    "part with a path": {"messages": user_message({"type": "image", "image": "red.png"}, TEXT)},
    "part with a url": {"messages": user_message({"type": "image", "url": URL}, TEXT)},
    "part with base64": {"messages": user_message({"type": "image", "base64": URL.partition(",")[2]}, TEXT)},
    "OpenAI": {"messages": user_message({"type": "image_url", "image_url": {"url": URL}}, TEXT)},
}


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES.keys())
def test_every_supported_way_to_give_a_picture_makes_the_same_prompt(
    row: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    store = MediaStore(tmp_path / "media")
    if "bytes" in str(row.get("images")):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        data = load_dataset(tmp_path / "rows.parquet").storing(Pictures(store))
        prompt = data.prompt(0, key="k", epoch=0)
    else:
        prompt = prompt_of(row, store, tmp_path)
    assert prompt.messages == (
        {"role": "user", "content": [{"type": "image", "image": f"sha256:{hash_of(RED)}"}, TEXT]},
    )
    assert store.get(hash_of(RED)) == RED
    assert "images" not in prompt.columns and "image" not in prompt.columns


def test_the_index_of_an_image_part_selects_its_picture(tmp_path: Path) -> None:
    """LLaVA's data sets have such an `index`."""
    for name, data in (("red", RED), ("blue", BLUE)):
        (tmp_path / f"{name}.png").write_bytes(data)
    numbered = [{"type": "image", "index": 1}, TEXT, {"type": "image", "index": 0}]
    row = {"messages": user_message(*numbered), "images": ["red.png", "blue.png"]}
    prompt = prompt_of(row, MediaStore(tmp_path / "media"), tmp_path)
    assert list(hashes_in(prompt.messages)) == [hash_of(BLUE), hash_of(RED)]
    for index, message in ((0, r"name \[0, 0\] \(`index`\); expected each once"), ("a", "has index = 'a'")):
        numbered[0] = {"type": "image", "index": index}
        with pytest.raises(DataError, match=message):
            prompt_of({**row, "messages": user_message(*numbered)}, MediaStore(tmp_path / "media"), tmp_path)


def test_rows_with_picture_objects_can_be_written_to_a_file_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`understudy.distill` writes rows given as objects to the run directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "red.png").write_bytes(RED)
    rows = [
        {"messages": user_message("<image>what?"), "images": [Image.open(io.BytesIO(RED))]},
        {"messages": user_message("<image>what?"), "images": ["red.png"]},
        {"messages": user_message({"type": "image", "image": RED}, TEXT)},
    ]
    (tmp_path / "run").mkdir()
    write_rows(rows, tmp_path / "run" / "rows.jsonl")
    store = MediaStore(tmp_path / "media")
    data = load_dataset(tmp_path / "run" / "rows.jsonl").storing(Pictures(store))
    seen = [hashes_in(data.prompt(i, key="k", epoch=0).messages) for i in range(3)]
    assert seen[1:] == [(hash_of(RED),)] * 2
    assert size_of(store.get(seen[0][0])) == size_of(RED)


def test_a_picture_used_by_several_rows_is_stored_once(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    rows = [
        {"messages": user_message("<image><image>?"), "images": [RED, BLUE]},
        {"messages": user_message("<image>?"), "images": [RED]},
    ]
    data = load_dataset(rows).storing(Pictures(store))
    first, second = (data.prompt(i, key="k", epoch=0) for i in range(2))
    assert hashes_in(first.messages) == (hash_of(RED), hash_of(BLUE))
    assert hashes_in(second.messages) == (hash_of(RED),)
    assert len([path for path in (tmp_path / "media").rglob("*") if path.is_file()]) == 2


def bomb() -> bytes:
    """A PNG that claims 60 000 × 60 000 pixels in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def animated() -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


BAD = {
    "missing": (None, "does not exist"),
    "text": (b"hello", "is not a readable picture"),
    "cut": (picture("red", (300, 300), (9, 9))[:200], "cannot be decoded"),
    "bomb": (bomb(), "pixels"),
    "animated": (animated(), "is animated"),
    "large": (b"\0" * 70_000, "bytes; data.max_image_bytes is 65536"),
    "many pixels": (picture("red", (600, 600)), "600 × 600 pixels; data.max_image_pixels is 160000"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a readable picture"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_file_fails_its_own_row_and_no_other(name: str, tmp_path: Path) -> None:
    data, reason = BAD[name]
    if data is not None:
        (tmp_path / "bad.png").write_bytes(data)
    (tmp_path / "red.png").write_bytes(RED)
    rows = [{"messages": user_message("<image>?"), "images": [file]} for file in ("bad.png", "red.png")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pictures = Pictures(MediaStore(tmp_path / "media"), PictureLimits(65_536, 160_000))
    dataset = load_dataset(path).storing(pictures)
    with pytest.raises(PictureError, match=reason):
        hashes_in(dataset.prompt(0, key="a", epoch=0).messages)
    assert hashes_in(dataset.prompt(1, key="b", epoch=0).messages) == (hash_of(RED),)


def test_a_picture_at_a_web_url_is_refused_and_not_fetched(tmp_path: Path) -> None:
    row = {
        "messages": user_message(
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, TEXT
        )
    }
    with pytest.raises(PictureError, match="is not fetched; download pictures"):
        hashes_in(prompt_of(row, MediaStore(tmp_path)).messages)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": user_message("?"), "videos": ["a.mp4"]},
            "only text and images are read, so drop the column",
        ),
        (
            {"messages": user_message("?"), "audios": ["a.wav"]},
            "only text and images are read, so drop the column",
        ),
        ({"messages": user_message({"type": "video", "video": "a.mp4"})}, "only text and images are read"),
        (
            {"messages": user_message({"type": "input_audio", "input_audio": {}})},
            "only text and images are read",
        ),
        ({"prompt": "<image>?", "images": [RED]}, "has images beside a plain `prompt`"),
        (
            {"messages": user_message("<image><image>?"), "images": [RED]},
            r"1 image\(s\), and its messages have room for 2",
        ),
        (
            {"messages": user_message({"type": "image"}), "images": [RED, BLUE]},
            r"2 image\(s\), .* room for 1",
        ),
        ({"messages": user_message({"type": "image"}, TEXT)}, r"0 image\(s\), .* room for 1"),
        ({"messages": user_message("?"), "images": 3}, "images is a int; expected a list"),
    ],
)
def test_rows_with_other_media_or_wrong_numbers_of_images_are_refused_in_one_line(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        load_dataset([row])
    assert "\n" not in str(raised.value)


def test_a_literal_image_marker_in_a_row_without_images_is_text() -> None:
    prompt = load_dataset([{"messages": user_message("what does <image> mean?")}]).prompt(0, key="k", epoch=0)
    assert prompt.messages == ({"role": "user", "content": "what does <image> mean?"},)


def test_a_stored_picture_whose_bytes_changed_is_refused(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    name = store.put(RED)
    store.path(name).write_bytes(BLUE)
    with pytest.raises(DataError, match="its bytes have another hash than its name"):
        store.get(name)
    with pytest.raises(DataError, match="is not the hash of a picture"):
        store.get("../../etc/passwd")


def test_data_urls_for_servers_are_rotated_and_without_transparency() -> None:
    assert as_plain_url(RED) == URL
    rotated, transparent = io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 24), "red").save(rotated, format="JPEG", exif=exif)
    Image.new("RGBA", (40, 24), (255, 0, 0, 10)).save(transparent, format="PNG")
    sent = [
        Image.open(io.BytesIO(base64.b64decode(as_plain_url(one.getvalue()).partition(",")[2])))
        for one in (rotated, transparent)
    ]
    assert [one.mode for one in sent] == ["RGB", "RGB"] and [one.size for one in sent] == [(24, 40), (40, 24)]
    assert sent[1].getpixel((0, 0)) == (255, 0, 0), "transparency is dropped as by the model's processor"


def test_a_tilde_is_the_home_folder_only_if_a_slash_follows(tmp_path: Path) -> None:
    (tmp_path / "~draft.png").write_bytes(RED)
    assert as_source("~draft.png", tmp_path) == str(tmp_path / "~draft.png")
    assert as_source("~/a.png", tmp_path) == str(Path.home() / "a.png")
