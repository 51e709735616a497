"""Reads a run directory back row by row, with the notices the judge received between rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal.aliases import ADDED_COLUMNS
from surefoot.journal.policy_aliases import derived_figures, upgraded_policy
from surefoot.journal.reader import Run, read
from surefoot.journal.row_file import BadHeader, map_rows
from surefoot.journal.run_json import SIGNALS_DIR
from surefoot.journal.segments import list_segments
from surefoot.judge.multi_optimizer import AnyJudge, make_judge
from surefoot.judge.policy import Policy, Thresholds
from surefoot.judge.remedies import remedy_id
from surefoot.records import SCHEMA, Action, Cause, Decision, FindingKind, StepMetrics, StepOverrides

LAG = 2
"""Rows in flight when one is judged; equals `measure.block_layout.LAG`, which cannot be imported without torch."""
NOTES = ("attached", "rewired", "rewound", "failed")
"""Event names that show what the judge was notified of between rows, and which rows were in flight then."""
_COLUMNS = {f.name: str(f.type) for f in fields(StepMetrics)}
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class JudgeNotice:
    """A notice to the judge before a row: a rewind, a decision that failed, the origin of a nonfinite value, or what a
    trial made of a decision."""

    attempt: int = -1
    """The attempt and step that the run was rewound to, or in which the nonfinite value appeared."""
    step: int = -1
    failed_decision: Decision | None = None
    """The decision that could not be applied; None for a rewind."""
    why: str = ""
    origin: Mapping[str, Any] | None = None
    """Evidence of where in the model the nonfinite value appeared."""
    carried_out: Decision | None = None
    dismissed: Decision | None = None
    proposed: bool = False
    """A trial, and not the judge, led to that decision."""


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One recorded row and the notices that came before it."""

    row: StepMetrics
    layers: np.ndarray | None
    judged: bool
    """False where the row was still in flight when the run was rewound: it was recorded but never judged."""
    notices: Sequence[JudgeNotice]


