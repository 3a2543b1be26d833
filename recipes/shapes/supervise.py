"""Supervised training of the vision tower on cells, and of the language part on questions about pictures.

Shape letters: B rows, T tokens, P patches of a picture.
"""

import time
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import torch
from transformers import Qwen3VLForConditionalGeneration
from vision_chat import IMAGE, build_tokenizer, image_processor

from shapes import CELLS, CLASSES, SIDE, Row, Scene, cells, png
from understudy.media.pictures import decoded
from understudy.nn.vision import freeze_vision
from understudy.policy.supervised import IGNORED, Encoded, Schedule, pad_rows


@cache
def prompt_ids(question: str) -> tuple[int, ...]:
    """The tokens of a prompt; all pictures have one size, and so one number of tokens."""
    tokenizer, images = build_tokenizer(), image_processor()
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    count = images.get_number_of_image_patches(SIDE, SIDE, {}) // images.merge_size**2
    return tuple(tokenizer.encode(text.replace(IMAGE, IMAGE * count), add_special_tokens=False))


def encode(rows: Sequence[Row]) -> tuple[Encoded, list[bytes], torch.Tensor]:
    """Rows, the pictures that they name, and which of them each row names. Loss only on the answer and its
    <eos>."""
    tokenizer = build_tokenizer()
    places: dict[bytes, int] = {}
    encoded = []
    for row in rows:
        places.setdefault(row.picture, len(places))
        prompt = prompt_ids(row.question)
        said = [*tokenizer.encode(row.answer, add_special_tokens=False), tokenizer.eos_token_id]
        encoded.append(([*prompt, *said], [False] * len(prompt) + [True] * len(said)))
    picture_B = torch.tensor([places[row.picture] for row in rows])
    return pad_rows(encoded, tokenizer.pad_token_id), list(places), picture_B


def train_tower(model: Qwen3VLForConditionalGeneration, scenes: Sequence[Scene], steps: int) -> None:
    """Trains the vision tower to tell, from each of a picture's tokens, what is in that cell and which it is."""
    pixels, labels_PC = (
        _pixels([png(scene) for scene in scenes]),
        torch.tensor([cells(one) for one in scenes]),
    )
    visual, generator = model.model.visual, torch.Generator().manual_seed(0)
    heads = [torch.nn.Linear(visual.config.out_hidden_size, CLASSES + CELLS**2) for _ in range(2)]
    parameters = [*visual.parameters(), *(one for head in heads for one in head.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1.0 - step / steps)
        index_B = torch.randint(len(scenes), (32,), generator=generator)
        pooled, deepstack = _seen(model, pixels[index_B].flatten(0, 1))
        said = [head(one).flatten(0, 1) for head, one in zip(heads, (pooled, *deepstack), strict=True)]
        labels, places = labels_PC[index_B].flatten(), torch.arange(CELLS**2).repeat(len(index_B))
        loss = torch.zeros(())
        for one in said:
            loss = loss + torch.nn.functional.cross_entropy(one[:, :CLASSES], labels)
            loss = loss + torch.nn.functional.cross_entropy(one[:, CLASSES:], places)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            right = (said[0][:, :CLASSES].argmax(-1) == labels).float().mean().item()
            print(f"  vision tower: step {step + 1}/{steps}  {right:.1%} of the cells", flush=True)


def _pixels(pictures: Sequence[bytes]) -> torch.Tensor:
    """float32 [pictures, P, values of a patch]."""
    images = image_processor()
    made = [images(images=[decoded(one)], return_tensors="pt")["pixel_values"] for one in pictures]
    return torch.stack(made)


def _seen(
    model: Qwen3VLForConditionalGeneration, pixels: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Features [pictures, tokens, H], and those of the deeper way into the language part."""
    side = SIDE // image_processor().patch_size
    grid = torch.tensor([[1, side, side]]).repeat(len(pixels) // side**2, 1)
    found = model.model.get_image_features(pixels, grid)
    return torch.stack(list(found.pooler_output)), [
        torch.stack(list(one)) for one in found.deepstack_features
    ]


def supervise(model: Qwen3VLForConditionalGeneration, rows: Sequence[Row], schedule: Schedule) -> None:
    """Trains the language part on `schedule.rows["all"]` rows a step; pictures go through the tower once."""
    freeze_vision(model)
    encoded, pictures, picture_B = encode(rows)
    with torch.no_grad():
        pieces = [
            _seen(model, _pixels(pictures[i : i + 64]).flatten(0, 1)) for i in range(0, len(pictures), 64)
        ]
    pooled, *deepstack = (torch.cat(one) for one in zip(*((p, *d) for p, d in pieces), strict=True))
    generator = torch.Generator().manual_seed(schedule.seed)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=schedule.weight_decay
    )
    side = SIDE // image_processor().patch_size
    model.train()
    started = time.monotonic()
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        index_B = torch.randint(len(encoded), (schedule.rows["all"],), generator=generator)
        batch, shown_B = encoded.rows(index_B), picture_B[index_B]
        features = SimpleNamespace(
            pooler_output=tuple(pooled[shown_B]),
            deepstack_features=[tuple(one[shown_B]) for one in deepstack],
        )
        model.model.rope_deltas = None
        logits_BTV = model(
            input_ids=batch.tokens_BT,
            mm_encoder_outputs={"image": features},
            image_grid_thw=torch.tensor([[1, side, side]]).repeat(len(index_B), 1),
            mm_token_type_ids=(batch.tokens_BT == model.config.image_token_id).int(),
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, schedule.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == schedule.steps:
            seconds = time.monotonic() - started
            print(f"  step {step + 1}/{schedule.steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    model.eval()
