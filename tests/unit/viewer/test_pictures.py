"""Pictures of rows are served by their hashes from the run's own store. Nothing else is served there."""

import base64

import pytest
from pictured_run import pictured_run, png
from recorded_run import HOSTILE
from starlette.testclient import TestClient

from understudy.media.pictures import media_type, size_of
from understudy.viewer import frozen
from understudy.viewer.frozen import frozen as frozen_data
from understudy.viewer.run_view import RunView
from understudy.viewer.server import HEADERS, ViewServer


@pytest.fixture(scope="module")
def viewed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunView, dict[str, str], TestClient]:
    run, names = pictured_run(tmp_path_factory.mktemp("view") / "run", HOSTILE)
    (run.media / "secret").write_bytes(png("black"))
    view = RunView(run)
    while view.look():
        pass
    return (
        view,
        names,
        TestClient(ViewServer([view], "secret").app, base_url="http://127.0.0.1:8000"),
    )


def row_of(client: TestClient, key: str) -> dict:
    rows = client.get("/secret/api/rows", params={"limit": "200"}).json()["rows"]
    found = next(row for row in rows if row["key"] == key)
    return client.get("/secret/api/row", params={"id": found["id"]}).json() | {"listed": found["media"]}


def test_a_row_names_its_pictures_in_their_order(
    viewed_run: tuple[RunView, dict[str, str], TestClient],
) -> None:
    _, names, client = viewed_run
    row = row_of(client, "two_0_0")
    assert row["media"] == row["listed"] == [names["red"], names["blue"]]
    assert row_of(client, "eval-9")["media"] == [names["red"]], "a name that is not a hash was kept"
    assert row_of(client, "eval-0")["media"] == []


def test_prompts_with_equal_text_and_different_pictures_are_different_prompts(
    viewed_run: tuple[RunView, dict[str, str], TestClient],
) -> None:
    _, _, client = viewed_run
    one, other = row_of(client, "two_0_0"), row_of(client, "other_0_0")
    assert one["prompt"] == other["prompt"] and one["prompt_sum"] != other["prompt_sum"]
    same = client.get("/secret/api/same", params={"sum": str(one["prompt_sum"])}).json()
    assert [row["key"] for row in same] == ["two_0_0"]


def test_a_picture_is_served_with_its_stored_bytes_and_its_type(
    viewed_run: tuple[RunView, dict[str, str], TestClient],
) -> None:
    _, names, client = viewed_run
    reply = client.get(f"/secret/media/{names['red']}")
    assert reply.content == png("red") and reply.headers["content-type"] == "image/png"
    assert all(reply.headers[name] == value for name, value in HEADERS.items())
    assert "img-src 'self' data:" in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "name",
    [
        "secret",
        "..%2Frecipe.json",
        "%2e%2e%2f%2e%2e%2fstate.json",
        "..%2f..%2f..%2f..%2fetc%2fpasswd",
        "AB" * 32,
        "ab" * 31,
        "ab" * 32,
        "0" * 64 + "%00",
        "0" * 64 + "%0a",
    ],
)
def test_only_hashes_of_stored_pictures_are_served(
    viewed_run: tuple[RunView, dict[str, str], TestClient], name: str
) -> None:
    assert viewed_run[2].get(f"/secret/media/{name}").status_code == 404


def test_other_files_of_the_store_are_not_served(
    viewed_run: tuple[RunView, dict[str, str], TestClient],
) -> None:
    view, names, client = viewed_run
    assert client.get(f"/secret/media/{names['script']}").status_code == 404
    assert client.get(f"/wrong/media/{names['red']}").status_code == 404
    refused = client.get(f"/secret/media/{names['red']}", headers={"sec-fetch-site": "cross-site"})
    assert refused.status_code == 403
    assert client.get(f"/secret/media/{names['red']}", params={"run": "x"}).status_code == 404
    planted = view.run.media / "cd" / ("cd" * 32)
    planted.parent.mkdir()
    planted.symlink_to(view.run.recipe)
    assert client.get(f"/secret/media/{planted.name}").status_code == 404, (
        "a file whose bytes have another hash was served"
    )


def test_a_picture_over_the_size_limit_is_not_served(
    viewed_run: tuple[RunView, dict[str, str], TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.viewer.run_view.MOST_PICTURE_BYTES", 50)
    reply = viewed_run[2].get(f"/secret/media/{viewed_run[1]['red']}")
    assert reply.status_code == 404 and "more than 50 bytes" in reply.text


def test_the_report_embeds_pictures_within_its_size_limit(
    viewed_run: tuple[RunView, dict[str, str], TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, names, _ = viewed_run
    held = frozen_data(view)["pictures"]
    assert held[names["red"]] == "data:image/png;base64," + base64.b64encode(png("red")).decode()
    large = base64.b64decode(held[names["large"]].partition(",")[2])
    assert held[names["large"]].startswith("data:image/jpeg") and size_of(large) == (512, 512)
    assert names["script"] not in held and names["gone"] not in held
    monkeypatch.setattr(frozen, "MOST_PICTURES_BYTES", 1000)
    assert set(frozen_data(view)["pictures"]) <= {names["red"], names["blue"]}


def test_the_media_type_is_read_from_the_first_bytes() -> None:
    assert media_type(png("red")) == "image/png" and media_type(b"RIFF\x00\n\x00\x01WEBPx") == "image/webp"
    assert media_type(b"<svg/>") is None and media_type(b"") is None and media_type(b"RIFFWEBP") is None
