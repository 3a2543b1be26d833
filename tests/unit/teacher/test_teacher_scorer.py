"""The scorer compared with a plain float64 transformers forward of each sequence by itself."""

import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_rig import VOCAB, random_items, write_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from understudy.errors import TeacherError
from understudy.nn import grouped_attention
from understudy.teacher.head_frame import decode_head, encode_head
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring import packing
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.head import Head, from_wire, head_of, score_rows, to_wire
from understudy.teacher.scoring.model import load_frozen, weights_sha256
from understudy.teacher.scoring.packing import pack, padded_plan
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.shared_prefixes import (
    PrefixGroup,
    common_prefix,
    prefix_groups,
    saved_tokens,
    split_to_budget,
)
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal, TeacherScores


@functools.lru_cache(maxsize=2)
def plain_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def plain_logprobs(folder: Path, item: ScoreItem) -> np.ndarray:
    """float64 [P, V]: log-softmax of the model's own logits for this one sequence, without padding."""
    model = plain_model(folder)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(item.tokens.astype(np.int64))[None]).logits[0]
    return logits.log_softmax(-1).numpy()[item.positions - 1]


def assert_same_as_plain(
    folder: Path, items: list[ScoreItem], scores: list[TeacherScores], atol: float = 1e-4
) -> None:
    for item, score in zip(items, scores, strict=True):
        plain_PV = plain_logprobs(folder, item)
        assert score.key == item.key
        scored = item.tokens[item.positions]
        np.testing.assert_allclose(
            score.sampled_logprobs, np.take_along_axis(plain_PV, scored[:, None], 1)[:, 0], atol=atol
        )
        if item.signal is Signal.TOPK:
            assert score.ids is not None and score.logprobs is not None
            best_PK = np.sort(plain_PV, axis=1)[:, ::-1][:, : item.k]
            np.testing.assert_allclose(score.logprobs, best_PK, atol=atol)
            np.testing.assert_allclose(np.take_along_axis(plain_PV, score.ids, 1), score.logprobs, atol=atol)
        if item.signal is Signal.AT_IDS:
            assert score.logprobs is not None and item.ids is not None
            np.testing.assert_array_equal(score.ids, item.ids)
            np.testing.assert_allclose(score.logprobs, np.take_along_axis(plain_PV, item.ids, 1), atol=atol)


def all_signals() -> list[ScoreItem]:
    return (
        random_items(3, 1, Signal.TOPK, 8)
        + random_items(2, 2, Signal.SAMPLED)
        + random_items(2, 3, Signal.AT_IDS, 5)
        + random_items(2, 4, Signal.HIDDEN)
        + random_items(1, 5, Signal.TOPK, VOCAB)
    )


def samples_of_prompts(signal: Signal = Signal.TOPK, k: int = 6) -> list[ScoreItem]:
    """Groups of rows that share a prompt, a row without a group, and a row that is a prefix of another, shuffled.

    Some positions lie in the shared prompt, as in a conversation whose first turn is scored again.
    """
    rng = np.random.default_rng(3)
    items = []
    for group in range(4):
        prompt = rng.integers(0, VOCAB, int(rng.integers(5, 20)))
        for sample in range(1 if group == 3 else 4):
            tokens = np.concatenate([prompt, rng.integers(0, VOCAB, int(rng.integers(1, 12)))]).astype(
                np.int32
            )
            first = 1 if sample == 2 else len(prompt)
            items.append(
                ScoreItem(
                    f"{group}-{sample}", tokens, np.arange(first, len(tokens), dtype=np.int32), signal, k
                )
            )
    beginning = items[0].tokens[:5]
    items.append(ScoreItem("beginning", beginning, np.arange(1, 5, dtype=np.int32), signal, k))
    rng.shuffle(items)  # type: ignore[arg-type]
    return items