class RecordedAttach:
    """One attach to a run directory: its rows, its decisions and its `run.json`."""

    def __init__(self, run: Run, layers: LayerRows, info: Mapping[str, Any], first: int, end: float) -> None:
        self._run, self._layers = run, layers
        self._first = first
        self._events = [e for e in _rank0_events(run) if first <= e["attempt"] < end]
        attempts = run.scalars["attempt"]
        self._span = slice(*np.searchsorted(attempts, [first, min(end, np.iinfo(np.int64).max)]).tolist())
        self._attempts = attempts[self._span]
        self.rows_without_layers = 0
        """Rows yielded without per-tensor numbers."""
        config = info.get("config") or {}
        self.policy = policy_from(config.get("policy"))
        judged = config.get("judged")
        if not isinstance(judged, dict):
            raise ValueError(
                f"{run.path}: run.json lacks the judge's inputs (config.judged); it was recorded by a version of "
                "surefoot without replay"
            )
        self._judged: dict[str, Any] = judged
        self.decisions = [decision_from(e) for e in self._events if e["kind"] == "decision"]

    def judge(self, policy: Policy) -> AnyJudge:
        """A new judge, built from the same inputs as the one that judged the live run."""
        names = ("kinds", "owned", "adaptive", "alone", "scopes", "buffers")
        inputs = {name: self._judged[name] for name in names if name in self._judged}
        return make_judge(policy, self._layers.names(self._first), **inputs)

    def rows(self) -> Iterator[RecordedRow]:
        """All rows in the order in which they were read back from the device."""
        notices, unjudged = self._notices_by_row()
        for index, row in enumerate(self._rows()):
            layers = self._layers.take(row)
            self.rows_without_layers += layers is None
            yield RecordedRow(row, layers, judged=index not in unjudged, notices=notices.get(index, ()))

    def _rows(self) -> Iterator[StepMetrics]:
        scalars = self._run.scalars
        for start in range(self._span.start, self._span.stop, _CHUNK):
            part = slice(start, min(start + _CHUNK, self._span.stop))
            yield from scalars.as_rows(part)

    def _notices_by_row(self) -> tuple[dict[int, list[JudgeNotice]], set[int]]:
        """The notices by index of the row they precede, and the indices of rows the judge never saw."""
        notices: dict[int, list[JudgeNotice]] = {}
        unjudged: set[int] = set()
        decisions: dict[str, Decision] = {}
        drained = 0  # rows up to here had all been read when the pipeline was last drained
        for e in self._events:
            name = e.get("name")
            if e["kind"] == "decision" and e.get("applied"):
                decisions[e["action"]] = decision_from(e)
            elif e["kind"] == "finding" and e["detector"] == FindingKind.ORIGIN:
                notice = JudgeNotice(attempt=e["attempt"], step=e["step"], origin=e["evidence"])
                notices.setdefault(self._rows_up_to(e["attempt"]), []).append(notice)
            elif e["kind"] == "trial" and "proposed" in e["values"]:
                index = max(self._rows_up_to(e["attempt"]), drained)
                notices.setdefault(index, []).append(_trial_notice(e["values"]))
            elif name == "rewired":
                drained = self._rows_up_to(e["attempt"] - 1)
            elif name == "rewound":
                sent = self._rows_up_to(e["attempt"])
                unjudged.update(range(max(drained, sent - LAG), sent))
                notice = JudgeNotice(attempt=e["values"]["attempt"], step=e["values"]["step"])
                notices.setdefault(sent, []).append(notice)
                drained = sent
            elif name == "failed":
                action, _, why = e["detail"].partition(": ")
                if action in decisions:
                    sent = self._rows_sent_when_applied(e["attempt"], decisions[action])
                    notice = JudgeNotice(failed_decision=decisions[action], why=why)
                    notices.setdefault(max(drained, sent - LAG), []).append(notice)
        return notices, unjudged

    def _rows_up_to(self, attempt: int) -> int:
        """Number of rows up to and including this attempt."""
        return int(np.searchsorted(self._attempts, attempt, side="right"))

    def _rows_sent_when_applied(self, attempt: int, decision: Decision) -> int:
        """Number of rows sent by the time a decision was applied, with the loop at this attempt.

        Decisions are applied at the end of an iteration. If this one was known before the last row of the preceding
        attempts was sent, that iteration was discarded and the decision was applied before the current one began.
        """
        before = self._rows_up_to(attempt - 1)
        if self._row_index(decision) + LAG >= before - 1:
            return self._rows_up_to(attempt)
        return before

    def _row_index(self, decision: Decision) -> int:
        """Index of the row the decision was made on; each of several optimizers may have a row for one attempt."""
        first, end = self._rows_up_to(decision.attempt - 1), self._rows_up_to(decision.attempt)
        times = self._run.scalars["time"][self._span][first:end].tolist()
        return first + (times.index(decision.time) if decision.time in times else 0)


def read_attaches(run_dir: str | Path) -> tuple[list[RecordedAttach], list[str]]:
    """Every attach to a run directory, oldest first, and messages about what is missing; ValueError if it is no run."""
    run = read(run_dir)
    _check_schema(run)
    missing = list(run.notes)
    lost = [e for e in run.events if e.get("name") == "journal_lost"]
    if lost:
        missing.append(f"the journal lost rows or events in {len(lost)} places")
    missing += _unused_figures(run.info)
    infos = [*(run.info.get("earlier") or []), run.info]
    starts = [e["attempt"] for e in _rank0_events(run) if e.get("name") == "attached"] or [0]
    if len(starts) > len(infos):
        missing.append(f"run.json no longer lists the first {len(starts) - len(infos)} attaches; they are skipped")
    known = min(len(starts), len(infos))
    layers = LayerRows(run.path / SIGNALS_DIR)
    ends = [*starts[-known:], float("inf")]
    spans = zip(infos[-known:], pairwise(ends), strict=True)
    return [RecordedAttach(run, layers, info, int(first), end) for info, (first, end) in spans if first < end], missing


def _unused_figures(info: Mapping[str, Any]) -> list[str]:
    """What the policy set that is no longer a figure of its own, where that was not the default."""
    policy = (info.get("config") or {}).get("policy")
    figures = derived_figures(policy) if isinstance(policy, dict) else {}
    changed = [f"{name}={value}" for name, (value, default, _) in figures.items() if value != default]
    return [f"the policy set {', '.join(changed)}, which can no longer be set: decisions may differ"] if changed else []


def _rank0_events(run: Run) -> list[dict[str, Any]]:
    """The events of rank 0; all ranks judge alike."""
    return [e for e in run.events if e["rank"] == 0 and isinstance(e["attempt"], int)]


