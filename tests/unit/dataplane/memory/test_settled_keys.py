"""The set of settled keys, which holds millions of keys in eight bytes each."""

import random
import sys

from understudy.dataplane.memory.settled import SettledKeys


def test_settled_keys_behave_as_a_set_across_merges() -> None:
    rng = random.Random(0)
    settled, plain = SettledKeys(merge_at=50), set()
    for _ in range(2000):
        key = f"{rng.randrange(1500)}_0_0"
        assert (key in settled) == (key in plain)
        if rng.random() < 0.5:
            settled.add(key)
            plain.add(key)
    assert all(key in settled for key in plain)
    assert len(settled) <= len(plain) + 50


def test_settled_keys_take_eight_bytes_each() -> None:
    settled = SettledKeys()
    for i in range(200_000):
        settled.add(f"00000-{i:07d}_0_0")
    assert sys.getsizeof(settled._sorted) < 8 * len(settled._sorted) + 200 and len(settled._recent) < 65536
    assert len(settled) == 200_000
