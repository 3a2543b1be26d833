"""The grafted vision-language model: text gives the logits of the language model, and pictures influence the output."""

import sys
from pathlib import Path

import pytest
import torch
from tiny_language import make_language
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

sys.path.append(str(Path(__file__).parents[3] / "recipes" / "shapes"))
import vision_chat
from graft import ADDED, chat_of, copy_tower, evenly, graft, save_model
from supervise import supervise, train_tower

from shapes import Row, Shape, png
from understudy.media.processor import PictureProcessor
from understudy.policy.supervised import SupervisedSchedule

SCENES = [(Shape("circle", colour, (0, 0), (8, 8), 5),) for colour in ("red", "blue")]
ROWS = [
    Row(png(scene), "what colour is the circle ?", colour)
    for scene, colour in zip(SCENES, ("red", "blue"), strict=True)
]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language(tmp_path_factory.mktemp("language"))


def test_evenly_chosen_layers_include_the_first_and_the_last() -> None:
    assert evenly(30, 20)[0] == 0 and evenly(30, 20)[-1] == 29 and len(set(evenly(30, 20))) == 20
    assert evenly(3, 3) == [0, 1, 2]


@pytest.mark.parametrize("kept", [None, [0, 2]])
def test_the_grafted_model_gives_text_rows_the_logits_of_the_language_model(
    language: Path, kept: list[int] | None
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32).eval()
    if kept is not None:
        plain.model.layers = torch.nn.ModuleList([plain.model.layers[i] for i in kept])
    grafted = graft(language, seed=1, kept=kept).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        ours, theirs = grafted(input_ids=ids).logits, plain(input_ids=ids, use_cache=False).logits
    assert ours.shape[-1] == theirs.shape[-1] + len(ADDED)
    assert torch.allclose(ours[..., : theirs.shape[-1]], theirs, atol=1e-5)
    assert theirs.std() > 0.1, "logits are nearly constant, so comparing them proves nothing"


def test_a_saved_model_gives_the_logits_of_the_trained_one_and_depends_on_the_picture(
    language: Path, tmp_path: Path
) -> None:
    teacher = graft(language, seed=1)
    chat = chat_of(teacher, language)
    prompt = chat.prompt_ids(ROWS[0].question)
    assert prompt.count(teacher.config.image_token_id) == 9
    tower = {name: one.clone() for name, one in teacher.model.connector.named_parameters()}
    train_tower(teacher, chat, SCENES, steps=1, rows=2)
    assert not torch.equal(
        tower["modality_projection.proj.weight"], teacher.model.connector.modality_projection.proj.weight
    )
    before = {name: one.clone() for name, one in teacher.named_parameters()}
    supervise(
        teacher, chat, ROWS, SupervisedSchedule(1, {"all": 2}, seed=1, learning_rate=3e-3, warmup_steps=1)
    )
    moved = {name for name, one in teacher.named_parameters() if not torch.equal(before[name], one)}
    assert moved and all("text_model" in name or "lm_head" in name for name in moved)
    save_model(teacher, chat, tmp_path)

    again = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        ours = [one(input_ids=ids, **chat.pixels([ROWS[0].picture])).logits for one in (teacher, again)]
        other = again(input_ids=ids, **chat.pixels([ROWS[1].picture])).logits
    assert torch.equal(*ours) and not torch.allclose(ours[1], other, atol=1e-4)
    read = PictureProcessor.load(str(tmp_path))
    assert read is not None and read.settings == chat.pictures.settings


def test_copy_tower_gives_a_student_the_image_features_of_its_teacher(language: Path) -> None:
    teacher, student = graft(language, seed=1), graft(language, seed=2, kept=[0, 2])
    chat = chat_of(teacher, language)
    pixels = chat.pixels([ROWS[0].picture])

    def seen() -> list[torch.Tensor]:
        with torch.no_grad():
            return [one.model.get_image_features(**pixels).pooler_output[0] for one in (teacher, student)]

    assert not torch.equal(*seen())
    copy_tower(teacher, student)
    assert torch.equal(*seen())


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_training_on_pixels_gives_the_weights_of_training_on_cached_features(
    language: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Older versions of transformers would ignore given features, so they get pixels."""
    schedule = SupervisedSchedule(3, {"all": 2}, seed=1, learning_rate=3e-3, warmup_steps=1)
    trained = []
    for takes in (True, False):
        monkeypatch.setattr("supervise.takes_features", lambda model, takes=takes: takes)
        if family == "smolvlm":
            model = graft(language, seed=1)
            chat = chat_of(model, language)
        else:
            model = vision_chat.build_model(1, seed=1)
            chat = vision_chat.chat_of(model)
        supervise(model, chat, ROWS, schedule)
        trained.append(dict(model.named_parameters()))
    kept, pixels = trained
    assert all(torch.allclose(kept[name], pixels[name], atol=1e-5) for name in kept)
