"""Each line of `main` is an error that a type checker finds only if it reads the package's own types."""

import understudy


def main() -> None:
    understudy.distill(student=3, teacher="t", data="d")
    understudy.Run.open("runs/a").status + 1
    understudy.resume()
