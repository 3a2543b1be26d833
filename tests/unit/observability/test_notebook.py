"""The live view in a notebook: with a fake IPython, and in a real kernel if nbclient and ipykernel are installed."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.observability.live import LiveView

CODE = """
import asyncio, threading
from understudy.observability.live import LiveView
from understudy.run.own_thread import OwnThread

async def steps():
    with LiveView(3) as view:
        view.phase("loading")
        for step in (1, 2, 3):
            view.step({"step": step, "actor/loss": 1 / step})
        view.note("a replica came back")
    return threading.current_thread() is not threading.main_thread()

assert OwnThread(asyncio.run).result(steps())
"""


class Cell:
    """Records what `IPython.display.display` and its handle receive."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.outputs = 0

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.outputs += 1
        self.shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: self.shown.append(bundle))


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell.display))
    return cell


def test_the_live_view_updates_a_single_cell_output_in_place(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("understudy.observability.live._CELL_SECONDS", 0.0)
    with LiveView(3) as view:
        view.phase("loading <the student>")
        with view.work("evaluating", total=4) as advance:
            advance(3)
        for step in (1, 2, 3):
            view.step({"step": step, "actor/loss": 1 / step, "val/accuracy": 0.9})
    assert cell.outputs == 1
    assert "loading <the student>" in cell.shown[0]["text/plain"]
    assert "loading &lt;the student&gt;" in cell.shown[0]["text/html"]
    assert any("evaluating" in one["text/plain"] for one in cell.shown)
    last = cell.shown[-1]
    assert "3/3" in last["text/plain"] and "0.3333" in last["text/plain"] and "90.0%" in last["text/plain"]
    assert "evaluating" not in last["text/plain"] and last["text/html"].startswith("<pre")
    assert capsys.readouterr().err == "", "plain lines were printed as well"


def test_updates_of_the_cell_output_are_rate_limited_when_steps_are_fast(cell: Cell) -> None:
    with LiveView(500) as view:
        for step in range(1, 501):
            view.step({"step": step})
    assert len(cell.shown) < 100 and "500/500" in cell.shown[-1]["text/plain"]


def test_a_view_without_steps_or_a_disabled_view_displays_nothing(cell: Cell) -> None:
    with LiveView(0):
        pass
    with LiveView(3, enabled=False) as view:
        view.step({"step": 1})
    assert cell.shown == []


def test_ipython_in_a_terminal_is_not_treated_as_a_notebook(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    with LiveView(3) as view:
        view.step({"step": 3})
    assert cell.shown == []


def test_the_live_view_displays_a_table_in_a_real_ipython_kernel() -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    table, note = notebook.cells[0].outputs
    assert table.output_type == "display_data" and "3/3" in table.data["text/plain"]
    assert "0.3333" in table.data["text/html"] and "loading" not in table.data["text/plain"]
    assert "a replica came back" in str(note)
