"""A hub on this machine: the HTTP calls that huggingface_hub makes to create a repository and commit files."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeHub:
    """State of the hub: visibility and files of each repository, and the requests that it received."""

    url: str = ""
    token: str = "hf_test"
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        if path.startswith("/blob/"):  # the hub's storage: one address per file
            self.blobs[path.removeprefix("/blob/")] = body
            return 200, {}
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            url = {"url": f"{self.url}/{name}"}
            if name in self.private:
                return 409, url | {"error": "You already created this model repo"}
            if given["organization"] == "not-mine":
                return 403, {"error": "You don't have the rights to create a model under this namespace"}
            self.private[name] = given.get("private", given.get("visibility") == "private")
            self.files[name] = {}
            return 200, url
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = path.removeprefix("/api/models/")
        if method == "GET" and name in self.private:
            return 200, {"id": name, "private": self.private[name], "sha": "0" * 40, "siblings": []}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {"path": one["path"], "uploadMode": modes[one["path"].endswith(".safetensors")], "shouldIgnore": False}
                    for one in files
                ]
            }  # fmt: skip
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {
                "transfer": "basic",
                "objects": [
                    {**one, "actions": {"upload": {"href": f"{self.url}/blob/{one['oid']}", "header": {}}}}
                    for one in objects
                ],
            }
        if path.endswith("/commit/main"):
            return self._commit(name.removesuffix("/commit/main"), body)
        return 404, {"error": f"{method} {path}"}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                blob = self.blobs[value["oid"]]
                assert hashlib.sha256(blob).hexdigest() == value["oid"]
                self.files[name][value["path"]] = blob
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            status, reply = hub.answer(self.command, path, body, self.headers.get("Authorization", ""))
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status >= 400:
                self.send_header("X-Error-Message", reply["error"])
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
