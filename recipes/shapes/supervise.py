"""Supervised training of the vision tower on cells, and of the language part on questions about pictures.

Works for the families that `VisionChat` knows. A model is trained on the device it is on; on a GPU in bfloat16 over
float32 weights. Shape letters: B rows, T tokens.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shapes import CELLS, CLASSES, SIDE, Row, Scene, cells, png
from understudy.media.processor import QWEN, PictureProcessor
from understudy.nn.vision import freeze_vision, vision_parameters
from understudy.nn.vision_features import takes_features
from understudy.policy.supervised import IGNORED, Encoded, SupervisedSchedule, pad_rows

_PICTURES_AT_ONCE = 64


@dataclass(frozen=True)
class VisionChat:
    """How a model reads rows: its tokenizer, and its way of cutting pictures. All pictures have one size."""

    tokenizer: Any
    pictures: PictureProcessor

    def prompt_ids(self, question: str) -> list[int]:
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        text = text.replace(self.pictures.image_token, self.pictures.text_of((SIDE, SIDE)))
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode(self, rows: Sequence[Row]) -> tuple[Encoded, list[bytes], torch.Tensor]:
        """Rows, the pictures that they name, and which of them each row names. Loss only on the answer and
        its <eos>."""
        places: dict[bytes, int] = {}
        prompts = {question: self.prompt_ids(question) for question in {row.question for row in rows}}
        encoded = []
        for row in rows:
            places.setdefault(row.picture, len(places))
            prompt = prompts[row.question]
            answer = [
                *self.tokenizer.encode(row.answer, add_special_tokens=False),
                self.tokenizer.eos_token_id,
            ]
            encoded.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
        picture_B = torch.tensor([places[row.picture] for row in rows])
        return pad_rows(encoded, self.tokenizer.pad_token_id), list(places), picture_B

    def pixels(self, pictures: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """The model's arrays, by name; the first axis counts pictures."""
        made = [self.pictures.process(one) for one in pictures]
        return {name: torch.stack([torch.from_numpy(one[name]) for one in made]) for name in made[0]}


def train_tower(
    model: Any, chat: VisionChat, scenes: Sequence[Scene], steps: int, rows: int = 32, rate: float = 2e-3
) -> None:
    """Trains the vision tower to tell, from each of a picture's tokens, what is in that cell and which it is."""
    device = next(model.parameters()).device
    pixels = {name: one.to(device) for name, one in chat.pixels([png(scene) for scene in scenes]).items()}
    labels_PC = torch.tensor([cells(one) for one in scenes], device=device)
    generator = torch.Generator().manual_seed(0)
    kinds, width = (
        1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())),
        model.config.get_text_config().hidden_size,
    )
    heads = [torch.nn.Linear(width, CLASSES + CELLS**2).to(device) for _ in range(kinds)]
    parameters = [*vision_parameters(model), *(one for head in heads for one in head.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20) * (1.0 - step / steps)
        index_B = torch.randint(len(scenes), (rows,), generator=generator).to(device)
        with _narrow(device):
            seen = _seen(model, {name: one[index_B] for name, one in pixels.items()})
        logits = [head(one.float()).flatten(0, 1) for head, one in zip(heads, seen, strict=True)]
        labels = labels_PC[index_B].flatten()
        places = torch.arange(CELLS**2, device=device).repeat(len(index_B))
        loss = torch.zeros((), device=device)
        for one in logits:
            loss = loss + torch.nn.functional.cross_entropy(one[:, :CLASSES], labels)
            loss = loss + torch.nn.functional.cross_entropy(one[:, CLASSES:], places)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            right = (logits[0][:, :CLASSES].argmax(-1) == labels).float().mean().item()
            print(f"  vision tower: step {step + 1}/{steps}  {right:.1%} of the cells", flush=True)


def _narrow(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _seen(model: Any, pixels: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Features [pictures, tokens, H], and those of the deeper ways into the language part."""
    if model.config.model_type in QWEN:  # one run of patches; else tiles of each picture
        pixels = {name: one.flatten(0, 1) for name, one in pixels.items()}
    found = model.model.get_image_features(**pixels, return_dict=True)
    deeper = getattr(found, "deepstack_features", ())
    return [torch.stack(list(one)) for one in (found.pooler_output, *deeper)]


def supervise(model: Any, chat: VisionChat, rows: Sequence[Row], schedule: SupervisedSchedule) -> None:
    """Trains the language part on `schedule.rows["all"]` rows a step; pictures go through the tower once."""
    freeze_vision(model)
    device = next(model.parameters()).device
    encoded, pictures, picture_B = chat.encode(rows)
    pixels = chat.pixels(pictures)
    pieces = []
    with torch.no_grad():
        for start in range(0, len(pictures), _PICTURES_AT_ONCE):
            here = slice(start, start + _PICTURES_AT_ONCE)
            pieces.append(_seen(model, {name: one[here].to(device) for name, one in pixels.items()}))
    pooled, *deeper = (torch.cat(one) for one in zip(*pieces, strict=True))
    keeps = takes_features(model)
    generator = torch.Generator().manual_seed(schedule.seed)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=schedule.weight_decay
    )
    model.train()
    started = time.monotonic()
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        index_B = torch.randint(len(encoded), (schedule.rows["all"],), generator=generator)
        batch, shown_B = encoded.rows(index_B), picture_B[index_B].to(device)
        tokens_BT = batch.tokens_BT.to(device)
        more = _qwen(model, tokens_BT, pixels) if model.config.model_type in QWEN else {}
        if keeps:
            more |= kept_features(pooled, deeper, shown_B)
        else:
            more |= plain_pixels(model, pixels, shown_B)
        with _narrow(device):
            logits_BTV = model(input_ids=tokens_BT, use_cache=False, **more).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), batch.labels_BT.to(device).flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, schedule.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == schedule.steps:
            seconds = time.monotonic() - started
            print(f"  step {step + 1}/{schedule.steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    model.eval()


def kept_features(
    pooled: torch.Tensor, deeper: Sequence[torch.Tensor], shown_B: torch.Tensor
) -> dict[str, Any]:
    """Arguments of a forward over rows that show these pictures, with features that the tower gave before."""
    features = SimpleNamespace(
        pooler_output=tuple(pooled[shown_B]), deepstack_features=[tuple(one[shown_B]) for one in deeper]
    )
    return {"mm_encoder_outputs": {"image": features}}


def plain_pixels(model: Any, pixels: dict[str, torch.Tensor], shown_B: torch.Tensor) -> dict[str, Any]:
    """The same with pixels: the tower sees them again."""
    shown = {name: one[shown_B.cpu()].to(shown_B.device) for name, one in pixels.items()}
    if model.config.model_type in QWEN:
        return {name: one.flatten(0, 1) for name, one in shown.items()}
    return shown


def _qwen(model: Any, tokens_BT: torch.Tensor, pixels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a Qwen model computes its three rotary axes from."""
    model.model.rope_deltas = None
    grid = pixels["image_grid_thw"][0].repeat(len(tokens_BT), 1).to(tokens_BT.device)
    return {"image_grid_thw": grid, "mm_token_type_ids": (tokens_BT == model.config.image_token_id).int()}
