"""`surefoot bench replay` on the console."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.recorded import recorded
from benchmarks.replay import UNJUDGED, Pair, Replay, replay
from surefoot.journal.strict_json import plain
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import Thresholds
from surefoot.records import Action, Decision

NAMED = {"protect": Policy(), "observe": Policy(observe=True)}
_THRESHOLDS = "thresholds."
_KINDS = {f.name: str(f.type) for f in fields(Policy) if f.name != "thresholds"} | {
    _THRESHOLDS + f.name: str(f.type) for f in fields(Thresholds)
}


def show(run_dir: Path, *, name: str, figures: Sequence[str], as_json: bool) -> int:
    """Replay a run and print what came of it; 1 when its own policy no longer decides as it did."""
    try:
        found = replay(run_dir, _policy(run_dir, name, figures))
    except ValueError as wrong:
        print(f"bench replay: {wrong}", file=sys.stderr)
        return 2
    print(json.dumps(plain(as_data(found)), indent=1, allow_nan=False) if as_json else as_text(found))
    return 1 if found.same_policy and found.differences else 0


# -- the policy that is asked for


def _policy(run_dir: Path, name: str, figures: Sequence[str]) -> Policy | None:
    """What the options ask for; None for the run's own."""
    if name and name not in NAMED:
        raise ValueError(f"--policy {name} is unknown. Use observe or protect, and --set for single figures.")
    changes = dict(_figure(told) for told in figures)
    if not name and not changes:
        return None
    return changed(NAMED[name] if name else recorded(run_dir)[0][-1].policy, changes)


def changed(policy: Policy, changes: dict[str, Any]) -> Policy:
    """A policy with some of its figures changed."""
    thresholds = {
        name.removeprefix(_THRESHOLDS): value for name, value in changes.items() if name.startswith(_THRESHOLDS)
    }
    own = {name: value for name, value in changes.items() if not name.startswith(_THRESHOLDS)}
    return replace(policy, **own, thresholds=replace(policy.thresholds, **thresholds))


def _figure(told: str) -> tuple[str, Any]:
    name, equals, word = told.partition("=")
    if not equals:
        raise ValueError(f"--set {told} has no value. Write it as NAME=VALUE, such as max_norm_ratio=10.")
    if name in UNJUDGED:
        raise ValueError(f"--set {told}: {name} changes what is measured and kept, which no replay can show.")
    if name not in _KINDS:
        raise ValueError(f"--set {told}: no figure is called {name!r}. {_nearest(name)}")
    return name, _value(told, name, word.strip())


def _nearest(name: str) -> str:
    known = [one for one in _KINDS if one not in UNJUDGED]
    last = {one.removeprefix(_THRESHOLDS): one for one in reversed(known)}
    near = difflib.get_close_matches(name, known, 1) or difflib.get_close_matches(name.rpartition(".")[2], last, 1)
    return f"Did you mean {last.get(near[0], near[0])}?" if near else f"There are {', '.join(known)}."


def _value(told: str, name: str, word: str) -> Any:
    kind = _KINDS[name]
    if kind == "bool":
        if word not in ("true", "false"):
            raise ValueError(f"--set {told}: {name} is true or false.")
        return word == "true"
    try:
        value = int(word) if kind == "int" else float(word)
    except ValueError:
        value = math.nan
    in_thresholds = name.startswith(_THRESHOLDS)
    if not value >= 0 or (in_thresholds and value == 0):
        wanted = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"--set {told}: {name} must be {wanted}, {'above 0' if in_thresholds else '0 or above'}.")
    return value


# -- what came of it


def as_data(found: Replay) -> dict[str, Any]:
    """All of it, for a program."""
    return {
        "run": str(found.path),
        "policy": asdict(found.policy),
        "same_policy": found.same_policy,
        "rows": found.rows,
        "recorded": len(found.recorded),
        "again": len(found.again),
        "differences": len(found.differences),
        "decisions": [_pair_data(pair) for pair in found.pairs],
        "notes": list(found.notes),
    }


def _pair_data(pair: Pair) -> dict[str, Any]:
    sides = {"then": pair.then, "now": pair.now}
    told = {side: None if decision is None else decision.as_json() for side, decision in sides.items()}
    where = {"step": pair.at.step, "attempt": pair.at.attempt}
    return where | told | {"same": pair.same, "hypothetical": pair.hypothetical}


def as_text(found: Replay) -> str:
    """The table, the difference that matters, and what was missing."""
    lines = [*_table(found.pairs), _summary(found), *(f"note: {note}" for note in found.notes)]
    return "\n".join(lines)


def _table(pairs: Sequence[Pair]) -> Iterator[str]:
    if not pairs:
        return
    cells = [("step", "attempt", "then", "now", "")]
    cells += [(str(p.at.step), str(p.at.attempt), _words(p.then), _now(p), _mark(p)) for p in pairs]
    widths = [max(len(row[k]) for row in cells) for k in range(4)]
    for step, attempt, then, now, mark in cells:
        numbers = f"{step:>{widths[0]}}  {attempt:>{widths[1]}}"
        yield f"{numbers}  {then:<{widths[2]}}  {now:<{widths[3]}}  {mark}".rstrip()
    yield ""


def _now(pair: Pair) -> str:
    return "the same" if pair.same else _words(pair.now)


def _mark(pair: Pair) -> str:
    marks = [] if pair.same else ["differs" + (f" in {', '.join(pair.apart)}" if pair.apart else "")]
    return ", ".join([*marks, "hypothetical"] if pair.hypothetical else marks)


def _words(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    told = decision.action.value
    if decision.action in (Action.REWIND, Action.STOP) and decision.cause != "unknown":
        told += f" ({decision.cause})"
    told += f", {decision.remedy}" if decision.remedy else ""
    return told if decision.applied else f"only told: {told}"


def _summary(found: Replay) -> str:
    then, now = len(found.recorded), len(found.again)
    if not found.differences:
        return f"{then} decisions, all made again" + ("" if found.same_policy else " by the other policy")
    first = found.differences[0]
    where = f"the first difference is at attempt {first.at.attempt} (step {first.at.step})"
    lines = [f"{then} decisions then, {now} now; {where}:", *_full(first)]
    if any(pair.hypothetical for pair in found.pairs):
        lines.append("What comes after it is hypothetical: the run would have gone another way.")
    return "\n".join(lines)


def _full(pair: Pair) -> Iterator[str]:
    """Both sides of a difference, in the fields they differ in."""
    for side, decision in (("then", pair.then), ("now ", pair.now)):
        told = {} if decision is None else decision.as_json()
        more = [f"{name} {told[name]}" for name in pair.apart if name not in ("reason", "applied")]
        reason = [] if decision is None else [decision.reason]
        yield f"  {side}  {'; '.join([_words(decision), *more, *reason])}"
