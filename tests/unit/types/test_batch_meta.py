import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.types.batch import BatchMeta

META = BatchMeta("train", ("a", "b", "c"), ("tokens", "mask"), ({"n": 1}, {"n": 2}, {"n": 3}), {"step": 4})


def test_select_keeps_tags_beside_their_keys() -> None:
    chosen = META.select(["c", "a"])
    assert chosen.keys == ("c", "a") and chosen.tags == ({"n": 3}, {"n": 1}) and chosen.extra == {"step": 4}
    with pytest.raises(KeyError, match="not in this batch"):
        META.select(["z"])


@given(st.integers(0, 12), st.integers(1, 7))
def test_chunks_are_balanced_and_concatenate_to_the_whole(rows: int, parts: int) -> None:
    meta = BatchMeta("p", tuple(str(i) for i in range(rows)))
    chunks = meta.chunk(parts)
    assert len(chunks) == parts and max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert BatchMeta.concat(chunks).keys == meta.keys


def test_duplicate_keys_missing_tags_and_mixed_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicate keys"):
        BatchMeta("p", ("a", "a"))
    with pytest.raises(ValueError, match="duplicate keys"):
        BatchMeta.concat([META, META])
    with pytest.raises(ValueError, match="2 tags for 3 keys"):
        BatchMeta("p", ("a", "b", "c"), tags=({}, {}))
    with pytest.raises(ValueError, match="one partition"):
        BatchMeta.concat([BatchMeta("p", ("a",)), BatchMeta("q", ("b",))])


def test_union_joins_columns_of_the_same_rows() -> None:
    other = BatchMeta("train", ("c", "b", "a"), ("scores",), ({"m": 3}, {"m": 2}, {"m": 1}))
    both = META.union(other)
    assert both.fields == ("tokens", "mask", "scores") and both.tags[0] == {"n": 1, "m": 1}
    with pytest.raises(ValueError, match="same keys"):
        META.union(BatchMeta("train", ("a",)))


def test_write_marks_follow_their_rows_through_at_select_concat_and_union() -> None:
    marked = BatchMeta("p", ("a", "b"), ("tokens",), marks={"tokens": ("1", "2")})
    assert marked.at([1]).marks == {"tokens": ("2",)} and marked.select(("b", "a")).marks == {
        "tokens": ("2", "1")
    }
    whole = BatchMeta.concat([BatchMeta("p", ("z",), ("tokens",)), marked])
    assert whole.marks == {"tokens": ("", "1", "2")}
    scores = BatchMeta("p", ("b", "a"), ("scores",), marks={"scores": ("8", "9")})
    assert marked.union(scores).marks == {"tokens": ("1", "2"), "scores": ("9", "8")}
