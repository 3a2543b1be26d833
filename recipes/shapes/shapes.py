"""The shapes task: small pictures and questions that cannot be answered without them.

    how many shapes ?             one two three four
    what colour is the circle ?   red green blue yellow
    where is the square ?         top left, top right, bottom left, bottom right

A picture has one to four shapes in a grid of three by three cells. All answers to a question are equally
likely, so an answer that does not depend on the picture is right in one of four cases.
"""

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

CELL, CELLS = 16, 3
SIDE = CELL * CELLS
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
KINDS = ("circle", "square", "triangle")
COUNTS = ("one", "two", "three", "four")
CORNERS = {(0, 0): "top left", (2, 0): "top right", (0, 2): "bottom left", (2, 2): "bottom right"}
HOW_MANY = "how many shapes ?"
QUESTIONS = (
    HOW_MANY,
    *(f"what colour is the {kind} ?" for kind in KINDS),
    *(f"where is the {kind} ?" for kind in KINDS),
)
CLASSES = 1 + len(KINDS) * len(COLOURS)
BACKGROUND = (245, 245, 245)


@dataclass(frozen=True)
class Shape:
    kind: str
    colour: str
    cell: tuple[int, int]
    """Column and row."""
    centre: tuple[int, int]
    radius: int


Scene = tuple[Shape, ...]


@dataclass(frozen=True)
class Row:
    """One picture, as PNG, with a question and its answer."""

    picture: bytes
    question: str
    answer: str


def draw_scene(rng: random.Random) -> Scene:
    cells = rng.sample([(x, y) for x in range(CELLS) for y in range(CELLS)], rng.randint(1, 4))
    return tuple(
        Shape(
            rng.choice(KINDS),
            rng.choice(list(COLOURS)),
            (x, y),
            (x * CELL + CELL // 2 + rng.randint(-1, 1), y * CELL + CELL // 2 + rng.randint(-1, 1)),
            rng.randint(5, 6),
        )
        for x, y in cells
    )


def png(scene: Scene) -> bytes:
    """The picture of a scene; of no shapes, a blank one."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for shape in scene:
        (x, y), r, fill = shape.centre, shape.radius, COLOURS[shape.colour]
        if shape.kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif shape.kind == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=fill)
        else:
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=fill)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def answers(scene: Scene) -> dict[str, str]:
    """Every question that this scene answers. A kind of shape is asked for only if there is one of it."""
    found = {HOW_MANY: COUNTS[len(scene) - 1]}
    for kind in KINDS:
        same = [shape for shape in scene if shape.kind == kind]
        if len(same) == 1:
            found[f"what colour is the {kind} ?"] = same[0].colour
            if same[0].cell in CORNERS:
                found[f"where is the {kind} ?"] = CORNERS[same[0].cell]
    return found


def cells(scene: Scene) -> list[int]:
    """What is in each cell, in reading order: 0 for nothing, else a number for kind and colour."""
    names = [(kind, colour) for kind in KINDS for colour in COLOURS]
    found = {shape.cell: 1 + names.index((shape.kind, shape.colour)) for shape in scene}
    return [found.get((x, y), 0) for y in range(CELLS) for x in range(CELLS)]


def rows(seed: str) -> Iterator[Row]:
    """Rows without end: a third of them of each kind of question, no picture twice."""
    rng = random.Random(f"shapes/{seed}")
    seen: set[bytes] = set()
    while True:
        for word in ("how", "what", "where"):
            while True:
                scene = draw_scene(rng)
                asked = [question for question in answers(scene) if question.startswith(word)]
                picture = png(scene)
                if asked and picture not in seen:
                    break
            seen.add(picture)
            question = rng.choice(asked)
            yield Row(picture, question, answers(scene)[question])


def swapped(given: list[Row], seed: int = 0) -> list[Row]:
    """The same questions and answers, each with the picture of another row of the same question."""
    rng, found = random.Random(seed), list(given)
    for question in QUESTIONS:
        places = [i for i, row in enumerate(given) if row.question == question]
        shift = rng.randrange(1, len(places)) if len(places) > 1 else 0
        for n, place in enumerate(places):
            other = given[places[(n + shift) % len(places)]]
            found[place] = Row(other.picture, question, given[place].answer)
    return found


def blank(given: list[Row]) -> list[Row]:
    """The same questions and answers, each with an empty picture."""
    return [Row(png(()), row.question, row.answer) for row in given]


def best_constant(given: list[Row]) -> float:
    """The accuracy of the best answer that depends on the question alone."""
    right = 0
    for question in QUESTIONS:
        answers = [row.answer for row in given if row.question == question]
        right += max((answers.count(answer) for answer in set(answers)), default=0)
    return right / len(given)
