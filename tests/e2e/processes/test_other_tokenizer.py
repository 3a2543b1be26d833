"""A teacher with another tokenizer, in whole runs: scores and loss, schedules, kills, refused settings."""

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_teacher import PAIRS, SPECIAL, write_other_teacher
from other_tokenizers import byte_level
from safetensors.numpy import load_file
from small_runs import ASSETS, TOKEN_VARIABLE, call_cli, run_cli, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer

import understudy
from understudy.config import parse_recipe
from understudy.dataplane.kept_rows import read_columns
from understudy.dataplane.ledger import audit
from understudy.errors import UnderstudyError
from understudy.observability.metrics import without_clock
from understudy.trainers.prompt_data import open_data

Make = Callable[..., dict[str, Any]]
STUDENT = ASSETS / "models" / "student"
ROWS = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()][:32]
NEVER = [0, 1, 3, 4, 5]
"""Ids that the student must never draw: its special tokens except the end of a turn."""
SMALL: dict[str, Any] = {
    "trainer__steps": 2,
    "trainer__batch_size": 4,
    "trainer__learning_rate": 1e-5,
    "run__keep_rows": 1 << 22,
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(folder, address) of the teacher."""
    from teacher_rig import shared_fork_server

    folder = write_other_teacher(tmp_path_factory.mktemp("models") / "other")
    child = shared_fork_server(tmp_path_factory).fork(Path(folder), name="other")
    yield folder, asyncio.run(child.ready(120)).url
    asyncio.run(child.end())


@pytest.fixture
def aligned(recipe: Make, other: tuple[str, str]) -> Make:
    folder, url = other

    def make(name: str, **more: Any) -> dict[str, Any]:
        teacher = {
            "model": folder,
            "placement": "external",
            "urls": [url],
            "token_env": TOKEN_VARIABLE,
            "vocabulary": "align",
        }
        return recipe(name, **{"teachers": {"other": teacher}, "data__train": ROWS, **SMALL, **more})

    return make


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


@cache
def loaded(folder: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64
    ).eval(), AutoTokenizer.from_pretrained(folder)


def logprobs(folder: str, tokens: list[int], never: tuple[int, ...] = ()) -> np.ndarray:
    """float64 [T, V]: log-probabilities of each token but the first, from a plain forward pass without the ids
    `never`."""
    with torch.no_grad():
        logits = loaded(folder)[0](torch.tensor([tokens])).logits[0]
    logits[:, list(never)] = -torch.inf
    return np.concatenate([np.zeros((1, logits.shape[1])), torch.log_softmax(logits, -1).numpy()[:-1]])


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("async/")} for line in lines], {
        name: value.tobytes() for name, value in weights.items()
    }


def expected(folder: str, question: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Recomputes a row from its text: the teacher's prompt by the teacher's template, the answer in the
    teacher's tokens, the bounds of aligned chains from text lengths, and the scores summed over chains."""
    student, teacher = AutoTokenizer.from_pretrained(STUDENT), loaded(folder)[1]
    first = int(columns["loss_mask"].argmax())
    written = columns["tokens"][first:].tolist()
    ended = written[-1] == student.eos_token_id
    texts = [student.decode([one]) for one in (written[:-1] if ended else written)]
    prompt = teacher.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    before = teacher(prompt, add_special_tokens=False)["input_ids"]
    answer = teacher("".join(texts), add_special_tokens=False)["input_ids"] if texts else []
    theirs = [teacher.decode([one]) for one in answer]
    assert "".join(theirs) == "".join(texts)
    tokens = [*before, *answer, *([teacher.eos_token_id] if ended else [])]
    p_TV = logprobs(folder, tokens)
    own = np.cumsum([0, *map(len, texts)]).tolist()
    their = np.cumsum([0, *map(len, theirs)]).tolist()
    bounds = [(own.index(place), their.index(place)) for place in own if place in their]
    if ended:
        bounds.append((len(own), len(their)))
    behaviour = columns["behaviour_logprobs"][first:].astype(np.float64)
    sampled, firsts = np.zeros(len(written)), {}
    for (a, b), (c, d) in pairwise(bounds):
        total = sum(p_TV[len(before) + at, tokens[len(before) + at]] for at in range(b, d))
        sampled[a:c] = total if c - a == 1 else behaviour[a:c] - (behaviour[a:c].sum() - total)
        firsts[a] = p_TV[len(before) + b]
    return {"prompt": before, "sampled": sampled, "firsts": firsts, "bounds": bounds, "written": written}


def test_scores_candidates_and_loss_equal_a_plain_forward_on_the_teachers_own_tokens(
    aligned: Make, other: tuple[str, str]
) -> None:
    """The first step's loss is recomputed over the student's tokens that begin the teacher's candidates and one
    bucket for the rest."""
    folder, k = other[0], 38
    run = understudy.train(aligned("run", loss__topk=k, data__shuffle=False), progress=False)
    losses, chains, merged, rows = [], 0, 0, kept_rows_of(run.dir, 1)
    assert len(rows) == 4
    student, teacher = AutoTokenizer.from_pretrained(STUDENT), loaded(folder)[1]
    characters = "0123456789abcdefghijklmnopqrstuvwxyz+="
    first = {
        number: student.convert_tokens_to_ids(name[0])
        for name, number in teacher.get_vocab().items()
        if name[0] in characters and set(name) <= set(characters)
    }
    first[teacher.eos_token_id] = student.eos_token_id
    for summary, columns in rows:
        question = next(
            r["messages"][0]["content"]
            for r in ROWS
            if f"<user>{r['messages'][0]['content']}<" in summary["prompt"]
        )
        wanted = expected(folder, question, columns)
        assert columns["teacher_prompt_other"].tolist() == wanted["prompt"]
        assert f"user: {question}<|stop|>" in summary["teacher_prompts"]["other"]
        assert np.allclose(columns["teacher_logprobs"], wanted["sampled"], atol=2e-5)
        q_TV = logprobs(str(STUDENT), columns["tokens"].tolist(), tuple(NEVER))[
            int(columns["loss_mask"].argmax()) :
        ]
        chains += sum(c - a > 1 for (a, _), (c, _) in pairwise(wanted["bounds"]))
        for place in range(len(wanted["written"])):
            found = columns["teacher_topk_logprobs"][place] > -1e29
            if place not in wanted["firsts"]:
                assert not found.any()
                losses.append(0.0)
                continue
            p_V = wanted["firsts"][place]
            mass: dict[int, float] = {}
            for one in np.argsort(-p_V, kind="stable")[:k].tolist():
                if one in first:
                    mass[first[one]] = mass.get(first[one], 0.0) + float(np.exp(p_V[one]))
            merged += len(mass) < k
            ids = columns["teacher_ids"][place][found]
            assert ids.tolist() == sorted(mass, key=lambda one: -mass[one])
            p, q = np.array([mass[one] for one in ids.tolist()]), np.exp(q_TV[place][ids])
            assert np.allclose(columns["teacher_topk_logprobs"][place][found], np.log(p), atol=2e-5)
            p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
            losses.append(float((p * np.log(p / q)).sum()))
    assert chains > 0 and merged > 0
    assert run.metrics[0]["actor/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    shares = [run.metrics[0][f"teacher/other/{name}"] for name in ("one_to_one", "in_chains", "left_out")]
    assert sum(shares) == pytest.approx(1) and 0 < shares[1] < 1 and shares[2] == 0


def test_special_tokens_that_the_teacher_lacks_are_never_drawn(aligned: Make) -> None:
    """A row with such a token could not be aligned, so no teacher would penalize it. A random teacher and a
    high learning rate would otherwise lead the student to draw them."""
    more = {"trainer__steps": 6, "trainer__batch_size": 16, "trainer__learning_rate": 3e-3}
    run = understudy.train(
        aligned("run", **more, loss__kind="k2", loss__signal="sampled", loss__topk=64), progress=False
    )
    student = AutoTokenizer.from_pretrained(STUDENT)
    kept_ids = json.loads((run.dir / "usable_ids.json").read_text())
    assert (
        sorted(kept_ids["placeholders"])
        == NEVER
        == sorted(set(student.all_special_ids) - {student.eos_token_id})
    )
    report = audit(run.dir)
    assert (report.trained, report.dead) == (96, 0)


def test_vocabulary_align_changes_no_bit_when_the_tokenizers_are_equal(recipe: Make) -> None:
    asked = {f"teachers__{name}__vocabulary": "align" for name in ("add", "sort")}
    one = understudy.train(recipe("one", **SMALL, data__train=ROWS), progress=False)
    two = understudy.train(recipe("two", **SMALL, **asked, data__train=ROWS), progress=False)
    assert bits(one.dir) == bits(two.dir)
    assert not any(name.endswith("one_to_one") for name in two.metrics[0])


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"trainer__mode": "fully_async", "trainer__max_staleness": 0}, id="async"),
        pytest.param({"rollout__workers": 2}, id="workers", marks=pytest.mark.slow),
    ],
)
def test_an_aligned_run_gives_the_same_bits_when_async_or_with_workers(
    aligned: Make, more: dict[str, Any]
) -> None:
    loss = {"loss__kind": "k2", "loss__signal": "sampled", "loss__topk": 64}
    one = understudy.train(aligned("one", **loss), progress=False)
    two = understudy.train(aligned("two", **loss, **more), progress=False)
    assert bits(one.dir) == bits(two.dir)


