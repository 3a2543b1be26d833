"""Ids without a token are never candidates, are excluded from the teacher's softmax, and are refused in rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from teacher_rig import VOCAB, random_items, write_model

from understudy.serving.http import Refused
from understudy.teacher.clients.http import RequestRefused
from understudy.teacher.clients.validate import check_candidates_usable, check_usable
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.protocol import decode_request, encode_request, request_of
from understudy.teacher.replica.app import check_limits
from understudy.teacher.scoring.head import head_of, score_rows
from understudy.teacher.scoring.head_kernel import VocabularyShard, WholeVocabulary
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

USABLE = UsableIds(VOCAB - 9, (0, 4, 11))


def items_of(signal: Signal, k: int) -> list[ScoreItem]:
    """Items whose tokens and named ids are all usable."""
    known = np.setdiff1d(np.arange(USABLE.limit), USABLE.holes).astype(np.int32)
    return [
        ScoreItem(
            one.key,
            known[one.tokens % len(known)],
            one.positions,
            one.signal,
            one.k,
            None if one.ids is None else known[one.ids % len(known)],
        )
        for one in random_items(4, 0, signal, k)
    ]


@pytest.mark.parametrize("asked", [True, False], ids=["named by the request", "the teacher's own"])
@pytest.mark.parametrize(("signal", "k"), [(Signal.TOPK, 12), (Signal.AT_IDS, 3), (Signal.SAMPLED, 0)])
def test_scores_are_a_softmax_over_the_usable_ids(
    tmp_path: Path, signal: Signal, k: int, asked: bool
) -> None:
    frozen = load_frozen(str(write_model(tmp_path / "model")))
    scorer = Scorer("math", frozen, usable=None if asked else USABLE)
    warm_up(scorer)
    items = items_of(signal, k)
    request = request_of(items, USABLE if asked else None)
    for item, got in zip(items, scorer.score(request).split(), strict=True):
        with torch.inference_mode():
            ids = torch.from_numpy(item.tokens.astype(np.int64))
            logits = USABLE.hide_(frozen.model(input_ids=ids[None]).logits[0].double())
        right = logits.log_softmax(-1).numpy()[item.positions - 1]
        own = np.take_along_axis(right, item.tokens[item.positions][:, None], 1)[:, 0]
        np.testing.assert_allclose(got.sampled_logprobs, own, atol=1e-4)
        if got.ids is not None:
            assert USABLE.first_unusable(got.ids) is None
            np.testing.assert_allclose(got.logprobs, np.take_along_axis(right, got.ids, 1), atol=1e-4)
        if signal is Signal.TOPK:
            best = np.sort(right, axis=1)[:, : -k - 1 : -1]
            np.testing.assert_allclose(got.logprobs, best, atol=1e-4)


def test_vocabulary_shards_mask_the_same_unusable_ids_as_the_whole_head(tmp_path: Path) -> None:
    """Under tensor parallelism each process masks its own columns, including one without any usable id."""
    head = head_of(load_frozen(str(write_model(tmp_path / "model"))).model)
    hidden = torch.randn(5, head.weight_VH.shape[1])
    whole = WholeVocabulary().cut(head.logits(hidden), USABLE)
    part = VOCAB // 3
    for first in (0, part, 2 * part):
        own = VocabularyShard(first).cut(head.logits(hidden)[:, first : first + part].clone(), USABLE)
        expected = torch.full((5, part), -torch.inf)
        there = whole[:, first : first + part]
        expected[:, : there.shape[1]] = there
        torch.testing.assert_close(own, expected)
    with pytest.raises(RuntimeError):  # an unusable id has no logprob
        score_rows(head, hidden, torch.full((5,), VOCAB - 1), usable=USABLE, chunk_bytes=1 << 20)


def test_at_ids_requests_may_name_more_ids_than_the_vocabulary_has(tmp_path: Path) -> None:
    """A mixture names the candidates of all its other teachers, and these may overlap."""
    many = request_of(items_of(Signal.AT_IDS, 2 * VOCAB), USABLE)
    check_limits(many, Limits(max_k=2 * VOCAB), VOCAB)
    scorer = Scorer("math", load_frozen(str(write_model(tmp_path / "model"))))
    assert all(one.ids is not None and one.ids.shape[1] == 2 * VOCAB for one in scorer.score(many).split())
    for items, most in ((items_of(Signal.AT_IDS, 9), 8), (items_of(Signal.TOPK, USABLE.count + 1), VOCAB)):
        with pytest.raises(Refused, match=f"at most {most} are given, and the vocabulary has {USABLE.count}"):
            check_limits(request_of(items, USABLE), Limits(max_k=most), VOCAB)


def test_a_request_without_usable_ids_has_no_fields_for_them() -> None:
    plain = request_of(random_items(2, 0, Signal.TOPK, 3))
    assert b"id_limit" not in encode_request(plain) and b"unused_ids" not in encode_request(plain)
    again = decode_request(encode_request(request_of(random_items(2, 0, Signal.TOPK, 3), USABLE)))
    assert again.usable == USABLE and decode_request(encode_request(plain)).usable is None


def test_a_row_with_an_unusable_id_is_refused_with_its_key_and_position() -> None:
    good, bad = items_of(Signal.SAMPLED, 0)[:2]
    check_usable([good], USABLE, "teacher math")
    tokens = bad.tokens.copy()
    tokens[1] = 4
    with pytest.raises(RequestRefused, match=rf"row '{bad.key}': token id 4 at position 1 has no token"):
        check_usable([good, ScoreItem(bad.key, tokens, bad.positions, bad.signal)], USABLE, "teacher math")
    scores = TeacherScores(
        "r",
        "math",
        Signal.TOPK,
        np.zeros(1, np.float32),
        np.array([[1, VOCAB]]),
        np.zeros((1, 2), np.float32),
    )
    with pytest.raises(RequestRefused, match="row 'r': the teacher's candidate"):
        check_candidates_usable([scores], USABLE, "teacher math")


def test_cut_to_reduces_a_manifests_vocabulary_to_the_usable_ids() -> None:
    manifest: Any = Manifest("math", "native", "m", "", "", VOCAB, 8, "float32", [], None)  # type: ignore[arg-type]
    assert manifest.cut_to(None) is manifest and manifest.cut_to(UsableIds(VOCAB)) is manifest
    cut = manifest.cut_to(USABLE)
    assert (cut.vocab_size, cut.unused_ids) == (USABLE.limit, list(USABLE.holes))
