"""What it saves to compute the features of a picture once for the n sessions of its prompt.

    python benchmarks/images/vision_features.py        seconds to minutes on a CPU

Four prompts with a picture each, eight sessions: prefill in the engine (one token is written) and an update with a frozen
vision tower, with features by picture and with pixels for every row. Each way is a process of its own, whose largest
resident memory is measured. The tower has 8 layers of 256, the language part 2 of 128; pictures have 196 patches.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.media.processor import PictureProcessor, PictureReader
from understudy.media.store import MediaStore
from understudy.nn.vision import freeze_vision
from understudy.policy.assemble import Assembler
from understudy.policy.forward.forward import StudentForward, sampled_logprobs
from understudy.policy.microbatch import Layout
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name
from step_problem import Row, save

PROMPTS, SESSIONS, ANSWER, REPEATS = 4, 8, 16, 5
IMAGE = 5
"""The id of the placeholder."""


def model() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 8, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "out_hidden_size": 128, "patch_size": 16,
        "num_position_embeddings": 196, "deepstack_visual_indexes": [2, 5],
    }  # fmt: skip
    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, image_token_id=IMAGE)
    )


def reader_of(folder: Path, config: Any) -> tuple[PictureReader, list[str]]:
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 224 * 224, "longest_edge": 224 * 224}, patch_size=16
    )
    processor = PictureProcessor("qwen3_vl", images, "<image>", IMAGE, (IMAGE,), ("<image>",), config=config)
    store, names = MediaStore(folder), []
    for i in range(PROMPTS):
        buffer = io.BytesIO()
        Image.new("RGB", (224, 224), (40 * i, 80, 120)).save(buffer, format="PNG")
        names.append(store.put(buffer.getvalue()))
    return PictureReader(processor, store), names


def measure(kept: bool, part: str) -> dict[str, float]:
    """Seconds of the middle repetition, the largest resident memory, and the bytes of features kept."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        student = model()
        freeze_vision(student)
        reader, names = reader_of(Path(folder), student.config)
        shown = [names[i // SESSIONS] for i in range(PROMPTS * SESSIONS)]
        prompt = np.array([7, *[IMAGE] * reader.count(names[0]), 8, 9, 10], dtype=np.int32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run = engine if part == "prefill" else update
        seconds, held = run(student, reader, shown, prompt, kept)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": median(seconds), "MB": (most - before) / 1024, "kept MB": held / 2**20}


def engine(
    student: Any, reader: PictureReader, shown: list[str], prompt: np.ndarray, kept: bool
) -> tuple[list[float], float]:
    made = HFEngine(student, max_batch=len(shown), device="cpu", pad_id=0, max_length=256, pictures=reader)
    features = made._features
    assert features is not None
    if not kept:
        made._features = None
    requests = [
        GenerateRequest(f"row-{i}", prompt, Sampling(1), seed=i, media=(name,))
        for i, name in enumerate(shown)
    ]

    async def go() -> list[float]:
        seconds = []
        for _ in range(REPEATS):
            features.clear()
            began = time.perf_counter()
            await made.generate(requests)
            seconds.append(time.perf_counter() - began)
        await made.close()
        return seconds

    return asyncio.run(go()), float(features.held_bytes)


def update(
    student: Any, reader: PictureReader, shown: list[str], prompt: np.ndarray, kept: bool
) -> tuple[list[float], float]:
    """Forward and backward of all rows, eight at a time, with the cross-entropy of random answers."""
    forward = StudentForward(student, pictures=reader)
    features = forward.features
    assert features is not None
    if not kept:
        forward.features = None
    rows = [torch.from_numpy(np.concatenate([prompt, np.arange(20, 20 + ANSWER)])).long() for _ in shown]
    masks = [torch.arange(len(row)) >= len(prompt) for row in rows]
    batch = Batch(
        keys=tuple(f"row-{i}" for i in range(len(rows))),
        tokens=Jagged.from_rows(rows),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows([torch.where(mask, -1.0, float("nan")) for mask in masks]),
        media=tuple((name,) for name in shown),
    )
    held = Assembler(batch, [torch.ones(ANSWER)] * len(rows)).hold()
    seconds = []
    for _ in range(REPEATS):
        features.clear()
        began = time.perf_counter()
        for start in range(0, len(rows), 8):
            micro = held.cut(list(range(start, start + 8)), Layout.PADDED)
            _, logprobs = forward(micro, sampled_logprobs)
            (-logprobs.sum()).backward()
        seconds.append(time.perf_counter() - began)
    return seconds, float(features.held_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument(
        "--one", nargs=2, help="for a process of its own: features or pixels, prefill or update"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0] == "features", options.one[1])))
        return
    rows = []
    for part in ("prefill", "update"):
        found = {}
        for way in ("features", "pixels"):
            words = [sys.executable, __file__, "--one", way, part]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
        for unit, name in (("seconds", "s"), ("MB", "MB")):
            value, peer = (found[way][unit] for way in ("features", "pixels"))
            goal = {"goal": "< 1", "met": value < peer} if unit == "seconds" else {}
            rows.append(
                Row(f"{part}, features once per picture: {unit}", round(value, 3), name, "pixels for every row",
                    round(peer, 3), round(value / peer, 3), **goal)
            )  # fmt: skip
        rows.append(Row(f"{part}: features kept", round(found["features"]["kept MB"], 3), "MB"))
    for row in rows:
        print(f"{row.name:<50} {row.value} {row.unit}  {row.peer} {row.peer_value} {row.ratio}")
    save("vision_features", cpu_name(), rows, options.out)


if __name__ == "__main__":
    main()
