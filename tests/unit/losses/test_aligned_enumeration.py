"""A teacher with another tokenizer, by enumeration of all completions of a small student.

The student writes four letters, one token each. The teacher reads pairs of letters, each pair one token. So every
completion is two chains of two tokens against one. Expected figures are written out from the definitions.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from other_tokenizers import byte_level
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from understudy.losses.objective import Objective
from understudy.teacher.alignment import TokenAligner, TurnEnds
from understudy.teacher.token_bytes import TokenBytes
from understudy.types.loss import LossInputs, StudentLogits
from understudy.types.scores import Signal, TeacherScores

LETTERS, PAIRS = "ab", ("aa", "ab", "ba", "bb")
STUDENT = ["a", "b", "c", "<eos>"]


def student_tokenizer() -> Any:
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate([*STUDENT, "<unk>"])}, [], unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    return tokenizer


def teacher_tokenizer() -> Any:
    tokenizer = byte_level(PAIRS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[ab]{2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


TEACHER = teacher_tokenizer()
ALIGNER = TokenAligner(
    TokenBytes(student_tokenizer().to_str(), "student"),
    TokenBytes(TEACHER.to_str(), "teachers.t"),
    TurnEnds([3], 3, TEACHER.token_to_id("<eos>")),
)
VOCABULARY = TEACHER.get_vocab_size()
COMPLETIONS = ["".join(letters) for letters in product(LETTERS, repeat=4)]
PREFIXES = ["".join(letters) for length in range(4) for letters in product(LETTERS, repeat=length)]


def teacher_logprobs(before: str) -> np.ndarray:
    """float64 [V]: a softmax of random logits for each text that the teacher has read."""
    generator = np.random.default_rng([len(before), *before.encode()])
    logits = generator.normal(size=VOCABULARY)
    logits[[TEACHER.token_to_id(name) for name in (*PAIRS, *LETTERS, "<eos>")]] += 4
    return logits - np.log(np.exp(logits).sum())


@pytest.fixture
def theta() -> Tensor:
    """The student: logits over its four tokens after each text."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(PREFIXES), len(STUDENT), generator=generator, dtype=torch.float64).requires_grad_()


def logq(theta: Tensor, text: str) -> Tensor:
    """[4]: log q of each letter of a completion."""
    rows = torch.log_softmax(theta[[PREFIXES.index(text[:i]) for i in range(4)]], -1)
    return rows[range(4), [STUDENT.index(letter) for letter in text]]


def inputs_of(theta: Tensor, text: str, k: int = 0) -> tuple[StudentLogits, LossInputs]:
    """What the loss gets for one completion, by way of the aligner; weights are the completion's probability."""
    ids = np.array([STUDENT.index(letter) for letter in text], np.int32)
    alignment = ALIGNER.align(ids)
    assert alignment.bounds.tolist() == [[0, 0], [2, 1], [4, 2]] and alignment.counts == (0, 4, 0)
    names = [TEACHER.id_to_token(one) for one in alignment.tokens.tolist()]
    assert names == [text[:2], text[2:]]
    p_MV = np.stack([teacher_logprobs(""), teacher_logprobs(text[:2])])
    sampled = p_MV[[0, 1], alignment.tokens].astype(np.float32)
    best = np.argsort(-p_MV, axis=1, kind="stable")[:, :k].astype(np.int32) if k else None
    reply = TeacherScores(
        "r", "t", Signal.TOPK if k else Signal.SAMPLED, sampled, best,
        None if best is None else np.take_along_axis(p_MV, best, 1).astype(np.float32),
    )  # fmt: skip
    drawn = logq(theta, text).detach()
    scores = ALIGNER.scores(reply, alignment, drawn.numpy().astype(np.float32))
    student = StudentLogits(theta[[PREFIXES.index(text[:i]) for i in range(4)]])
    candidates: dict[str, Tensor] = {}
    if scores.ids is not None and scores.logprobs is not None:
        candidates["teacher_ids_NK"] = torch.from_numpy(scores.ids.astype(np.int64))
        candidates["teacher_logprobs_NK"] = torch.from_numpy(scores.logprobs)
    return student, LossInputs(
        token_ids_N=torch.from_numpy(ids.astype(np.int64)),
        weights_N=drawn.sum().exp().expand(4).contiguous(),
        teacher_logprobs_N=torch.from_numpy(scores.sampled_logprobs),
        behaviour_logprobs_N=drawn.float(),
        **candidates,
    )


def expected_reverse_kl(theta: Tensor) -> Tensor:
    """KL of the chains: of the first pair, and of the second given the first, whose probability is held fixed. The
    student may leave the pairs (c, <eos>), and the teacher gives mass to other tokens: neither is a chain here."""
    total = torch.zeros((), dtype=torch.float64)
    for first in PAIRS:
        log_first = logq(theta, first + "aa")[:2].sum()
        total = total + log_first.exp() * (
            log_first - teacher_logprobs("")[TEACHER.token_to_id(first)]
        ) * _rest(theta, first)
        for second in PAIRS:
            log_second = logq(theta, first + second)[2:].sum()
            gap = log_second - teacher_logprobs(first)[TEACHER.token_to_id(second)]
            total = total + log_first.exp().detach() * log_second.exp() * gap
    return total