def _check_schema(run: Run) -> None:
    schema = run.info.get("schema")
    if schema not in range(1, SCHEMA + 1):
        problem = "has no run.json with a schema number" if schema is None else f"is of schema {schema}"
        raise ValueError(f"{run.path} {problem}; this surefoot replays schema 1 to {SCHEMA}")
    if not run.scalars.rows:
        raise ValueError(f"{run.path} has no rows to replay")
    needed = {name: kind for name, kind in _COLUMNS.items() if name not in ADDED_COLUMNS}
    missing = [name for name in needed if name not in run.scalars]
    missing += [name for name, kind in needed.items() if name not in missing and _wrong_dtype(run.scalars[name], kind)]
    if missing:
        raise ValueError(f"{run.path} holds rows of another schema: no {', '.join(missing)} in some of them")


def _wrong_dtype(column: np.ndarray, kind: str) -> bool:
    return kind != "float" and column.dtype.kind != "i"


class LayerRows:
    """The per-tensor rows that are still on disk, looked up by the scalar row they belong to."""

    def __init__(self, folder: Path) -> None:
        self._parts: list[tuple[tuple[str, ...], np.ndarray]] = []
        self._locations: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        for segment in list_segments(folder, "layers"):
            try:
                header, rows = map_rows(segment.path)
            except (BadHeader, OSError):  # already in the reader's notes
                continue
            if "verdict" not in (rows.dtype.names or ()) or not len(rows):
                continue
            keys = zip(rows["attempt"].tolist(), rows["verdict"].tolist(), strict=True)
            for index, key in enumerate(keys):
                self._locations.setdefault(key, deque()).append((len(self._parts), index))
            self._parts.append((header.names, rows))

    def names(self, attempt: int) -> tuple[str, ...]:
        """Names of the tensors from this attempt on."""
        return next((names for names, rows in self._parts if rows["attempt"][-1] >= attempt), ())

    def take(self, row: StepMetrics) -> np.ndarray | None:
        """The per-tensor numbers of this row; with several optimizers each has its own, in the order of the rows."""
        locations = self._locations.get((row.attempt, int(row.verdict)))
        if not locations:
            return None
        part, index = locations.popleft()
        return self._parts[part][1]["stats"][index]


def policy_from(config: object) -> Policy:
    """The policy recorded in a `run.json`."""
    config = upgraded_policy(config) if isinstance(config, dict) else config
    if not isinstance(config, dict) or not isinstance(config.get("thresholds"), dict):
        raise ValueError(
            "run.json does not hold the complete policy: it was recorded by a version of surefoot without replay"
        )
    names = {f.name for f in fields(Policy)} | {f"thresholds.{f.name}" for f in fields(Thresholds)}
    unknown = sorted({*config, *(f"thresholds.{name}" for name in config["thresholds"])} - names)
    if unknown:
        raise ValueError(f"run.json has the policy of another surefoot version; unknown: {', '.join(unknown)}")
    settings: dict[str, Any] = {**config, "thresholds": Thresholds(**config["thresholds"])}
    return Policy(**settings)


def _trial_notice(values: Mapping[str, Any]) -> JudgeNotice:
    carried_out, dismissed = (values.get(name) for name in ("carried_out", "dismissed"))
    return JudgeNotice(
        carried_out=None if carried_out is None else decision_from(carried_out),
        dismissed=None if dismissed is None else decision_from(dismissed),
        proposed=values["proposed"],
    )


def decision_from(event: Mapping[str, Any]) -> Decision:
    """A decision from its journal event; fields unknown to this version are dropped."""
    values: dict[str, Any] = {f.name: event[f.name] for f in fields(Decision) if f.name in event}
    if values.get("overrides") is not None:
        values["overrides"] = _overrides(values["overrides"])
    values["optimizers"] = tuple(values.get("optimizers", ()))
    values["remedy_id"] = remedy_id(values.get("remedy_id") or values.get("remedy", ""))
    try:
        return Decision(**values | {"action": Action(values["action"]), "cause": Cause(values["cause"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the decision at attempt {event['attempt']} cannot be read: {error}") from None


def _overrides(event: Mapping[str, Any]) -> StepOverrides:
    known = {f.name for f in fields(StepOverrides)}
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in event.items() if n in known}
    return StepOverrides(**values)
