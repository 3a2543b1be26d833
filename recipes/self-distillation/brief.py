"""Questions for a student that is to answer in one sentence, and the reward that says whether it does.

    python recipes/self-distillation/brief.py      writes data/train.jsonl and data/valid.jsonl beside this file

Topics of the held-out questions occur in no question for training.
"""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASKED = ("What is {}?", "How does {} work?", "Why is {} important?", "Tell me about {}.")
ABOUT = """photosynthesis, gravity, a volcano, the water cycle, inflation, a bicycle, bread, a rainbow, electricity, the moon,
sleep, a bridge, the internet, a vaccine, chess, a glacier, a violin, soil, a desert, a magnet, coffee, a library, an earthquake, salt,
the heart, a battery, a forest, paper, a telescope, the Roman Empire, a bee, a compass, concrete, a whale, music, a thermometer,
tea, a clock, glass, a river delta, the printing press, a camera, wool, an elevator, cheese, the stock market, a lighthouse, rice"""
HELD_OUT = 8
"""Topics of the held-out questions."""
FEWEST_WORDS = 4

_END = re.compile(r"[.!?](?=\s|$)")


def one_sentence(row: Mapping[str, Any], text: str) -> float:
    """1.0 if the text is one sentence of some words and ends with its mark; an answer that was cut off does not. A
    mark alone is none: a student whose teacher follows it can come to write nothing else."""
    text = text.strip()
    ends = [end.end() for end in _END.finditer(text)]
    return float("\n" not in text and ends == [len(text)] and len(text.split()) >= FEWEST_WORDS)


def main() -> None:
    topics = [" ".join(topic.split()) for topic in ABOUT.split(",")]
    rng = random.Random(0)
    rng.shuffle(topics)
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    for name, chosen in (("valid", topics[:HELD_OUT]), ("train", topics[HELD_OUT:])):
        questions = [question.format(topic) for topic in chosen for question in ASKED]
        rng.shuffle(questions)
        rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / name}.jsonl: {len(rows)} questions")


if __name__ == "__main__":
    main()
