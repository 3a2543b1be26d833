"""report.html: the page of a run in one file, with its modules, styles and data in it. It needs no server.

    run directory ──RunView──> answers to the page's questions ──> <script type="application/json" id="frozen">
    page/*.js ──bundle──> one inline script, allowed by its hash; page/frozen.js answers from the data

Curves are whole. Of the rows, at most `MOST_ROWS` are in it with all their tokens, as far as `MOST_BYTES` go;
their pictures are data URLs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import UnderstudyError
from understudy.media.pictures import reduced
from understudy.observability.rundir import RunDir, write_atomically
from understudy.viewer.run_view import RunView
from understudy.viewer.token_view import MOST_TOKENS

REPORT = "report.html"
MOST_ROWS = 100
MOST_TEXTS = 100
"""Rows without token columns: held-out answers, dumps."""
MOST_BYTES = 16 << 20
MOST_PICTURES_BYTES = 8 << 20
_PICTURE_BYTES, _PICTURE_SIDE = 64 << 10, 512
"""A picture of more bytes is in the report at this size, in pixels of its longer side."""
_POINTS = 1000
_EVERYTHING = 1 << 62
_TEACHER_CANDIDATES, _OWN_CANDIDATES = 6, 4
_MODULES = (
    "dom", "state", "frozen", "uplot", "charts", "overview", "rollouts", "tokens", "disagreements", "timeline", "app",
)  # fmt: skip
"""Each after those that it imports."""
_IMPORT = r'(?m)^import (.+?) from "\./(\w+)\.js";$'


def write_report(run: RunDir, next_command: str | None = None) -> Path:
    """Writes report.html of a run that has ended; returns its path."""
    view = RunView(run, journal=False)
    view.look(_EVERYTHING, _EVERYTHING)  # at once: each look goes through all files of rows
    page = run.path / REPORT
    write_atomically(page, _page(run.path.resolve().name, frozen(view, next_command)))
    return page


def frozen(view: RunView, next_command: str | None = None) -> dict[str, Any]:
    """Everything that the page asks for, by the names of `page/frozen.js`."""
    summary = view.summary()
    if next_command:
        summary["commands"] = {"next": next_command, **summary["commands"]}
    texts: dict[int, str] = {}
    rows, left = [], MOST_BYTES
    for shown in view.spread("kept", MOST_ROWS):
        row = _row(view, shown, texts)
        left -= len(msgspec.json.encode(row))
        if left < 0:
            break
        rows.append(row)
    ids = {row["summary"]["id"] for row in rows}
    worst = [
        {**group, "tokens": [one for one in group["tokens"] if one["row"] in ids]}
        for group in view.worst(None)
    ]
    for kind in ("held-out", *(() if rows else ("dump",))):
        rows += [
            {"summary": shown, "detail": view.row(shown["id"])} for shown in view.spread(kind, MOST_TEXTS)
        ]
    return {
        "run": summary,
        "recipe": view.recipe(),
        "advisories": view.advisories(),
        "held_out": view.held_out(),
        "curves": view.curves(view.metric_names(), _POINTS),
        "rows": rows,
        "texts": texts,
        "pictures": _pictures(view, [name for row in rows for name in row["summary"]["media"]]),
        "worst": [group for group in worst if group["tokens"]],
        "lives": view.lives([row["summary"]["key"] for row in rows if row["summary"]["id"] in ids]),
        "timeline": view.timeline(None, None),
    }


def _row(view: RunView, summary: dict[str, Any], texts: dict[int, str]) -> dict[str, Any]:
    detail = view.row(summary["id"])
    found = []
    for place in view.candidates(summary["id"], 0, MOST_TOKENS):
        teacher, own = place["teacher"][:_TEACHER_CANDIDATES], place["student"][:_OWN_CANDIDATES]
        texts.update({one["id"]: one["text"] for one in (*teacher, *own)})
        tail = place["tail"]
        if tail is not None:
            tail += sum(one["p"] for one in place["teacher"][_TEACHER_CANDIDATES:])
        known = {one["id"]: one["q"] for one in (*teacher, *own) if one["q"] is not None}
        found.append(
            [
                [[one["id"], _short(one["p"]), _short(one["q"])] for one in teacher],
                [[one["id"], _short(one["q"])] for one in own],
                _short(tail),
                _short(max(0.0, 1.0 - sum(known.values())) if known else None),
            ]
        )
    return {"summary": summary, "detail": {**detail, "cut": True}, "candidates": found}


def _pictures(view: RunView, names: Sequence[str]) -> dict[str, str]:
    """Data URLs of the rows' pictures by hash, as far as `MOST_PICTURES_BYTES` go."""
    found: dict[str, str] = {}
    left = MOST_PICTURES_BYTES
    for name in dict.fromkeys(names):
        try:
            data, kind = view.picture(name)
            if len(data) > _PICTURE_BYTES:
                data, kind = reduced(data, _PICTURE_SIDE), "image/jpeg"
        except UnderstudyError:
            continue  # the page says that it is not here
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if len(url) <= left:
            found[name] = url
            left -= len(url)
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _file(name: str) -> str:
    return (resources.files("understudy.viewer") / "page" / name).read_text(encoding="utf-8")


def bundle() -> str:
    """The page's modules as one script: each in a function of its own, its exports in `modules`."""
    parts = []
    for name in _MODULES:
        text = re.sub(_IMPORT, _looked_up, _file(f"{name}.js"))
        if name == "uplot":
            text, exports = re.sub(r"(?m)^export \{ uPlot as default \};$", "", text), ["uPlot"]
        else:
            exports = re.findall(r"(?m)^export (?:async )?(?:function|const|class) (\w+)", text)
            text = re.sub(r"(?m)^export ", "", text)
        waits, kind = ("await ", "async ") if name == "app" else ("", "")
        parts.append(
            f"modules.{name} = {waits}({kind}() => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}})();\n"
        )
    return f"(async () => {{\nconst modules = {{}};\n{''.join(parts)}}})();"


def _looked_up(found: re.Match[str]) -> str:
    names = found[1] if found[1].startswith("{") else f"{{ {found[1]} }}"
    return f"const {names} = modules.{found[2]};"


def _page(name: str, data: dict[str, Any]) -> str:
    script, style = bundle(), _file("uplot.css") + _file("style.css")
    # `<` is the only sign that could end the block of data.
    answers = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _file("index.html")
    for file in ("icon.svg", "uplot.css", "style.css", "app.js"):
        page = re.sub(rf'^<.*"page/{re.escape(file)}".*>\n', "", page, flags=re.M)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{html.escape(name)}</title>\n'
        f"<style>{style}</style>\n"
    )
    page = page.replace("<title>Understudy: a run</title>\n", head, 1)
    blocks = (
        f'<script type="application/json" id="frozen">{answers}</script>\n<script>{script}</script>\n</body>'
    )
    return page.replace("</body>", blocks, 1)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
