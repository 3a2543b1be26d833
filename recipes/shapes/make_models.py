"""Makes pictures, data and models of the shapes recipe; minutes on one CPU core.

    data/train.jsonl valid.jsonl test.jsonl    rows with a picture each (data/pictures/)
    data/blank.jsonl                           the rows of train.jsonl with an empty picture: the control's data
    data/test-blank.jsonl test-swapped.jsonl   the held-out rows with an empty picture, and with that of another row
    data/eval.jsonl                            test.jsonl and half of each of these two, as sources of their own
    models/teacher                             trained by SFT on pictures of its own
    models/student                             half the teacher's layers behind the teacher's vision tower, trained by SFT
                                               on swapped pictures: it knows the form of answers, and does not look

One thread and fixed seeds: the same versions on the same kind of CPU write the same bytes.
"""

import argparse
import json
import random
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
from supervise import supervise, train_tower
from vision_chat import build_model, chat_of, save_model

from shapes import Row, Scene, answers, best_constant, blank, draw_scene, png, rows, swapped
from understudy.policy.supervised import SupervisedSchedule

HERE = Path(__file__).resolve().parent
HELD_OUT = {"valid": 300, "test": 600}
TEACHER_LAYERS, STUDENT_LAYERS = 3, 2


def make_data(out: Path, train: int = 3000, prompts: int = 1280) -> dict[str, list[Row]]:
    """Splits share no picture: all of them come from one sequence without repetitions. `prompts`: rows of
    train.jsonl; the student's first training uses all rows of the split, with swapped pictures."""
    source = rows("splits")
    splits = {name: list(islice(source, count)) for name, count in {"train": train, **HELD_OUT}.items()}
    prompted, test = splits["train"][:prompts], splits["test"]
    controls = {
        "train": prompted,
        "blank": blank(prompted),
        "test-blank": blank(test),
        "test-swapped": swapped(test),
    }
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    for name, chosen in (splits | controls).items():
        _write(out / f"{name}.jsonl", {"": chosen})
    half = len(test) // 2
    shown = {"blank-": controls["test-blank"][:half], "swapped-": controls["test-swapped"][:half]}
    _write(out / "eval.jsonl", {"": test, **shown})
    print(f"held-out rows: the best constant answer to each question is right on {best_constant(test):.1%}")
    return splits


def _write(file: Path, parts: dict[str, list[Row]]) -> None:
    """Rows of each part; its name begins their `data_source`."""
    lines = []
    for part, chosen in parts.items():
        for row in chosen:
            picture = f"pictures/{sha256(row.picture).hexdigest()[:16]}.png"
            (file.parent / picture).write_bytes(row.picture)
            message = {"role": "user", "content": f"<image>{row.question}"}
            fields = {"messages": [message], "images": [picture], "answer": row.answer}
            lines.append(json.dumps({**fields, "data_source": part + row.question.split()[0]}) + "\n")
    file.write_text("".join(lines))
    print(f"data/{file.name}: {len(lines)} rows")


def teacher_scenes(count: int, held_out: set[bytes]) -> list[Scene]:
    """None has a picture that is held out."""
    rng = random.Random("shapes/teacher")
    drawn = (draw_scene(rng) for _ in range(10 * count))
    return list(islice((scene for scene in drawn if png(scene) not in held_out), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder that gets models/ and data/")
    parser.add_argument("--scenes", type=int, default=4000, help="pictures that the teacher is trained on")
    parser.add_argument("--tower-steps", type=int, default=200)
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--student-steps", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    splits = make_data(given.out / "data")

    teacher = build_model(TEACHER_LAYERS, seed=1)
    chat = chat_of(teacher)
    held_out = {row.picture for name in ("valid", "test") for row in splits[name]}
    scenes = teacher_scenes(given.scenes, held_out)
    asked = [Row(png(scene), *pair) for scene in scenes for pair in answers(scene).items()]
    print(f"teacher: {teacher.num_parameters():,} parameters, {len(asked)} questions", flush=True)
    train_tower(teacher, chat, scenes, given.tower_steps)
    supervise(
        teacher, chat, asked, SupervisedSchedule(given.teacher_steps, {"all": 64}, seed=1, learning_rate=3e-3)
    )
    save_model(teacher, given.out / "models" / "teacher")

    student = build_model(STUDENT_LAYERS, seed=2)
    student.model.visual.load_state_dict(teacher.model.visual.state_dict())
    print(f"student: {student.num_parameters():,} parameters", flush=True)
    schedule = SupervisedSchedule(given.student_steps, {"all": 64}, seed=2, learning_rate=1e-3)
    supervise(student, chat, swapped(splits["train"]), schedule)
    save_model(student, given.out / "models" / "student")


if __name__ == "__main__":
    main()
