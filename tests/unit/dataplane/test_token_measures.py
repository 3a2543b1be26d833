"""Measures per token, compared with the formulas computed from exact distributions."""

import numpy as np
import pytest

from understudy.dataplane.token_measures import measures, worst_tokens


def planted() -> dict[str, object]:
    """Four written tokens; at the third the teacher prefers id 9 and finds the written token unlikely."""
    own = np.log(np.array([0.5, 0.6, 0.7, 0.4], np.float32))
    return {
        "tokens": np.array([1, 5, 6, 7, 8], np.int32),
        "loss_mask": np.array([False, True, True, True, True]),
        "behaviour_logprobs": np.array([np.nan, *own], np.float32),
        "weight_versions": np.array([-1, 0, 0, 0, 0], np.int32),
        "teacher_logprobs": own - np.array([0.1, -0.2, 7.5, 0.0], np.float32),
        "teacher_ids": np.array([[5, 6], [6, 5], [6, 9], [8, 9]], np.int32),
        "teacher_topk_logprobs": np.log(
            np.array([[0.6, 0.3], [0.7, 0.2], [0.1, 0.8], [0.9, 0.05]], np.float32)
        ),
    }


def exact() -> tuple[dict[str, object], np.ndarray, np.ndarray]:
    """Two written tokens over a vocabulary of 6; the teacher sends its 3 best."""
    p = np.array([[0.5, 0.2, 0.1, 0.1, 0.06, 0.04], [0.05, 0.05, 0.7, 0.1, 0.05, 0.05]])
    q = np.array([[0.1, 0.4, 0.2, 0.1, 0.1, 0.1], [0.3, 0.3, 0.1, 0.1, 0.1, 0.1]])
    ids = np.argsort(-p, axis=1)[:, :3].astype(np.int32)
    written = np.array([1, 0])
    rows = np.arange(2)
    columns = {
        "tokens": np.array([5, 1, 0], np.int32),
        "loss_mask": np.array([False, True, True]),
        "behaviour_logprobs": np.array([np.nan, *np.log(q[rows, written])], np.float32),
        "weight_versions": np.array([-1, 2, 3], np.int32),
        "teacher_logprobs": np.log(p[rows, written]).astype(np.float32),
        "teacher_ids": ids,
        "teacher_topk_logprobs": np.log(np.take_along_axis(p, ids, 1)).astype(np.float32),
        "student_topk_logprobs": np.log(np.take_along_axis(q, ids, 1)).astype(np.float32),
        "trainer_logprobs": np.log(2 * q[rows, written]).astype(np.float32),
    }
    return columns, p, q


def test_token_measures_follow_the_formulas_on_exact_distributions() -> None:
    columns, p, q = exact()
    found = measures(columns)
    ids = np.asarray(columns["teacher_ids"])
    inside_p, inside_q = np.take_along_axis(p, ids, 1), np.take_along_axis(q, ids, 1)
    tail_p, tail_q = 1 - inside_p.sum(1), 1 - inside_q.sum(1)
    kl = (inside_p * np.log(inside_p / inside_q)).sum(1) + tail_p * np.log(tail_p / tail_q)
    entropy = -(inside_p * np.log(inside_p)).sum(1) - tail_p * np.log(tail_p)
    assert found["kl"] == pytest.approx(kl, abs=1e-6)
    assert found["teacher_entropy"] == pytest.approx(entropy, abs=1e-6)
    assert found["gap"] == pytest.approx([np.log(0.4 / 0.2), np.log(0.3 / 0.05)], abs=1e-6)
    assert found["tail"] == pytest.approx(tail_p, abs=1e-6) and found["ratio"] == pytest.approx([2, 2])
    assert found["version"].tolist() == [2, 3]


def test_measures_whose_columns_are_missing_are_left_out() -> None:
    columns, _, _ = exact()
    bare = {name: columns[name] for name in ("tokens", "loss_mask", "behaviour_logprobs", "weight_versions")}
    assert set(measures(bare)) == {"student_surprise", "version"} and worst_tokens(bare) == []


def test_worst_tokens_have_the_largest_gap_and_the_token_the_teacher_preferred() -> None:
    (place, token, gap, wanted), second = worst_tokens(planted())
    assert (place, token, wanted) == (2, 7, 9) and gap == pytest.approx(7.5, abs=1e-4)
    assert second[0] == 0 and second[2] == pytest.approx(0.1, abs=1e-4)
