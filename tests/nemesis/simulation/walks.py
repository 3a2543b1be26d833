"""Random walks of the parts that need no event loop, each compared with a second implementation of its rules."""

from __future__ import annotations

import math
import random

from simulated_pool import EDGES

from understudy.planning.windows import Windows
from understudy.serving.supervisor import Restarts
from understudy.teacher.pool.health import Failure, HealthRules, ReplicaHealth, State
from understudy.trainers.pacing.staleness_budget import StalenessBudget

RULES = HealthRules(3, 2, Restarts(None, first_wait_s=1.0, longest_wait_s=8.0, steady_s=60.0))
EVENTS = (
    "started", "probe_passed", "probe_failed", "request_ok", "request_failed", "bad_reply", "eject", "died",
    "restarting", "restart_failed",
)  # fmt: skip


def health(seed: int, steps: int = 2000) -> tuple[list[str], int]:
    """Calls `ReplicaHealth` with events in random order and compares it with failures counted here."""
    chance, now, problems = random.Random(seed), 0.0, list[str]()
    one = ReplicaHealth(RULES)
    streak = bad = setbacks = 0
    healthy_since = 0.0
    for _ in range(steps):
        now += chance.expovariate(0.1)
        event, before, usable = chance.choice(EVENTS), one.state, one.usable
        if event in ("started", "restarting"):
            getattr(one, event)()
        elif event in ("probe_passed", "request_ok", "eject"):
            getattr(one, event)(now)
        elif event in ("request_failed", "bad_reply"):
            one.request_failed(Failure.BAD_REPLY if event == "bad_reply" else Failure.TIMEOUT, event)
        else:
            getattr(one, event)(now, event)
        if event == "probe_passed" and before is State.PROBING:
            streak, bad, healthy_since = 0, 0, now
        if usable and event in ("request_failed", "bad_reply"):
            streak, bad = streak + 1, bad + (event == "bad_reply")
        if usable and event == "request_ok":
            streak = 0
            setbacks = 0 if now - healthy_since >= RULES.restarts.steady_s else setbacks
        if one.state is State.EJECTED and (before is not State.EJECTED or event == "restart_failed"):
            at_once = event == "died" and setbacks == 0
            setbacks += 1
            wait = 0.0 if at_once else min(2.0 ** (setbacks - 1), RULES.restarts.longest_wait_s)
            if not math.isclose(one.retry_at, now + wait):
                problems.append(f"after {event} it waits {one.retry_at - now:.2f} s instead of {wait:.2f} s")
        if one.state is not before and one.state not in EDGES[before]:
            problems.append(f"{event} took it from {before} to {one.state}")
        if one.deserves_ejection != (one.usable and (streak >= 3 or bad >= 2)):
            problems.append(
                f"after {event}: {streak} failures, {bad} bad replies, deserves_ejection {one.deserves_ejection}"
            )
        if one.restart_due(now) != (one.state is State.EJECTED and now >= one.retry_at):
            problems.append(f"restart_due is wrong after {event}")
        if problems:
            break
    return problems, steps


def slots(seed: int) -> tuple[list[str], int]:
    """Admission and training take turns at random, the ceiling changes, launches end at any time; no row may exceed the
    staleness bound."""
    chance = random.Random(seed)
    windows = Windows(
        chance.randint(1, 7),
        chance.randint(1, 4),
        chance.choice((0.0, 0.25, 0.5, 1.0, 1.5, 2.5)),
        chance.randint(1, 30),
    )
    written: list[int] = []
    """By prompt: the version that wrote it. A resumed launch keeps what is written."""
    budget = StalenessBudget(windows, 0, 0)
    step = version = moves = 0
    bound = math.ceil(windows.max_staleness)
    while step < windows.steps:
        moves += 1
        window = windows.of_step(step + 1)
        trainable = windows.prompts_of(window).stop <= budget.admitted
        luck = chance.random()
        if luck < 0.02:
            budget.set_ceiling(chance.randint(0, 2 * windows.slots))
        elif luck < 0.03:
            published = step // windows.sync_every
            step = published * windows.sync_every
            version = step
            budget = StalenessBudget(windows, published * windows.size, published)
        elif budget.room and (not trainable or luck < 0.5):
            count = chance.randint(1, budget.room)
            first = budget.admitted
            budget.charge(count)
            written += [version] * (first + count - len(written))
        elif trainable:
            step += 1
            ages = [windows.age(written[prompt], step) for prompt in windows.prompts_of(window)]
            if max(ages) > bound:
                return [
                    f"{windows}: step {step} trains a row of age {max(ages)}, the bound is {bound}"
                ], moves
            if step == windows.last_step(window):
                version = step
                budget.publish()
        else:
            return [f"{windows}: no prompt can be admitted and no step be trained after step {step}"], moves
    return [], moves
