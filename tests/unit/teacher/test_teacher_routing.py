"""Routing of rows to teachers, and the checks of a teacher: vocabulary, signals, limits, identity of replicas."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from teacher_rig import random_items, write_tokenizer

from understudy.assembly.teachers.student_facts import mixed_teachers
from understudy.errors import TeacherError
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.pool.integrity import (
    Identity,
    check_manifest_unchanged,
    check_same,
    check_signals,
    check_vocabulary,
)
from understudy.teacher.route import TeacherRouter, score
from understudy.teacher.vocabulary import Vocabulary, differences
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

MANIFEST = Manifest(
    teacher="math",
    backend="native",
    model="m",
    weights_sha256="aa",
    vocab_fingerprint="ff",
    vocab_size=61,
    hidden_size=32,
    dtype="float32",
    signals=[Signal.SAMPLED, Signal.TOPK],
    limits=Limits(max_length=100, max_k=20),
)


@dataclass
class NamedPool:
    """A pool that signs scores with its name and records the keys of each call."""

    name: str
    asked: list[list[str]] = field(default_factory=list)

    async def score(self, items: list[ScoreItem]) -> list[TeacherScores]:
        self.asked.append([item.key for item in items])
        await asyncio.sleep(0)
        return [
            TeacherScores(i.key, self.name, i.signal, np.zeros(len(i.positions), np.float32)) for i in items
        ]


def router(**changes: Any) -> TeacherRouter:
    pools: Any = {"maths": NamedPool("maths"), "code": NamedPool("code")}
    return TeacherRouter(pools, **{"keys": {"openai/gsm8k": "maths", "mbpp": "code"}, **changes})


def test_a_routing_value_selects_its_teacher() -> None:
    assert router().route("mbpp") == "code"
    assert router().route("openai/gsm8k") == "maths"


def test_a_single_teacher_gets_every_routing_value() -> None:
    only: Any = {"t": NamedPool("t")}
    assert TeacherRouter(only).route("whatever") == "t"


def test_an_unknown_routing_value_is_refused_with_all_keys_and_the_nearest() -> None:
    with pytest.raises(
        TeacherError,
        match=r"no teacher for 'openai/gsm8'; keys are 'openai/gsm8k', 'mbpp'; the nearest is 'openai/gsm8k'",
    ):
        router().route("openai/gsm8")
    only: Any = {"t": NamedPool("t")}
    with pytest.raises(TeacherError, match="no teacher for 'zzz'"):
        TeacherRouter(only, keys={"a": "t"}).route("zzz")


def test_the_default_teacher_gets_unknown_routing_values() -> None:
    assert router(default="code").route("something else") == "code"


def test_routes_to_unknown_teachers_and_unreachable_teachers_are_refused() -> None:
    with pytest.raises(TeacherError, match="'mbpp' is routed to teacher 'cod'"):
        router(keys={"x": "maths", "mbpp": "cod"})
    with pytest.raises(TeacherError, match="no row can reach teacher 'code'"):
        router(keys={"x": "maths"})
    with pytest.raises(TeacherError, match="'default' is routed to teacher 'nobody'"):
        router(default="nobody")
    with pytest.raises(TeacherError, match="at least one"):
        TeacherRouter({})


def test_items_are_sent_in_one_call_per_teacher_and_scores_return_in_order() -> None:
    r = router()
    items = random_items(5, 1)
    values = ["mbpp", "openai/gsm8k", "mbpp", "mbpp", "openai/gsm8k"]
    scores = asyncio.run(score(r, list(zip(items, values, strict=True))))
    assert [s.key for s in scores] == [i.key for i in items]
    assert [s.teacher for s in scores] == ["code", "maths", "code", "code", "maths"]
    pools: Any = r.pools
    assert pools["code"].asked == [[items[0].key, items[2].key, items[3].key]]
    assert pools["maths"].asked == [[items[1].key, items[4].key]]


def vocabulary(folder: Path, tokens: dict[str, int], **special: str) -> Vocabulary:
    folder.mkdir()
    write_tokenizer(folder, tokens, special)
    return Vocabulary.load(folder)


def test_vocabularies_are_compared_at_the_ids_that_both_have(tmp_path: Path) -> None:
    tokens = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    student = vocabulary(tmp_path / "s", tokens, bos_token="<s>", eos_token="</s>")
    same = vocabulary(tmp_path / "same", dict(reversed(tokens.items())), bos_token="<s>", eos_token="</s>")
    assert student.fingerprint == same.fingerprint
    check_vocabulary(student, same, "math")
    moved = vocabulary(tmp_path / "moved", {**tokens, "a": 3, "b": 2}, bos_token="<s>", eos_token="</s>")
    with pytest.raises(TeacherError, match="id 2 is 'a' for the student and 'b' for the teacher; id 3 is"):
        check_vocabulary(student, moved, "math")
    fewer = vocabulary(tmp_path / "fewer", {"<s>": 0, "</s>": 1, "a": 2}, bos_token="<s>", eos_token="</s>")
    assert not differences(student, fewer) and not differences(fewer, student)
    assert differences(student, moved, (3, 4)) == {2: ("a", "b")}, (
        "ids beyond a model's rows must not be compared"
    )
    other_eos = vocabulary(tmp_path / "eos", tokens, bos_token="<s>", eos_token="b", unk_token="a")
    check_vocabulary(student, other_eos, "math")


def test_tokens_added_in_tokenizer_config_belong_to_the_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"a": 0, "b": 1}, {})
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"3": {"content": "<later>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Vocabulary.load(tmp_path)
    assert found.tokens() == {0: "a", 1: "b", 3: "<later>"}
    assert found.usable(8) == UsableIds(4, (2,)) and found.usable(3) == UsableIds(2)


def test_unigram_vocabularies_and_added_tokens_are_read(tmp_path: Path) -> None:
    content = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.0]]},
        "added_tokens": [{"id": 2, "content": "<|end|>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    loaded = Vocabulary.load(tmp_path)
    assert loaded.ids == {"<unk>": 0, "▁a": 1, "<|end|>": 2}
    assert loaded.special["eos_token"] == 2 and loaded.special["pad_token"] is None


def test_a_teacher_that_lacks_a_signal_k_or_length_is_refused_with_all_reasons() -> None:
    check_signals(MANIFEST, [Signal.TOPK], 20, 100)
    with pytest.raises(
        TeacherError, match=r"cannot give at_ids, hidden; its native backend offers sampled, topk"
    ) as caught:
        check_signals(MANIFEST, [Signal.AT_IDS, Signal.HIDDEN], 64, 101)
    assert "at most 20 candidates; the loss asks for 64" in str(caught.value)
    assert "prompt + response + 1 needs 101" in str(caught.value)


def test_a_mixture_that_needs_more_candidate_ids_than_a_teacher_gives_is_refused() -> None:
    check_signals(MANIFEST, [Signal.TOPK], 10, 100, mixed=3)
    check_signals(MANIFEST, [Signal.SAMPLED], 20, 100, mixed=3)
    with pytest.raises(
        TeacherError,
        match=r"at most 20 .* mixture of 3 teachers .* at the 2 · 11 .* set loss.topk to at most 10",
    ):
        check_signals(MANIFEST, [Signal.TOPK], 11, 100, mixed=3)


def test_mixed_teachers_gives_the_size_of_the_largest_mixture_of_each_teacher() -> None:
    rows = [{"w": {"a": 0.5, "b": 0.5}}, {"w": {"b": 0.2, "c": 0.3, "d": 0.5, "e": 0.0}}, {"w": None}, {}]
    found = mixed_teachers(SimpleNamespace(rows=rows), "w")  # type: ignore[arg-type]
    assert found == {"a": 2, "b": 3, "c": 3, "d": 3}


def test_a_replica_with_other_probe_scores_or_weights_is_refused() -> None:
    probe = np.array([-1.0, -2.0], np.float32)
    first = Identity(MANIFEST, probe)
    check_same(first, Identity(MANIFEST, probe + 5e-5), "b")
    with pytest.raises(TeacherError, match=r"replica b: scores of the fixed tokens differ by 0\.01"):
        check_same(first, Identity(MANIFEST, probe + np.float32(0.01)), "b")
    with pytest.raises(TeacherError, match="fixed tokens differ by nan"):
        check_same(first, Identity(MANIFEST, probe * np.float32(np.nan)), "b")
    other = msgspec.structs.replace(MANIFEST, weights_sha256="bb")
    with pytest.raises(TeacherError, match="replica b: weights is bb; the other replicas have aa"):
        check_same(first, Identity(other, probe), "b")
    with pytest.raises(TeacherError, match="changed since this run began"):
        check_manifest_unchanged(MANIFEST, other)
    check_manifest_unchanged(MANIFEST, msgspec.structs.replace(MANIFEST, model="moved/elsewhere"))


def test_a_replica_with_lower_limits_than_the_others_is_refused() -> None:
    """Otherwise it would depend on which replica is idle whether a row can be scored."""
    first, probe = Identity(MANIFEST, np.zeros(2, np.float32)), np.zeros(2, np.float32)

    def with_limits(**limits: int) -> Identity:
        changed = msgspec.structs.replace(MANIFEST.limits, **limits)
        return Identity(msgspec.structs.replace(MANIFEST, limits=changed), probe)

    check_same(first, with_limits(max_length=200, max_k=30), "b")
    with pytest.raises(
        TeacherError, match=r"replica b: .* 99 tokens; the other replicas take 100\. .*--max-model-len"
    ):
        check_same(first, with_limits(max_length=99), "b")
    with pytest.raises(
        TeacherError, match=r"replica b: .* 19 candidates; the other replicas give 20\. .*--max-logprobs"
    ):
        check_same(first, with_limits(max_k=19), "b")
