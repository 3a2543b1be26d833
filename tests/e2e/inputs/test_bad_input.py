"""Bad input: one line that says what to do, exit code 2, no stack trace, no process left, nothing lost."""

import json
import logging
import shutil
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS, write_toml

from understudy.cli.main import main

Make = Callable[..., dict[str, Any]]
STUDENT = ASSETS / "models" / "student"


@pytest.fixture
def refusal(recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `check` and `train` on a changed recipe: both must refuse with the same line, exit code 2."""

    def run(**overrides: Any) -> str:
        path = write_toml(tmp_path / "recipe.toml", recipe("never", **overrides))
        outputs = []
        for command in ("check", "train"):
            assert main([command, str(path)]) == 2
            lines = capsys.readouterr().err.splitlines(keepends=True)
            # On a busy machine the commands may also print progress messages.
            outputs.append(
                "".join(line for line in lines if not line.startswith(("reading ", "checking ", "asking ")))
            )
            assert "Traceback" not in outputs[-1]
        assert not (tmp_path / "never").exists(), "nothing may be started or written"
        assert outputs[0] == outputs[1]
        return outputs[0]

    return run


def copy_model(tmp_path: Path, change: Callable[[Path], None]) -> str:
    folder = tmp_path / "changed-model"
    shutil.copytree(STUDENT, folder)
    change(folder)
    return str(folder)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_misspelt_key_is_refused_with_a_suggestion(refusal: Callable[..., str]) -> None:
    assert "unknown key `loss.top_k`; did you mean `loss.topk`?" in refusal(loss__top_k=4)


def test_a_value_of_the_wrong_type_is_refused(refusal: Callable[..., str]) -> None:
    assert "`trainer.steps` = 'ten'" in refusal(trainer__steps="ten")


def test_an_fp8_kv_cache_without_a_gpu_is_refused(refusal: Callable[..., str]) -> None:
    assert (
        "rollout.kv_cache = 'fp8' needs a GPU to write on; student.device = 'cpu' is a CPU here"
        in refusal(student__device="cpu", rollout__kv_cache="fp8")
    )


def test_a_missing_model_folder_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "no such folder" in refusal(student__model=str(tmp_path / "nowhere"))


def test_a_model_folder_without_weights_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    folder = copy_model(tmp_path, lambda path: (path / "model.safetensors").unlink())
    assert "no *.safetensors" in refusal(student__model=folder)


def test_a_teacher_with_another_tokenizer_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    def swap(folder: Path) -> None:
        def exchange(tokenizer: dict[str, Any]) -> None:
            vocab = tokenizer["model"]["vocab"]
            first, second = [token for token in vocab if len(token) == 1][:2]
            vocab[first], vocab[second] = vocab[second], vocab[first]

        edit(folder / "tokenizer.json", exchange)

    message = refusal(teachers__add={"model": copy_model(tmp_path, swap), "key": "add"})
    assert (
        "teachers.add: its tokenizer differs from the student's in 2 of the ids that both have: id "
        in message
    )
    assert "choose a teacher of the student's family" in " ".join(message.split())


def test_a_teacher_without_the_students_eos_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        edit(folder / "config.json", lambda config: config.update(vocab_size=1))

    message = refusal(teachers__add={"model": copy_model(tmp_path, change), "key": "add"})
    assert "which ends the student's turns, so no rollout could end" in " ".join(message.split())


def test_a_teacher_port_in_use_is_refused(refusal: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal(
            teachers__add={"model": str(ASSETS / "models" / "teacher-add"), "key": "add", "ports": [port]}
        )
    assert f"port {port} cannot be used" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"answer": "x"}\n', "line 1 has no prompt"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("", "is empty"),
        ('["not an object"]\n', "line 1 is a list"),
        (
            '{"prompt": "12+34=", "data_source": "ad"}\n',
            "rows with data_source = 'ad' have no teacher; teachers take ['add', 'sort']; did you mean 'add'?",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "1" * 600}], "data_source": "add"}) + "\n",
            "exceeds the student's context",
        ),
    ],
    ids=["no prompt", "bad json", "empty", "not an object", "no teacher for it", "too long"],
)
def test_malformed_training_data_is_refused(
    refusal: Callable[..., str], tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    assert expected in refusal(data__train=str(path)).replace("\n", " ")


def test_a_missing_data_file_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "does not exist" in refusal(data__train=str(tmp_path / "none.jsonl"))


def test_a_topk_larger_than_the_vocabulary_is_refused(refusal: Callable[..., str]) -> None:
    assert "loss.topk = 5000 is larger than the vocabulary" in refusal(loss__topk=5000)


def test_a_loss_with_zero_expected_gradient_is_refused(refusal: Callable[..., str]) -> None:
    assert "zero in expectation" in refusal(loss={"kind": "k1", "signal": "sampled"})
    assert "zero expected gradient" in refusal(
        loss={"kind": "forward_kl", "topk": 8, "policy_gradient": True}
    )


def test_a_misspelt_reward_function_is_refused_with_a_suggestion(refusal: Callable[..., str]) -> None:
    assert "did you mean 'exact_match'?" in refusal(
        data__reward="understudy.rollout.rewards.builtin:exact_macth"
    )


def test_several_problems_are_reported_together(refusal: Callable[..., str], tmp_path: Path) -> None:
    message = refusal(loss__top_k=4, student__model=str(tmp_path / "nowhere"), trainer__steps=0)
    assert "loss.top_k" in message and "trainer.steps" in message


def test_train_refuses_a_run_directory_that_holds_other_files(
    recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("precious")
    path = write_toml(tmp_path / "recipe.toml", recipe("there"))
    assert main(["train", str(path)]) == 2
    assert "exists, is not empty and is not a run directory" in capsys.readouterr().err
    assert [entry.name for entry in (tmp_path / "there").iterdir()] == ["file"]


@pytest.mark.parametrize("command", [["resume"], ["audit"], ["export"]])
def test_commands_refuse_a_folder_that_is_not_a_run_directory(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command, str(tmp_path)] + ([str(tmp_path / "out")] if command == ["export"] else [])
    assert main(arguments) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("answers", [False, True])
def test_train_is_refused_when_an_external_teacher_does_not_answer(
    answers: bool,
    recipe: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing listens at its address, or a server accepts connections and closes them. Both are retried until the start
    timeout."""
    logging.getLogger("huggingface_hub").addHandler(caplog.handler)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1] if answers else 9}"
        external = {"model": "x", "key": "add", "placement": "external", "urls": [url]}
        table = recipe("gone", teachers__add=external, cluster__start_timeout_seconds=0.5)
        path = write_toml(tmp_path / "recipe.toml", table)
        assert main(["train", str(path), "--quiet"]) == 2
        server.shutdown()
    output = capsys.readouterr().err
    reason = f"{url}: {'Server disconnected' if answers else 'Connection refused'}. Start the server"
    assert "teachers.add.urls: no answer within 0.5 s" in output and reason in " ".join(output.split())
    assert not (tmp_path / "gone").exists()
    assert "Traceback" not in output, output
    assert "Retrying" not in caplog.text, "huggingface_hub retries the unreachable hub, which takes 25 s"


def test_debug_shows_the_traceback(recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_toml(tmp_path / "recipe.toml", recipe("never", trainer__steps=0))
    assert main(["check", str(path), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
