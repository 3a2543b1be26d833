"""The wait graph of a run: chains from a waiting task to the part it waits for.

    train waits for rows of window 3 (12 s)
        <- produce window 3 waits for 12 scores of teacher math (oldest 00000-0000031_0_0, 12 s)
        <- teacher math: 12 requests under way; replica 0 healthy, 12 requests

Built from the spans that are open now. A span knows its parent (the producer), and spans of a window name the
window. The edges:

    train        wait for rows ──> the producers of that window         drain ──> rollouts under way
    admission    wait for a slot ──> train, whose publish frees it
    a producer   rollout ──> engine and agent loop   reward ──> reward function   score ──> teacher's replicas
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.observability.report import many
from understudy.observability.spans import OpenSpan

PRODUCER = "produce window"
"""The span of a fully async producer; the sync trainer's is "produce"."""
_TASKS = ("train", "admission", "evaluation")


@dataclass(frozen=True, slots=True)
class Edge:
    """A task or producer that waits, and what it waits for."""

    waiter: str
    what: str
    target: str | None = None
    """Another waiter, whose edges say why `what` does not come."""
    since: str = ""

    def __str__(self) -> str:
        return f"{self.waiter} waits for {self.what}{self.since}"


class _State(Edge):
    """The end of a chain: the state of a part that has no spans here, such as a teacher."""

    def __str__(self) -> str:
        return f"{self.waiter}: {self.what}"


def wait_graph(spans: Sequence[OpenSpan], now: float, states: Mapping[str, str]) -> list[str]:
    """One line per path from a task to the part it waits for. `states`: descriptions, by name, of parts
    without spans."""
    edges = [*_tasks(spans, now), *_producers(spans, now)]
    edges += [_State(name, state) for name, state in states.items()]
    return [chain for edge in edges if edge.waiter in _TASKS for chain in _chains(edge, edges)]


def _chains(edge: Edge, edges: Sequence[Edge]) -> list[str]:
    onward = [other for other in edges if other.waiter == edge.target]
    return [f"{edge} <- {rest}" for other in onward for rest in _chains(other, edges)] or [str(edge)]


def _tasks(spans: Sequence[OpenSpan], now: float) -> list[Edge]:
    """The edges of the trainer, the admission and an evaluation."""
    edges = []
    for span in spans:
        since = f" ({now - span.start:.0f} s)"
        match span.name:
            case "wait for rows":
                window = span.about.get("window")
                edges.append(Edge("train", f"rows of window {window}", f"{PRODUCER} {window}", since))
            case "produce":
                step = span.about.get("step")
                edges.append(Edge("train", f"rows of step {step}", f"produce step {step}", since))
            case "drain":
                inside = sum(other.name in ("rollout", "reward") for other in spans)
                edges.append(
                    Edge("train", f"{many(inside, 'rollout')} to end before it publishes", None, since)
                )
            case "wait for a slot":
                edges.append(Edge("admission", "a slot, which a publish frees", "train", since))
            case "evaluate":
                edges.append(Edge("evaluation", "answers and their rewards", None, since))
    return edges


def _producers(spans: Sequence[OpenSpan], now: float) -> list[Edge]:
    """What the samples of each producer wait for. Samples that wait for the same thing share an edge."""
    by_number = {span.number: span for span in spans}
    groups: dict[tuple[str, str, str | None], list[OpenSpan]] = {}
    for span in spans:
        parent = by_number.get(-1 if span.parent is None else span.parent)
        if parent is None or parent.name not in (PRODUCER, "produce"):
            continue
        window = parent.about.get("window")
        waiter = f"produce step {parent.about.get('step')}" if window is None else f"{PRODUCER} {window}"
        groups.setdefault((waiter, *_awaited(span)), []).append(span)
    edges = []
    for (waiter, what, target), members in groups.items():
        oldest = min(members, key=lambda span: span.start)
        key = f"oldest {oldest.about['key']}, " if "key" in oldest.about else ""
        since = f" ({key}{now - oldest.start:.0f} s)"
        edges.append(Edge(waiter, f"{len(members)} × {what}", target, since))
    return edges


def _awaited(span: OpenSpan) -> tuple[str, str | None]:
    """What a sample waits for in this span, and the name of the part whose state explains more."""
    match span.name:
        case "rollout":
            return "rollout by the engine and its agent loop", None
        case "reward":
            return "the reward function", None
        case "score":
            teacher = f"teacher {span.about.get('teacher')}"
            return f"scores of {teacher}", teacher
    return f"the journal ({span.name})", None