def _rest(theta: Tensor, first: str) -> Tensor:
    """The probability that two more letters follow: completions that end otherwise are not enumerated."""
    return sum((logq(theta, first + second)[2:].sum().exp() for second in PAIRS), torch.zeros(())).detach()


def gradient_of_chain_values(theta: Tensor) -> Tensor:
    """E[Σ_C r_C · ∇ log q(C)], written out."""
    surrogate = torch.zeros((), dtype=torch.float64)
    for text in COMPLETIONS:
        drawn = logq(theta, text)
        weight = drawn.sum().exp().detach()
        for start, before in ((0, ""), (2, text[:2])):
            chain = drawn[start : start + 2].sum()
            gap = chain.detach() - teacher_logprobs(before)[TEACHER.token_to_id(text[start : start + 2])]
            surrogate = surrogate + weight * gap * chain
    (found,) = torch.autograd.grad(surrogate, theta)
    return found


def loss_gradient(theta: Tensor, objective: Objective, k: int = 0) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for text in COMPLETIONS:
        student, inputs = inputs_of(theta, text, k)
        total = total + objective(student, inputs).loss
    (found,) = torch.autograd.grad(total, theta)
    return found


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(Objective(kind="k2", signal="sampled"), id="k2"),
        pytest.param(
            Objective(kind="k1", signal="sampled", policy_gradient=True), id="k1 as a policy gradient"
        ),
        pytest.param(Objective(kind="k3+", signal="sampled"), id="k3+"),
    ],
)
def test_the_expected_gradient_of_estimators_is_that_of_the_chain_values(
    theta: Tensor, objective: Objective
) -> None:
    found = loss_gradient(theta, objective)
    assert torch.allclose(found, gradient_of_chain_values(theta), rtol=1e-5, atol=1e-6)


def test_the_expected_gradient_of_k2_is_that_of_the_reverse_kl_between_chains(theta: Tensor) -> None:
    """∇ Σ q·log(q/p) = Σ q·r·∇log q + ∇ Σ q, and the mass of all chains is 1 where the student writes letters only."""
    with torch.no_grad():
        theta[:, 2:] = -1e4  # neither c nor <eos>
    (expected,) = torch.autograd.grad(expected_reverse_kl(theta), theta)
    found = loss_gradient(theta, Objective(kind="k2", signal="sampled"))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6) and found.abs().max() > 0.01


def test_every_token_of_a_chain_has_the_log_ratio_of_the_whole_chain(theta: Tensor) -> None:
    for text in COMPLETIONS:
        _, inputs = inputs_of(theta, text)
        assert inputs.teacher_logprobs_N is not None and inputs.behaviour_logprobs_N is not None
        gaps = (inputs.behaviour_logprobs_N - inputs.teacher_logprobs_N).double()
        drawn = logq(theta, text).detach()
        for start, before in ((0, ""), (2, text[:2])):
            chain = (
                drawn[start : start + 2].sum()
                - teacher_logprobs(before)[TEACHER.token_to_id(text[start : start + 2])]
            )
            assert torch.allclose(gaps[start : start + 2], chain.expand(2), atol=1e-5)


@pytest.mark.parametrize("k", [2, 3])
def test_forward_kl_compares_the_first_letters_of_the_teachers_candidates_after_each_bound(
    theta: Tensor, k: int
) -> None:
    """Forward KL over the first letters of the teacher's K best and one bucket for the rest; zero within a chain."""
    for text in COMPLETIONS:
        student, inputs = inputs_of(theta, text, k)
        output = Objective(kind="forward_kl", signal="topk")(student, inputs)
        for start, before in ((0, ""), (2, text[:2])):
            p_V = teacher_logprobs(before)
            best = [TEACHER.id_to_token(one) for one in np.argsort(-p_V, kind="stable")[:k].tolist()]
            mass: dict[str, float] = {}
            for name in best:
                begin = name[0] if name in PAIRS else name
                if begin in STUDENT:
                    mass[begin] = mass.get(begin, 0.0) + float(np.exp(p_V[TEACHER.token_to_id(name)]))
            p = np.array(list(mass.values()))
            q_V = torch.softmax(theta[PREFIXES.index(text[:start])], -1).detach().numpy()
            q = q_V[[STUDENT.index(name) for name in mass]]
            p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
            wanted = float((p * np.log(p / q)).sum()) if mass else 0.0
            assert float(output.per_token_N[start]) == pytest.approx(wanted, abs=1e-6)
            assert float(output.per_token_N[start + 1]) == 0.0
    found = loss_gradient(theta, Objective(kind="forward_kl", signal="topk"), k)
    inside = [place for place, prefix in enumerate(PREFIXES) if len(prefix) % 2]
    assert (found[inside] == 0).all(), "no gradient within a chain, exactly"