@pytest.mark.parametrize("budget", [16384, 64, 1])
@pytest.mark.parametrize("layout", [ScoringLayout.PADDED, ScoringLayout.PACKED])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_scores_equal_a_plain_transformers_forward(
    family: str, layout: ScoringLayout, budget: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    scorer = Scorer("t", load_frozen(str(folder)), ScorerOptions(max_batch_tokens=budget, layout=layout))
    items = all_signals() + samples_of_prompts()
    assert_same_as_plain(folder, items, scorer.score(request_of(items)).split())


def test_a_prompt_shared_by_several_rows_is_forwarded_once(qwen3: Path) -> None:
    items = samples_of_prompts()
    read = []
    for share in (False, True):
        scorer = Scorer(
            "t", load_frozen(str(qwen3)), ScorerOptions(layout=ScoringLayout.PACKED, share_prefixes=share)
        )
        scorer.frozen.body.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        scorer.score(request_of(items))
    needed = sum(int(item.positions[-1]) for item in items)
    prompts = {item.key.split("-")[0]: int(item.positions[0]) for item in items if item.key.endswith("-0")}
    assert read == [needed, needed - 3 * sum(prompts[group] for group in "012")]


def test_packed_scores_respect_sliding_window_attention(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "sliding", use_sliding_window=True, sliding_window=4, max_window_layers=1, seed=5
    )
    scorer = Scorer("t", load_frozen(str(folder)), ScorerOptions(layout=ScoringLayout.PACKED))
    assert "sliding_attention" in scorer.frozen.config.layer_types
    warm_up(scorer)
    items = samples_of_prompts()
    assert_same_as_plain(folder, items, scorer.score(request_of(items)).split())


def test_an_architecture_that_cannot_be_packed_falls_back_to_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    FAMILIES["softcap"]().save_pretrained(tmp_path)
    scorer = Scorer("t", load_frozen(str(tmp_path)))
    warm_up(scorer)
    assert scorer.body.layout is ScoringLayout.PADDED
    insisting = Scorer("t", load_frozen(str(tmp_path)), ScorerOptions(layout=ScoringLayout.PACKED))
    with pytest.raises(TeacherError, match="cannot be scored packed"):
        warm_up(insisting)


def test_prefix_groups_save_as_many_tokens_as_the_best_partition_of_the_sorted_rows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = [rng.integers(0, 2, int(rng.integers(1, 6))).astype(np.int32) for _ in range(6)]
        ordered = sorted(rows, key=lambda row: row.astype(">i4").tobytes())
        possible = []
        for cuts in itertools.product([False, True], repeat=5):
            bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 6]
            runs = [ordered[a:b] for a, b in itertools.pairwise(bounds)]
            possible.append(
                sum((len(run) - 1) * min(common_prefix(run[0], row) for row in run) for run in runs)
            )
        assert saved_tokens(prefix_groups(rows)) == max(possible)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 40)
)
@settings(max_examples=200, deadline=None)
def test_packing_keeps_every_sequence_and_every_context(rows: list[list[int]], budget: int) -> None:
    """The keys that each packed token attends to are its own sequence from the start up to itself."""
    sequences = [np.array(row, np.int32) for row in rows]
    tokens, lengths = np.concatenate(sequences), np.array([len(row) for row in rows])
    starts = np.cumsum(lengths) - lengths
    seen: list[int] = []
    for batch in split_to_budget(prefix_groups(sequences), lengths, budget):
        packed = pack(tokens, starts, lengths, batch)
        assert len(packed.tokens_T) <= max(budget, 2) or len(packed.rows) == 1
        keys = np.arange(len(packed.tokens_T)) if packed.key_places_N is None else packed.key_places_N
        counts = lengths[list(packed.rows)]
        positions = np.concatenate([np.arange(n) for n in counts])
        places = packed.places(positions, counts)
        for row, position, place in zip(np.repeat(packed.rows, counts), positions, places, strict=True):
            segment = int(np.searchsorted(packed.ends_q, place, side="right")) - 1
            behind = packed.ends_q[segment + 1] - place - 1
            visible = keys[packed.ends_k[segment] : packed.ends_k[segment + 1] - behind]
            assert packed.tokens_T[visible].tolist() == rows[row][: position + 1]
            assert packed.positions_T[place] == position
        seen += packed.rows
    assert sorted(seen) == list(range(len(rows)))


