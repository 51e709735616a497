"""A run directory as a judge is to see it again: row by row, with all that happened between two rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal.aliases import upgraded_policy
from surefoot.journal.reader import Run, read
from surefoot.journal.row_file import BadHeader, map_rows
from surefoot.journal.run_json import SIGNALS
from surefoot.journal.segments import listed
from surefoot.judge.multi_optimizer import AnyJudge, make_judge
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import Thresholds
from surefoot.records import ADDED_COLUMNS, SCHEMA, Action, Cause, Decision, StepMetrics, StepOverrides

LAG = 2
"""Rows under way when one is judged; that of `measure.mailbox`, which cannot be asked where there is no torch."""
NOTES = ("attached", "rewired", "rewound", "failed")
"""Notes of what a judge was told between two rows, and of what tells which rows were still under way then."""
_COLUMNS = {f.name: str(f.type) for f in fields(StepMetrics)}
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Told:
    """Something a judge is told before a row: the run went back, what was decided could not be done, or it was found
    out where in the model a value that is not finite came up."""

    attempt: int = -1
    """After which the run is again, at this step."""
    step: int = -1
    failed: Decision | None = None
    """What could not be done; None when the run went back."""
    why: str = ""
    origin: Mapping[str, Any] | None = None
    """Evidence of where it came up, in the update of this attempt and step."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One row as it was written down, with what the judge was told before it."""

    row: StepMetrics
    layers: np.ndarray | None
    judged: bool
    """False where it was still under way when the run went back: written down, and no more."""
    told: Sequence[Told]


class Recorded:
    """One attach to a run directory: rows, decisions, and what stood in `run.json`."""

    def __init__(self, run: Run, layers: LayerRows, info: Mapping[str, Any], first: int, end: float) -> None:
        self._run, self._layers = run, layers
        self._first = first
        self._events = [e for e in _first_ranks(run) if first <= e["attempt"] < end]
        attempts = run.scalars["attempt"]
        self._span = slice(*np.searchsorted(attempts, [first, min(end, np.iinfo(np.int64).max)]).tolist())
        self._attempts = attempts[self._span]
        self.without = 0
        """Rows handed out without their per-tensor numbers."""
        config = info.get("config") or {}
        self.policy = policy_from(config.get("policy"))
        judged = config.get("judged")
        if not isinstance(judged, dict):
            raise ValueError(
                f"{run.path}: run.json does not tell what the judge knew of the run; it was recorded by a surefoot "
                "that could not replay yet"
            )
        self._judged: dict[str, Any] = judged
        self.decisions = [decision_from(e) for e in self._events if e["kind"] == "decision"]

    def judge(self, policy: Policy) -> AnyJudge:
        """A judge as fresh as the one that saw this live."""
        names = ("kinds", "owned", "adaptive", "alone", "scopes", "buffers")
        told = {name: self._judged[name] for name in names if name in self._judged}
        return make_judge(policy, self._layers.names(self._first), **told)

    def rows(self) -> Iterator[Seen]:
        """All rows in the order they were read."""
        told, passed = self._between()
        for at, row in enumerate(self._rows()):
            layers = self._layers.take(row)
            self.without += layers is None
            yield Seen(row, layers, judged=at not in passed, told=told.get(at, ()))

    def _rows(self) -> Iterator[StepMetrics]:
        scalars = self._run.scalars
        for start in range(self._span.start, self._span.stop, _CHUNK):
            part = slice(start, min(start + _CHUNK, self._span.stop))
            yield from scalars.as_rows(part)

    def _between(self) -> tuple[dict[int, list[Told]], set[int]]:
        """What the judge was told before which row, and the rows it never saw, by place."""
        told: dict[int, list[Told]] = {}
        passed: set[int] = set()
        decided: dict[str, Decision] = {}
        read_all = 0
        for e in self._events:
            name = e.get("name")
            if e["kind"] == "decision" and e.get("applied"):
                decided[e["action"]] = decision_from(e)
            elif e["kind"] == "finding" and e["detector"] == "origin":
                at = Told(attempt=e["attempt"], step=e["step"], origin=e["evidence"])
                told.setdefault(self._sent(e["attempt"]), []).append(at)
            elif name == "rewired":
                read_all = self._sent(e["attempt"] - 1)
            elif name == "rewound":
                sent = self._sent(e["attempt"])
                passed.update(range(max(read_all, sent - LAG), sent))
                told.setdefault(sent, []).append(Told(attempt=e["values"]["attempt"], step=e["values"]["step"]))
                read_all = sent
            elif name == "failed":
                action, _, why = e["detail"].partition(": ")
                if action in decided:
                    seen = max(read_all, self._done_after(e["attempt"], decided[action]) - LAG)
                    told.setdefault(seen, []).append(Told(failed=decided[action], why=why))
        return told, passed

    def _sent(self, attempt: int) -> int:
        """How many rows there were up to and with this attempt."""
        return int(np.searchsorted(self._attempts, attempt, side="right"))

    def _done_after(self, attempt: int, decision: Decision) -> int:
        """How many rows had been sent when a decision was carried out, the loop being at this attempt.

        That is when a round is over. But if the decision was known before the last row of the attempts before this one
        was sent, that round was thrown away, and it was carried out before this one began.
        """
        before = self._sent(attempt - 1)
        if self._place(decision) + LAG >= before - 1:
            return self._sent(attempt)
        return before

    def _place(self, decision: Decision) -> int:
        """Which row was decided over: several optimizers may each have one for an attempt."""
        first, end = self._sent(decision.attempt - 1), self._sent(decision.attempt)
        times = self._run.scalars["time"][self._span][first:end].tolist()
        return first + (times.index(decision.time) if decision.time in times else 0)


