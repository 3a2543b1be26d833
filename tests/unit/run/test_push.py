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
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # as HF_ENDPOINT, which is read at the import
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage has a protocol of its own
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "student"
    out.mkdir()
    (out / "README.md").write_text("---\nlibrary_name: transformers\n---\n# student\n")
    (out / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return out


def test_the_folder_arrives_whole_in_a_private_repository(hub: FakeHub, folder: Path) -> None:
    check_pushable("my-org/my-student")
    assert push(folder, "my-org/my-student") == f"{hub.url}/my-org/my-student (private)"
    assert hub.files["my-org/my-student"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "README.md").write_text("second\n")
    address = push(folder, "my-org/my-student", public=True)
    assert address.endswith("(private)"), "a repository keeps its visibility"
    assert hub.files["my-org/my-student"]["README.md"] == b"second\n"
    assert push(folder, "my-org/other", public=True) == f"{hub.url}/my-org/other (public)"


def test_a_refusal_is_the_hubs_own_words(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnderstudyError, match="refused with 403: You don't have the rights") as refused:
        push(folder, "not-mine/student")
    assert f"the exported folder is complete: {folder}" in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UnderstudyError, match="refused with 401: Invalid credentials"):
        push(folder, "my-org/student")


def test_without_a_network_the_folder_stays_and_the_next_command_is_told(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnderstudyError, match=r"the hub \(http://127.0.0.1:9\) was not reached") as error:
        push(folder, "my-org/student")
    assert f"hf upload my-org/student {folder}" in str(error.value)


def test_what_cannot_be_pushed_is_said_before_anything_is_written(
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
