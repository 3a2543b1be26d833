"""The text a user reads when a run ends: its folder, its result, the next command."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from understudy.observability.advisories.gather import advisories_of
from understudy.observability.redact import printable
from understudy.observability.report import accuracy_table, is_share, mean_reward, note_of, teachers_measured
from understudy.observability.rundir import RunDir, read_json
from understudy.run.outcome import RunOutcome

STOPPED = 130


def finish(run: RunOutcome) -> int:
    console = Console(markup=False)
    state = read_json(RunDir(run.dir).state)
    table = accuracy_table(run.metrics)
    if table:
        keys = {"before": "before", "after": "after"}
        if teachers_measured(table):
            keys |= {"teacher": "teacher", "of_teacher": "after / teacher"}
        rewards = ("before", "after", "teacher")
        share = is_share(*(entry[key] for entry in table for key in rewards))
        view = Table(title=f"held-out {'accuracy' if share else 'mean reward'}", title_justify="left")
        view.add_column("data source")
        for title in keys.values():
            view.add_column(title, justify="right")
        for entry in table:
            figures = [
                "–" if entry[key] is None else mean_reward(entry[key], share or key not in rewards)
                for key in keys
            ]
            view.add_row(Text(printable(entry["source"])), *figures)
        console.print(view)
        if not teachers_measured(table) and read_json(RunDir(run.dir).recipe)["teachers"]:
            console.print(
                "teachers were not measured; trainer.eval_teachers = true does that", highlight=False
            )
    for advisory in advisories_of(RunDir(run.dir)):
        console.print(f"{advisory.level:<7} {printable(str(advisory))}", highlight=False, soft_wrap=True)
    note = note_of(RunDir(run.dir))
    if note:
        console.print(f"note    {printable(note)}", highlight=False, soft_wrap=True)
    console.print(f"run     {run.dir}", highlight=False, markup=False, soft_wrap=True)
    if state["status"] == "stopped":
        console.print(
            f"stopped after step {run.steps}; continue with: understudy resume {run.dir}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return STOPPED
    console.print(f"report  {run.dir / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    return 0