def test_hidden_states_and_the_sent_head_reproduce_the_sampled_logprobs(qwen3: Path) -> None:
    frozen = load_frozen(str(qwen3), dtype="bfloat16")
    scorer = Scorer("t", frozen)
    items = random_items(3, 6, Signal.HIDDEN)
    head = from_wire(decode_head(encode_head(to_wire(scorer.head))))
    for item, score in zip(items, scorer.score(request_of(items)).split(), strict=True):
        assert score.hidden is not None
        hidden = torch.from_numpy(score.hidden.copy()).view(torch.bfloat16)
        logprobs = head.logits(hidden).log_softmax(-1)
        scored = torch.from_numpy(item.tokens[item.positions].astype(np.int64))
        np.testing.assert_allclose(
            logprobs.gather(1, scored[:, None])[:, 0].numpy(), score.sampled_logprobs, atol=1e-5
        )


FAMILIES = {
    "softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager")
    ),
    "scale": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "scaling": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0)),
    "learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    ),
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.4,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_families_with_softcaps_logit_scales_or_learned_positions_score_like_a_plain_forward(
    family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    FAMILIES[family]().save_pretrained(tmp_path)
    scorer = Scorer("t", load_frozen(str(tmp_path)))
    warm_up(scorer)
    items = random_items(4, 1, Signal.TOPK, 6)
    assert_same_as_plain(tmp_path, items, scorer.score(request_of(items)).split(), atol=3e-4)


def test_warm_up_refuses_a_head_whose_logits_differ_from_the_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0)).save_pretrained(tmp_path)
    scorer = Scorer("t", load_frozen(str(tmp_path)))
    scorer.head = Head(scorer.head.weight_VH)  # without `logits_scaling`
    with pytest.raises(TeacherError, match="differ from the model's own forward"):
        warm_up(scorer)


def test_warm_up_names_weights_that_are_not_finite(tmp_path: Path) -> None:
    frozen = load_frozen(str(write_model(tmp_path / "m")))
    next(frozen.model.parameters()).view(-1)[:] = float("nan")
    with pytest.raises(TeacherError, match="not finite in float32: its weights hold NaN or infinity"):
        warm_up(Scorer("t", frozen))


def test_warm_up_refuses_a_model_without_weights(tmp_path: Path) -> None:
    frozen = load_frozen(str(write_model(tmp_path / "empty")))
    for tensor in frozen.model.state_dict().values():
        tensor.zero_()
    with pytest.raises(TeacherError, match=r"same probability.*−ln V"):
        warm_up(Scorer("t", frozen))


def test_scores_do_not_depend_on_earlier_requests(qwen3: Path) -> None:
    items = random_items(20, 1, Signal.TOPK, 8)
    first = Scorer("t", load_frozen(str(qwen3)))
    second = Scorer("t", load_frozen(str(qwen3)))
    second.score(request_of(random_items(7, 99)))
    a, b = first.score(request_of(items)), second.score(request_of(items))
    np.testing.assert_array_equal(a.sampled_P, b.sampled_P)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    np.testing.assert_array_equal(a.ids, b.ids)


def test_the_head_computes_logits_in_chunks_of_bounded_size(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = head_of(load_frozen(str(qwen3)).model)
    seen: list[int] = []
    whole = Head.logits

    def watched(self: Head, hidden_CH: torch.Tensor) -> torch.Tensor:
        logits = whole(self, hidden_CH)
        seen.append(logits.numel() * logits.element_size())
        return logits

    monkeypatch.setattr(Head, "logits", watched)
    hidden = torch.randn(100, 32)
    scored = torch.arange(100) % VOCAB
    chunked = score_rows(head, hidden, scored, topk=5, chunk_bytes=7 * 4 * VOCAB + 3)
    assert len(seen) == 15 and max(seen) <= 7 * 4 * VOCAB
    at_once = score_rows(head, hidden, scored, topk=5, chunk_bytes=1 << 30)
    torch.testing.assert_close(chunked.sampled_P, at_once.sampled_P)
    assert chunked.ids_PK is not None and at_once.ids_PK is not None
    torch.testing.assert_close(chunked.ids_PK, at_once.ids_PK)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="run by tests/contract/test_interpreted_kernels.py"
)
def test_the_triton_head_kernels_agree_with_their_plain_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in Triton's interpreter, which must be selected before Triton is imported."""
    pytest.importorskip("triton")
    from understudy.teacher.scoring import head_kernel

    shapes = [(2577, 5), (6144, 12)]
    head_kernel.agree("cpu", shapes)  # raises if they differ, as shown below
    twin = head_kernel.row_best_plain
    monkeypatch.setattr(head_kernel, "row_best_plain", lambda *asked: [one + 1 for one in twin(*asked)])
    with pytest.raises(AssertionError):
        head_kernel.agree("cpu", shapes)


