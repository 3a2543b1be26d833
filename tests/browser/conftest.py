"""A real browser (Debian's chromium, driven by Playwright) on a real `understudy view`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Open = Callable[..., Any]


# Not session-scoped: while it is open, Playwright's event loop counts as running in the tests' thread, so `asyncio.run`
# of every later test would be refused.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (the `browser` extra)"
    )
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on this machine (apt install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def view() -> Iterator[Callable[..., str]]:
    """Starts `understudy view …`; returns its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-m", "understudy.cli.main", "view", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
        assert address, line
        return address[0]

    yield start
    for process in started:
        process.terminate()
        assert process.wait(timeout=20) is not None


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens pages; at the end they must have had no console error, no dialog and no request to another server."""
    pages: list[tuple[Any, list[str]]] = []

    def load(address: str, width: int = 1440, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        problems: list[str] = []
        home = address.split("#")[0]
        page.on(
            "console",
            lambda entry: problems.append(entry.text) if entry.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda sent: None if sent.url.startswith(home) else problems.append(f"request {sent.url}"),
        )
        pages.append((page, problems))
        page.goto(address)
        page.wait_for_selector("main .view")
        return page

    yield load
    for page, problems in pages:
        page.close()
        assert problems == []
