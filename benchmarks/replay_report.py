"""Prints a replay: parses the policy options, then shows the decisions as a table or JSON."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.recorded_run import read_attaches
from benchmarks.replay import MEASUREMENT_SETTINGS, DecisionPair, ReplayResult, replay
from surefoot.journal.strict_json import plain
from surefoot.judge.policy import Policy, Thresholds
from surefoot.records import Action, Cause, Decision

POLICIES = {"protect": Policy(), "observe": Policy(observe=True)}
_THRESHOLDS = "thresholds."
_TYPES = {f.name: str(f.type) for f in fields(Policy) if f.name != "thresholds"} | {
    _THRESHOLDS + f.name: str(f.type) for f in fields(Thresholds)
}


def show(run_dir: Path, *, name: str, settings: Sequence[str], as_json: bool) -> int:
    """Replay a run and print its decisions; 1 when its own policy no longer makes the recorded ones."""
    try:
        result = replay(run_dir, _policy(run_dir, name, settings))
    except ValueError as error:
        print(f"bench replay: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plain(as_data(result)), indent=1, allow_nan=False) if as_json else as_text(result))
    return 1 if result.same_policy and result.differences else 0


# -- the policy of the options


def _policy(run_dir: Path, name: str, settings: Sequence[str]) -> Policy | None:
    """The policy given by the options; None for the run's own."""
    if name and name not in POLICIES:
        raise ValueError(f"--policy {name} is unknown. Use observe or protect, and --set for single settings.")
    changes = dict(_parse_setting(option) for option in settings)
    if not name and not changes:
        return None
    return _with_changes(POLICIES[name] if name else read_attaches(run_dir)[0][-1].policy, changes)


def _with_changes(policy: Policy, changes: dict[str, Any]) -> Policy:
    thresholds = {
        name.removeprefix(_THRESHOLDS): value for name, value in changes.items() if name.startswith(_THRESHOLDS)
    }
    settings = {name: value for name, value in changes.items() if not name.startswith(_THRESHOLDS)}
    return replace(policy, **settings, thresholds=replace(policy.thresholds, **thresholds))


def _parse_setting(option: str) -> tuple[str, Any]:
    name, equals, text = option.partition("=")
    if not equals:
        raise ValueError(f"--set {option} has no value. Write it as NAME=VALUE, such as max_norm_ratio=10.")
    if name in MEASUREMENT_SETTINGS:
        raise ValueError(f"--set {option}: {name} changes what is measured and kept, which no replay can show.")
    if name not in _TYPES:
        raise ValueError(f"--set {option}: there is no setting {name!r}. {_nearest(name)}")
    return name, _parse_value(option, name, text.strip())


def _nearest(name: str) -> str:
    known = [setting for setting in _TYPES if setting not in MEASUREMENT_SETTINGS]
    by_leaf = {setting.removeprefix(_THRESHOLDS): setting for setting in reversed(known)}
    near = difflib.get_close_matches(name, known, 1) or difflib.get_close_matches(name.rpartition(".")[2], by_leaf, 1)
    return f"Did you mean {by_leaf.get(near[0], near[0])}?" if near else f"Use one of {', '.join(known)}."


def _parse_value(option: str, name: str, text: str) -> Any:
    kind = _TYPES[name]
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"--set {option}: {name} is true or false.")
        return text == "true"
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        value = math.nan
    in_thresholds = name.startswith(_THRESHOLDS)
    if not value >= 0 or (in_thresholds and value == 0):
        wanted = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"--set {option}: {name} must be {wanted}, {'above 0' if in_thresholds else '0 or above'}.")
    return value


# -- output


def as_data(result: ReplayResult) -> dict[str, Any]:
    """The whole result as JSON values."""
    return {
        "run": str(result.path),
        "policy": asdict(result.policy),
        "same_policy": result.same_policy,
        "rows": result.rows,
        "recorded": len(result.recorded),
        "again": len(result.replayed),
        "differences": len(result.differences),
        "decisions": [_pair_data(pair) for pair in result.pairs],
        "notes": list(result.notes),
    }


def _pair_data(pair: DecisionPair) -> dict[str, Any]:
    sides = {"then": pair.then, "now": pair.now}
    decisions = {side: None if decision is None else decision.as_json() for side, decision in sides.items()}
    where = {"step": pair.decision.step, "attempt": pair.decision.attempt}
    return where | decisions | {"same": pair.same, "hypothetical": pair.hypothetical}


def as_text(result: ReplayResult) -> str:
    """A table of decisions, the first difference in full, and notes on what the recording lacks."""
    lines = [*_table(result.pairs), _summary(result), *(f"note: {note}" for note in result.notes)]
    return "\n".join(lines)


def _table(pairs: Sequence[DecisionPair]) -> Iterator[str]:
    if not pairs:
        return
    cells = [("step", "attempt", "then", "now", "")]
    cells += [(str(p.decision.step), str(p.decision.attempt), _describe(p.then), _now(p), _mark(p)) for p in pairs]
    widths = [max(len(row[k]) for row in cells) for k in range(4)]
    for step, attempt, then, now, mark in cells:
        numbers = f"{step:>{widths[0]}}  {attempt:>{widths[1]}}"
        yield f"{numbers}  {then:<{widths[2]}}  {now:<{widths[3]}}  {mark}".rstrip()
    yield ""


def _now(pair: DecisionPair) -> str:
    return "the same" if pair.same else _describe(pair.now)


def _mark(pair: DecisionPair) -> str:
    marks = (
        [] if pair.same else ["differs" + (f" in {', '.join(pair.differing_fields)}" if pair.differing_fields else "")]
    )
    return ", ".join([*marks, "hypothetical"] if pair.hypothetical else marks)


def _describe(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    text = decision.action.value
    if decision.action in (Action.REWIND, Action.STOP) and decision.cause is not Cause.UNKNOWN:
        text += f" ({decision.cause})"
    text += f", {decision.remedy}" if decision.remedy else ""
    return text if decision.applied else f"not applied: {text}"


def _summary(result: ReplayResult) -> str:
    then, now = len(result.recorded), len(result.replayed)
    if not result.differences:
        return f"{then} decisions, all made again" + ("" if result.same_policy else " by the other policy")
    first = result.differences[0]
    where = f"the first difference is at attempt {first.decision.attempt} (step {first.decision.step})"
    lines = [f"{then} decisions then, {now} now; {where}:", *_full(first)]
    if any(pair.hypothetical for pair in result.pairs):
        lines.append(
            "Later differences are hypothetical: from there on the run itself would have taken another course."
        )
    return "\n".join(lines)


def _full(pair: DecisionPair) -> Iterator[str]:
    """Both sides of a difference, with the fields that differ."""
    for side, decision in (("then", pair.then), ("now ", pair.now)):
        values = {} if decision is None else decision.as_json()
        more = [f"{name} {values[name]}" for name in pair.differing_fields if name not in ("reason", "applied")]
        reason = [] if decision is None else [decision.reason]
        yield f"  {side}  {'; '.join([_describe(decision), *more, *reason])}"
