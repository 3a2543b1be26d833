"""`understudy export --push`: the real huggingface_hub against a hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub
from huggingface_hub import constants

from understudy.errors import ConfigError, UnderstudyError
from understudy.run.push import check_pushable, push


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        monkeypatch.setattr(
            constants, "ENDPOINT", hub.url
        )  # has the effect of HF_ENDPOINT, which is read on import
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet storage uses a different protocol
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "student"
    out.mkdir()
    (out / "README.md").write_text("---\nlibrary_name: transformers\n---\n# student\n")
    (out / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return out


def test_push_uploads_all_files_to_a_private_repository_by_default(hub: FakeHub, folder: Path) -> None:
    check_pushable("my-org/my-student")
    assert push(folder, "my-org/my-student") == f"{hub.url}/my-org/my-student (private)"
    assert hub.files["my-org/my-student"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "README.md").write_text("second\n")
    address = push(folder, "my-org/my-student", public=True)
    assert address.endswith("(private)"), "a second push changed the visibility of the repository"
    assert hub.files["my-org/my-student"]["README.md"] == b"second\n"
    assert push(folder, "my-org/other", public=True) == f"{hub.url}/my-org/other (public)"


def test_a_refused_push_reports_the_message_of_the_hub(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnderstudyError, match="refused with 403: You don't have the rights") as refused:
        push(folder, "not-mine/student")
    assert f"the exported folder is complete: {folder}" in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UnderstudyError, match="refused with 401: Invalid credentials"):
        push(folder, "my-org/student")


def test_a_push_without_a_network_reports_the_command_that_repeats_it(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnderstudyError, match=r"the hub \(http://127.0.0.1:9\) was not reached") as error:
        push(folder, "my-org/student")
    assert f"hf upload my-org/student {folder}" in str(error.value)


def test_a_wrong_name_a_missing_token_or_offline_mode_is_refused_before_any_request(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("student", "a/b/c", "/b", "../b"):
        with pytest.raises(ConfigError, match="expected ORG/NAME"):
            check_pushable(name)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="there is no token of the hub; set HF_TOKEN"):
        check_pushable("a/b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_pushable("a/b")
    assert hub.asked == []
