"""Makes pictures, data and models of the grafted shapes recipe out of SmolLM2-135M; minutes on one GPU.

python recipes/shapes/make_grafted.py smollm2          a folder with a Llama model (docs/first-run.md makes this one)

grafted/data/...            as make_models.py writes them, with more pictures
grafted/models/teacher      all layers of the language model behind a new vision tower, trained by SFT
grafted/models/student      20 of its 30 layers with their first weights behind the teacher's tower, trained by SFT on
                            swapped pictures: it knows the form of answers, and does not look
"""

import argparse
import time
from pathlib import Path

import torch
from graft import chat_of, copy_tower, evenly, graft, save_model
from make_models import make_data, teacher_scenes
from supervise import supervise, train_tower

from shapes import Row, answers, png, swapped
from understudy.policy.supervised import SupervisedSchedule

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("language", type=Path, help="folder of the language model")
    parser.add_argument(
        "--out", type=Path, default=HERE / "grafted", help="folder that gets models/ and data/"
    )
    parser.add_argument("--rows", type=int, default=4000, help="rows of train.jsonl")
    parser.add_argument("--scenes", type=int, default=4000, help="pictures that the teacher is trained on")
    parser.add_argument("--layers", type=int, help="layers of the teacher; all, if not given")
    parser.add_argument("--student-layers", type=int, default=20)
    parser.add_argument("--tower-steps", type=int, default=200)
    parser.add_argument("--teacher-steps", type=int, default=250)
    parser.add_argument("--student-steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    given = parser.parse_args()
    began, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    splits = make_data(given.out / "data", train=given.rows, prompts=given.rows)

    def print_time(name: str) -> None:
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)

    def schedule(steps: int, seed: int) -> SupervisedSchedule:
        return SupervisedSchedule(
            steps,
            {"all": given.batch},
            seed,
            learning_rate=given.learning_rate,
            weight_decay=0.01,
            warmup_steps=20,
        )

    print_time("data")
    teacher = graft(given.language, seed=1)
    kept = evenly(len(teacher.model.text_model.layers), given.student_layers)
    if given.layers is not None:
        teacher = graft(given.language, 1, evenly(len(teacher.model.text_model.layers), given.layers))
    teacher, chat = teacher.to(device), chat_of(teacher, given.language)
    scenes = teacher_scenes(given.scenes, {row.picture for name in ("valid", "test") for row in splits[name]})
    asked = [Row(png(scene), *pair) for scene in scenes for pair in answers(scene).items()]
    print(f"teacher: {teacher.num_parameters():,} parameters, {len(asked)} questions", flush=True)
    train_tower(teacher, chat, scenes, given.tower_steps, given.batch, 1e-3)
    print_time("vision tower")
    supervise(teacher, chat, asked, schedule(given.teacher_steps, seed=1))
    save_model(teacher, chat, given.out / "models" / "teacher")
    print_time("teacher")

    student = graft(given.language, 2, kept)
    copy_tower(teacher, student)
    print(f"student: {student.num_parameters():,} parameters", flush=True)
    supervise(student.to(device), chat, swapped(splits["train"]), schedule(given.student_steps, seed=2))
    save_model(student, chat, given.out / "models" / "student")
    print_time("student")


if __name__ == "__main__":
    main()