def test_padded_plans_keep_every_sequence_within_the_token_budget() -> None:
    lengths = [5, 30, 1, 8, 8, 100, 3, 3, 3]
    padded = padded_plan(lengths, 40)
    assert sorted(i for members in padded for i in members) == list(range(len(lengths)))
    for members in padded:
        assert len(members) == 1 or len(members) * max(lengths[i] for i in members) <= 40


def test_the_weight_digest_depends_on_the_weights_and_not_on_the_files(qwen3: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    same = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights_sha256(same) == weights_sha256(model)
    with torch.no_grad():
        same.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    assert weights_sha256(same) != weights_sha256(model)


def test_a_missing_model_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match=r"no model at .*config\.json"):
        load_frozen(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("budget", [16384, 300])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_sequences_padded_to_groups_of_equal_length_score_like_a_plain_forward(
    family: str, budget: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout for attention on Hopper GPUs: sequences side by side, each padded to its group's length."""
    monkeypatch.setattr(grouped_attention, "ROUND", 8)
    monkeypatch.setattr(grouped_attention, "WORTH_ROUNDING", 2.0)
    folder = request.getfixturevalue(family)
    scorer = Scorer(
        "t", load_frozen(str(folder)), ScorerOptions(max_batch_tokens=budget, layout=ScoringLayout.PACKED)
    )
    scorer.body._groups = True
    grouped: list[int] = []
    scorer.frozen.body.register_forward_pre_hook(
        lambda module, args, kwargs: grouped.append(int((kwargs["groups"][:, 1] > 0).sum())), with_kwargs=True
    )
    rng = np.random.default_rng(4)
    items = [
        ScoreItem(str(i), tokens, np.arange(1, len(tokens), dtype=np.int32), Signal.TOPK, 4)
        for i, tokens in enumerate(
            rng.integers(0, VOCAB, n).astype(np.int32) for n in (9, 40, 13, 38, 9, 24, 39)
        )
    ]
    assert_same_as_plain(folder, items, scorer.score(request_of(items)).split())
    assert grouped and max(grouped) > 1


def test_pack_in_groups_pads_to_equal_lengths_unless_padding_is_too_much() -> None:
    tokens, lengths = np.arange(7 * 200, dtype=np.int32), np.array([190, 130, 190, 128, 190, 60])
    starts = np.arange(6) * 200
    packed = packing.pack_in_groups(tokens, starts, lengths, [PrefixGroup((i,), 0) for i in range(6)])
    assert packed is None  # 60 → 64, 190 → 192, 130 → 192: too much padding
    lengths[1] = 192
    packed = packing.pack_in_groups(tokens, starts, lengths, [PrefixGroup((i,), 0) for i in range(6)])
    assert packed is not None and packed.groups_G3 is not None
    assert packed.groups_G3[:4].tolist() == [[0, 4, 192], [768, 1, 128], [896, 1, 64], [0, 0, 0]]
    for i, length in enumerate(lengths):
        places = packed.places(np.arange(length), np.eye(6, dtype=int)[i] * length)
        assert packed.tokens_T[places].tolist() == tokens[starts[i] : starts[i] + length].tolist()
        assert packed.positions_T[places].tolist() == list(range(length))
