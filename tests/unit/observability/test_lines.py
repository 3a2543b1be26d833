"""A growing file is followed line by line, torn ends and rewrites included."""

from pathlib import Path

from understudy.observability.lines import GrowingFile, line_at, record


def lines(file: GrowingFile, most: int = 1 << 40) -> list[tuple[int, bytes]]:
    return list(file.new_lines(most))


def test_only_new_whole_lines_come(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = GrowingFile(path)
    assert lines(file) == []
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert lines(file) == [(0, b'{"a": 1}')] and lines(file) == []
    with path.open("ab") as out:
        out.write(b": 2}\n")
    assert lines(file) == [(9, b'{"b": 2}')]
    assert line_at(path, 9, 8) == {"b": 2}


def test_a_file_that_was_replaced_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    dropped: list[int] = []
    file = GrowingFile(path, lambda: dropped.append(1))
    assert len(lines(file)) == 3 and not dropped
    for content, times in ((b"1\n2\n3\n4\n", 1), (b"", 2)):
        (tmp_path / "b").write_bytes(content)
        (tmp_path / "b").replace(path)
        assert len(lines(file)) == content.count(b"\n") and len(dropped) == times
    path.write_bytes(b"1\n")
    assert len(lines(file)) == 1 and len(dropped) == 2


def test_a_piece_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 99 + b"\n")
    file = GrowingFile(path)
    assert sum(len(lines(file, 10)) for _ in range(3)) == 2


def test_what_is_no_object_is_no_record() -> None:
    assert record(b'{"torn') is None and record(b"[1]") is None and record(b"\xff") is None