def test_an_aligned_run_in_fast_mode_has_nearly_the_first_loss_of_full_determinism(aligned: Make) -> None:
    full = understudy.train(aligned("full"), progress=False)
    fast = understudy.train(aligned("fast", run__determinism="fast"), progress=False)
    assert fast.metrics[0]["actor/loss"] == pytest.approx(full.metrics[0]["actor/loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["row_journal.after_put:1", "sync.after_update:2"])
def test_a_killed_and_resumed_run_with_an_aligned_teacher_gives_the_same_bits(
    aligned: Make, tmp_path: Path, fault: str
) -> None:
    more = {"trainer__checkpoint_every": 1, "data__train": str(ASSETS / "data" / "train.jsonl")}
    table = aligned("killed", **more)
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = call_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(aligned("straight", **more), progress=False)
    run = Path(table["run"]["dir"])
    assert bits(run) == bits(straight.dir)
    report = audit(run)
    assert report.balanced and (report.trained, report.dead, report.in_flight) == (8, 0, 0), str(report)


def test_given_answers_are_scored_by_an_aligned_teacher(aligned: Make) -> None:
    run = understudy.train(aligned("run", rollout__off_policy=1.0, loss__sft_coef=0.5), progress=False)
    for _, columns in kept_rows_of(run.dir, 1):
        assert np.isnan(columns["behaviour_logprobs"]).all() and (columns["teacher_logprobs"] < 0).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"loss__signal": "hidden", "loss__topk": 64},
        "loss.signal = 'hidden': it is about ids of one vocabulary",
    ),
    (
        {"loss__tail": "renormalise"},
        "loss.tail = 'renormalise': candidates that the student has no token for",
    ),
    ({"loss__kind": "k2", "rollout__top_p": 0.9}, "rollout.top_p = 0.9: chains of tokens are compared"),
    (
        {"loss__kind": "k2", "rollout__temperature": 0.7},
        "rollout.temperature = 0.7 and loss.student_temperature",
    ),
    (
        {"loss__kind": "k1", "loss__policy_gradient": True, "loss__discount": 0.5},
        "loss.discount = 0.5: each token of a chain",
    ),
    ({"rollout__agent": "tool"}, "a completion is aligned if it is one turn"),
    ({"data__train": [{**ROWS[0], "agent": "tool"}]}, "row 1: agent = 'tool' with teachers.other.vocabulary"),
    (
        {"data__train": [{**ROWS[0], "teacher_weights": {"other": 1.0}}]},
        "row 1 has a mixture of teachers with one of another tokenizer",
    ),
    ({"loss__topk": 44}, "with all 44 ids of the student as candidates there is no tail"),
    ({"teachers__other__model": "nowhere"}, "reads the teacher's tokenizer here"),
    ({"teachers__other__vocabulary": "equal"}, "its tokenizer differs from the student's"),
]


