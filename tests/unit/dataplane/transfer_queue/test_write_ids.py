"""Write ids: unique names of copies in the queue, which contain the row's key and are grouped for fetching."""

import doctest

from understudy.dataplane.transfer_queue import write_ids as write_ids_module
from understudy.dataplane.transfer_queue.write_ids import by_name, queue_key, row_of, write_ids


def test_the_doctests_of_write_ids_pass() -> None:
    assert doctest.testmod(write_ids_module).failed == 0


def test_queue_keys_are_unique_for_each_write_and_contain_the_key_of_the_row() -> None:
    writers = [write_ids() for _ in range(50)]
    names = {queue_key(key, next(ids)) for ids in writers for key in ("p_0_0", "q~3_0_0") for _ in range(20)}
    assert len(names) == 50 * 2 * 20
    assert {row_of(name) for name in names} == {"p_0_0", "q~3_0_0"}
    for plain in ("p_0_0", "00000-0000017_3_0", "a~b_0_0", "x~5f0c2a_0_0", ""):
        assert row_of(plain) == queue_key(plain, "") == plain


def test_columns_written_together_are_fetched_in_one_call() -> None:
    keys = ("a", "b")
    own = {"tokens": ("5f0c2a.1", "5f0c2a.2"), "mask": ("5f0c2a.1", "5f0c2a.2"), "scores": ("", "77aa01.9")}
    assert by_name(keys, ("tokens", "reward", "mask", "scores"), own) == [
        (("a~5f0c2a.1", "b~5f0c2a.2"), ["tokens", "mask"]),
        (("a", "b"), ["reward"]),
        (("a", "b~77aa01.9"), ["scores"]),
    ]
