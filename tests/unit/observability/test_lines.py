"""`GrowingFile` follows a file line by line, also when its last line is torn or the file is replaced."""

from pathlib import Path

from understudy.observability.lines import GrowingFile, line_at, record


def lines(file: GrowingFile, most: int = 1 << 40) -> list[tuple[int, bytes]]:
    return list(file.new_lines(most))


def test_new_lines_returns_only_complete_lines_written_since_the_last_call(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = GrowingFile(path)
    assert lines(file) == []
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert lines(file) == [(0, b'{"a": 1}')] and lines(file) == []
    with path.open("ab") as out:
        out.write(b": 2}\n")
    assert lines(file) == [(9, b'{"b": 2}')]
    assert line_at(path, 9, 8) == {"b": 2}


def test_a_replaced_or_truncated_file_is_read_from_its_start_again(tmp_path: Path) -> None:
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


def test_lines_longer_than_the_read_limit_are_returned_over_several_calls(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 99 + b"\n")
    file = GrowingFile(path)
    assert sum(len(lines(file, 10)) for _ in range(3)) == 2


def test_record_returns_none_for_a_line_that_is_not_a_json_object() -> None:
    assert record(b'{"torn') is None and record(b"[1]") is None and record(b"\xff") is None
