"""The viewer's server answers requests of this machine that have the secret address, and refuses all others."""

from pathlib import Path

import pytest
from recorded_run import HOSTILE, recorded_run
from starlette.testclient import TestClient

from understudy.viewer.run_view import RunView
from understudy.viewer.server import HEADERS, QUESTIONS, ViewServer


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    view = RunView(recorded_run(tmp_path_factory.mktemp("view") / "run"))
    while view.look():
        pass
    server = ViewServer([view, view], "secret")
    return TestClient(server.app, base_url="http://127.0.0.1:8000")


def test_the_page_has_no_inline_script_and_a_strict_policy(client: TestClient) -> None:
    page = client.get("/secret/")
    assert page.status_code == 200 and "<script type=" in page.text and "<script>" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert all(page.headers[name] == value for name, value in HEADERS.items())


@pytest.mark.parametrize("name", ["app.js", "style.css", "uplot.js", "tokens.js", "icon.svg"])
def test_page_files_are_served_and_load_nothing_from_other_sites(client: TestClient, name: str) -> None:
    reply = client.get(f"/secret/page/{name}")
    assert reply.status_code == 200 and reply.headers["x-content-type-options"] == "nosniff"
    assert "import(" not in reply.text and "fetch(" not in reply.text
    if name != "uplot.js":  # its comments name pages
        assert "innerHTML" not in reply.text and "//" not in reply.text.replace(
            "http://www.w3.org/2000/svg", ""
        ).replace("// ", "")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/wrong/",
        "/wrong/api/runs",
        "/secret/page/..%2fserver.py",
        "/secret/page/.x.js",
        "/secret/page/LICENSE",
        "/secret/api/none",
    ],
)
def test_unknown_paths_and_wrong_tokens_are_not_found(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8000"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_requests_from_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/secret/api/runs", headers=headers).status_code == 403


def test_the_server_refuses_methods_that_write(client: TestClient) -> None:
    for method in ("post", "put", "delete", "patch", "options"):
        assert getattr(client, method)("/secret/api/runs").status_code == 405


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_every_api_question_is_answered_and_invalid_parameters_cause_no_server_error(
    client: TestClient, name: str
) -> None:
    found = client.get("/secret/api/rows", params={"kind": "kept"}).json()["rows"][0]
    whole = {"id": found["id"], "from": "0", "to": "4", "key": "actor/loss", "sum": "1", "run": "1"}
    assert client.get(f"/secret/api/{name}", params=whole).status_code == 200
    for broken in (
        {"run": "7"},
        {"run": "x"},
        {**whole, "id": "kept:x:y"},
        {**whole, "from": "ten", "offset": "y"},
    ):
        assert client.get(f"/secret/api/{name}", params=broken).status_code in (200, 400, 404)


def test_hostile_text_is_returned_as_json(client: TestClient) -> None:
    reply = client.get("/secret/api/rows", params={"q": "needle4"})
    assert reply.headers["content-type"] == "application/json" and reply.json()["rows"][0]["prompt"].endswith(
        HOSTILE
    )
    assert client.get("/secret/api/runs").json()[0]["note"] == HOSTILE


def test_the_number_of_rows_in_an_answer_is_limited(client: TestClient) -> None:
    assert len(client.get("/secret/api/rows", params={"limit": "100000"}).json()["rows"]) <= 200
    assert client.get("/secret/api/recipes").json() == []


def test_the_package_ships_the_licence_of_uplot() -> None:
    import understudy.viewer

    text = (Path(understudy.viewer.__file__).parent / "page" / "uplot-LICENSE.txt").read_text()
    assert "MIT License" in text and "Leon Sorokin" in text
