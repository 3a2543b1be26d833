"""Files that travel inside the package: the quickstart's models and problems.

`recipes/quickstart/make_models.py` makes all of them. The functions here only say where they lie, so that importing this
module costs nothing.
"""

from __future__ import annotations

from pathlib import Path

QUICKSTART = Path(__file__).resolve().parent / "quickstart"

QUICKSTART_MODELS = ("student", "teacher-add", "teacher-sort")
QUICKSTART_SPLITS = ("train", "valid", "test")


def quickstart_model(name: str) -> Path:
    """The Hugging Face folder of one quickstart model, by a name of `QUICKSTART_MODELS`."""
    return _existing(QUICKSTART / "models" / name, name, QUICKSTART_MODELS)


def quickstart_data(split: str) -> Path:
    """The jsonl file of one split of the quickstart problems, by a name of `QUICKSTART_SPLITS`.

    `valid` is for choosing settings; `test` is held out of every model's training and of every choice.
    """
    return _existing(QUICKSTART / "data" / f"{split}.jsonl", split, QUICKSTART_SPLITS)


def _existing(path: Path, name: str, known: tuple[str, ...]) -> Path:
    if name not in known:
        raise KeyError(f"there is no quickstart asset {name!r}; there are {', '.join(known)}")
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing from the installed package; reinstall understudy, "
            "or in a checkout run: python recipes/quickstart/make_models.py"
        )
    return path