def recorded(run_dir: str | Path) -> tuple[list[Recorded], list[str]]:
    """Every attach to a run directory, oldest first, and in words what is missing; ValueError if it is none."""
    run = read(run_dir)
    _check(run)
    missing = list(run.notes)
    lost = [e for e in run.events if e.get("name") == "journal_lost"]
    if lost:
        missing.append(f"the journal has lost rows or events at {len(lost)} places")
    infos = [*(run.info.get("earlier") or []), run.info]
    begun = [e["attempt"] for e in _first_ranks(run) if e.get("name") == "attached"] or [0]
    if len(begun) > len(infos):
        missing.append(f"run.json no longer knows the first {len(begun) - len(infos)} attaches; they are left out")
    known = min(len(begun), len(infos))
    layers = LayerRows(run.path / SIGNALS)
    ends = [*begun[-known:], float("inf")]
    spans = zip(infos[-known:], pairwise(ends), strict=True)
    return [Recorded(run, layers, info, int(first), end) for info, (first, end) in spans if first < end], missing


def _first_ranks(run: Run) -> list[dict[str, Any]]:
    """All processes judge alike, and the first one tells."""
    return [e for e in run.events if e["rank"] == 0 and isinstance(e["attempt"], int)]


def _check(run: Run) -> None:
    schema = run.info.get("schema")
    if schema not in range(1, SCHEMA + 1):
        told = "has no run.json that says how it was written" if schema is None else f"is of schema {schema}"
        raise ValueError(f"{run.path} {told}; this surefoot replays schema 1 to {SCHEMA}")
    if not run.scalars.rows:
        raise ValueError(f"{run.path} has no rows to replay")
    needed = {name: kind for name, kind in _COLUMNS.items() if name not in ADDED_COLUMNS}
    other = [name for name in needed if name not in run.scalars]
    other += [name for name, kind in needed.items() if name not in other and _is_other(run.scalars[name], kind)]
    if other:
        raise ValueError(f"{run.path} holds rows of another schema: no {', '.join(other)} in some of them")


def _is_other(column: np.ndarray, kind: str) -> bool:
    return kind != "float" and column.dtype.kind != "i"


class LayerRows:
    """The per-tensor rows that are still kept, to be found by the row they belong to."""

    def __init__(self, folder: Path) -> None:
        self._parts: list[tuple[tuple[str, ...], np.ndarray]] = []
        self._places: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        for one in listed(folder, "layers"):
            try:
                header, rows = map_rows(one.path)
            except (BadHeader, OSError):  # the reader has told of it
                continue
            if "verdict" not in (rows.dtype.names or ()) or not len(rows):
                continue
            keys = zip(rows["attempt"].tolist(), rows["verdict"].tolist(), strict=True)
            for at, key in enumerate(keys):
                self._places.setdefault(key, deque()).append((len(self._parts), at))
            self._parts.append((header.names, rows))

    def names(self, attempt: int) -> tuple[str, ...]:
        """Of the tensors, from this attempt on."""
        return next((names for names, rows in self._parts if rows["attempt"][-1] >= attempt), ())

    def take(self, row: StepMetrics) -> np.ndarray | None:
        """What stands beside this row; several optimizers have one each, in the order of the rows."""
        places = self._places.get((row.attempt, int(row.verdict)))
        if not places:
            return None
        part, at = places.popleft()
        return self._parts[part][1]["stats"][at]


def policy_from(held: object) -> Policy:
    """The policy that stands in a `run.json`."""
    held = upgraded_policy(held) if isinstance(held, dict) else held
    if not isinstance(held, dict) or not isinstance(held.get("thresholds"), dict):
        raise ValueError("run.json does not hold the whole policy: it was recorded by a surefoot that could not replay")
    names = {f.name for f in fields(Policy)} | {f"thresholds.{f.name}" for f in fields(Thresholds)}
    unknown = sorted({*held, *(f"thresholds.{name}" for name in held["thresholds"])} - names)
    if unknown:
        raise ValueError(f"run.json has a policy of another surefoot, with {', '.join(unknown)}")
    figures: dict[str, Any] = {**held, "thresholds": Thresholds(**held["thresholds"])}
    return Policy(**figures)


def decision_from(event: Mapping[str, Any]) -> Decision:
    """A decision as it stands in the journal; what this surefoot does not know of it is left out."""
    told: dict[str, Any] = {f.name: event[f.name] for f in fields(Decision) if f.name in event}
    if told.get("overrides") is not None:
        told["overrides"] = _overrides(told["overrides"])
    told["optimizers"] = tuple(told.get("optimizers", ()))
    try:
        return Decision(**told | {"action": Action(told["action"]), "cause": Cause(told["cause"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a decision at attempt {event['attempt']} is of another surefoot: {error}") from None


def _overrides(held: Mapping[str, Any]) -> StepOverrides:
    known = {f.name for f in fields(StepOverrides)}
    told: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in held.items() if n in known}
    return StepOverrides(**told)