@pytest.mark.parametrize(
    ("more", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_settings_and_data_that_cannot_be_aligned_are_refused(
    aligned: Make, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnderstudyError) as refused:
        understudy.train(aligned("never", **more), progress=False)
    assert message in str(refused.value)


def test_check_reports_how_many_of_the_teachers_tokens_are_aligned(
    aligned: Make, train_rows: Path, tmp_path: Path
) -> None:
    table = aligned("run", data__train=str(train_rows))
    code, output = call_cli("check", str(write_toml(tmp_path / "r.toml", table)))
    flat = " ".join(output.split())
    assert code == 0 and "teachers.other has another tokenizer: 38 of its" in flat, output


def test_a_teachers_context_limit_is_counted_in_the_teachers_tokens(
    recipe: Make, other: tuple[str, str], tmp_path: Path
) -> None:
    """A long number has half as many tokens for the teacher as for the student. So the teacher's context,
    counted in its own tokens, holds the prompt, and `data.overlong = "drop"` drops nothing."""
    rows = [
        {**row, "messages": [{"role": "user", "content": f"{place:060d}"}]} for place, row in enumerate(ROWS)
    ]
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (STUDENT, other[0]))
    student, teacher = (
        len(one.apply_chat_template(rows[0]["messages"], add_generation_prompt=True)["input_ids"])
        for one in (ours, theirs)
    )
    assert teacher < student
    aligned = {"other": {"model": other[0], "vocabulary": "align", "context_length": teacher + 8 + 1}}
    table = recipe(
        "run", **{**SMALL, "data__train": str(data), "data__overlong": "drop", "teachers": aligned}
    )
    code, output = call_cli("check", str(write_toml(tmp_path / "r.toml", table)))
    assert code == 0 and "left out" not in output, output
    assert (
        open_data(
            *(getattr(parse_recipe(table), name) for name in ("data", "rollout", "student", "teachers"))
        ).notes
        == []
    )


def test_a_teacher_server_whose_tokenizer_differs_from_the_named_model_is_refused(
    aligned: Make, other: tuple[str, str], tmp_path: Path
) -> None:
    """Completions are tokenized with the files of `model`; a server with other ids would score another text."""
    named = tmp_path / "named"
    shutil.copytree(other[0], named)
    byte_level([*reversed(PAIRS)], SPECIAL).save(str(named / "tokenizer.json"))
    with pytest.raises(
        UnderstudyError, match=r"teachers.other.model = .*named.* other tokens than its server"
    ):
        understudy.train(aligned("never", teachers__other__model=str(named)), progress=False)
