"""Turns the events of one incident into its story."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.journal.incident_folders import INCIDENTS_DIR
from surefoot.records import Action
from surefoot.story.action_sentences import (
    decision_sentence,
    refusal_outcome,
    refusal_sentence,
    rewound_sentence,
    trial_constrained_sentence,
)
from surefoot.story.group_events import EventFields, EventGroup, is_report, whole
from surefoot.story.incident_story import (
    BranchRow,
    IncidentLevel,
    IncidentStory,
    SeenFinding,
    TakenAction,
    TrialTable,
)
from surefoot.story.row_facts import RowLookup
from surefoot.story.tell_causes import tell_causes, tell_path, tell_place
from surefoot.trials.branches import BRANCHES, BranchId

BRANCH_TEXTS: Mapping[str, str] = {branch.id.value: branch.text for branch in BRANCHES.values()} | {
    BranchId.NOTHING.value: "the run as it is",
    BranchId.REWIND.value: "the snapshot, and nothing trained since",
    BranchId.RESTART.value: "from the initial state, as it was",
    BranchId.RESTART_CLIP.value: "from the initial state, with gradients clipped",
}
"""What was different in each branch; those that are not listed carry a factor on the learning rate in their name."""
NOT_KNOWN = "not known yet"


def tell_incident(group: EventGroup, rows: RowLookup) -> IncidentStory:
    """The story of one incident; `rows` are those since it began, at least."""
    events = group.events
    actions = tell_actions(events, rows)
    findings = tuple(_finding(event) for event in events if event.get("kind") == "finding")
    helped, outcome = _outcome(events, actions, rows)
    start = min(events, key=lambda event: whole(event.get("attempt")))
    return IncidentStory(
        level=_level(group, actions),
        step=whole(start.get("step")),
        attempt=whole(start.get("attempt")),
        time=float(start.get("time") or 0.0) if isinstance(start.get("time"), int | float) else 0.0,
        last_step=whole(events[-1].get("step")),
        last_attempt=group.last_attempt,
        findings=findings,
        causes=tell_causes(events),
        place=tell_place(events),
        trials=tuple(tell_trial(event) for event in events if event.get("kind") == "trial"),
        actions=actions,
        helped=helped,
        outcome=outcome,
        path="" if group.reported_only else tell_path(events),
        bundle=_bundle(events),
    )


def _finding(event: EventFields) -> SeenFinding:
    return SeenFinding(
        step=whole(event.get("step")),
        attempt=whole(event.get("attempt")),
        detector=str(event.get("detector")),
        detail=str(event.get("detail") or ""),
        rank=max(0, whole(event.get("rank"))),
        severity=str(event.get("severity") or ("report_only" if is_report(event) else "")),
    )


def _level(group: EventGroup, actions: Sequence[TakenAction]) -> IncidentLevel:
    applied = {action.action for action in actions if action.applied and action.done}
    if Action.STOP in applied:
        return IncidentLevel.STOPPED
    if applied & {Action.REWIND, Action.CONSTRAIN, Action.ACCEPT}:
        return IncidentLevel.ACTED
    if Action.REFUSE in applied:
        return IncidentLevel.REFUSED
    return IncidentLevel.REPORTED if group.reported_only else IncidentLevel.SUSPECTED


def _bundle(events: Sequence[EventFields]) -> str:
    for event in events:
        values = event.get("values")
        written = event.get("kind") == "note" and event.get("name") == "incident"
        if written and isinstance(values, Mapping) and values.get("folder"):
            return f"{INCIDENTS_DIR}/{values['folder']}"
    return ""


# -- what was done


def tell_actions(events: Sequence[EventFields], rows: RowLookup) -> tuple[TakenAction, ...]:
    """What was done, in order; refusals that follow one another are one action."""
    actions: list[TakenAction] = []
    decision: EventFields = {}
    for event in events:
        kind, name = event.get("kind"), event.get("name")
        if kind == "decision":
            refused = event.get("action") == Action.REFUSE
            if refused and actions and actions[-1].action == Action.REFUSE:
                actions[-1] = _further_refusal(actions[-1], event, rows)
                continue
            actions.append(_refusal(event, rows) if refused else _decided(event))
            decision = decision if refused else event
        elif kind == "note" and name == "rewound" and decision:
            _replace_last(actions, decision, _rewound(decision, event, rows))
        elif kind == "note" and name == "failed" and actions:
            failed = f"could not be done: {event.get('detail')}"
            actions[-1] = replace(actions[-1], sentence=f"{actions[-1].sentence}: {failed}", done=False)
        elif kind == "trial" and actions:
            _shaped_by_trial(actions, decision, event)
    return tuple(actions)


def _place_of(event: EventFields) -> dict[str, Any]:
    return {"step": whole(event.get("step")), "attempt": whole(event.get("attempt"))}


def _refusal(event: EventFields, rows: RowLookup) -> TakenAction:
    applied = bool(event.get("applied", True))
    count = _refused_count(whole(event.get("attempt")), whole(event.get("attempt")), 1, rows) if applied else 1
    return TakenAction(
        **_place_of(event),
        action=Action.REFUSE,
        sentence=refusal_sentence(count, applied=applied),
        reason=str(event.get("reason") or ""),
        applied=applied,
        count=count,
    )


def _further_refusal(first: TakenAction, event: EventFields, rows: RowLookup) -> TakenAction:
    count = first.count + 1
    if first.applied:
        count = _refused_count(first.attempt, whole(event.get("attempt")), 2, rows)
    return replace(first, count=count, sentence=refusal_sentence(count, applied=first.applied))


def _refused_count(first: int, last: int, least: int, rows: RowLookup) -> int:
    """Not every refusal in a long row has an event."""
    return max(least, rows.refused_between(first, rows.last_refusal_of_streak(last)))


def _decided(event: EventFields) -> TakenAction:
    return TakenAction(
        **_place_of(event),
        action=str(event.get("action")),
        sentence=decision_sentence(event),
        reason=str(event.get("reason") or ""),
        applied=bool(event.get("applied", True)),
    )


def _rewound(decision: EventFields, note: EventFields, rows: RowLookup) -> TakenAction:
    values = note.get("values") if isinstance(note.get("values"), Mapping) else {}
    assert isinstance(values, Mapping)
    kept = max(0, whole(values.get("kept")))
    lost = whole(values["lost"]) if "lost" in values else _lost(values, note, kept, rows)
    return replace(
        _decided(decision),
        action=Action.REWIND,
        sentence=rewound_sentence(decision, note),
        updates_lost=lost,
        updates_kept=kept,
    )


def _lost(values: Mapping[str, Any], note: EventFields, kept: int, rows: RowLookup) -> int | None:
    """Versions before the note said it: the rows do."""
    first, last = whole(values.get("attempt")) + 1, whole(note.get("attempt"))
    return max(0, rows.applied_between(first, last) - kept) if rows.last_attempt >= 0 and "attempt" in values else None


def _replace_last(actions: list[TakenAction], decision: EventFields, action: TakenAction) -> None:
    """Put what was done in place of what was decided, and drop other rewinds that it took the place of."""
    attempt = whole(decision.get("attempt"))
    superseded = [a for a in actions if a.attempt == attempt and a.action == Action.REWIND and a.updates_lost is None]
    for other in superseded[:-1]:
        actions.remove(other)
    for k in range(len(actions) - 1, -1, -1):
        if actions[k].attempt == attempt and actions[k].action != Action.REFUSE:
            actions[k] = action
            return
    actions.append(action)


def _shaped_by_trial(actions: list[TakenAction], decision: EventFields, trial: EventFields) -> None:
    """A trial may have shown that a rewind is of no use."""
    values = trial.get("values")
    if not isinstance(values, Mapping) or whole(trial.get("attempt")) != actions[-1].attempt:
        return
    carried, last = values.get("carried_out"), actions[-1]
    if "dismissed" in values and not values.get("proposed") and last.action != Action.REFUSE:
        sentence = f"left the run alone, because {trial.get('detail') or 'a trial found no harm'}"
        actions[-1] = replace(last, sentence=sentence, done=False)
    elif isinstance(carried, Mapping) and carried.get("action") == Action.CONSTRAIN and last.action == Action.REWIND:
        actions[-1] = replace(last, action=Action.CONSTRAIN, sentence=trial_constrained_sentence(trial, carried))


# -- whether it helped


def _outcome(events: Sequence[EventFields], actions: Sequence[TakenAction], rows: RowLookup) -> tuple[bool | None, str]:
    """Whether the last thing that was done helped; None while it is not known, or where nothing was done."""
    taken = [action for action in actions if action.applied and action.done]
    if any(action.action == Action.STOP for action in taken):
        return False, "the run was stopped"
    outcomes = [event for event in events if event.get("kind") == "outcome"]
    changing = [a for a in taken if a.action in (Action.REWIND, Action.CONSTRAIN)]
    if outcomes and whole(outcomes[-1].get("attempt")) >= (changing[-1].attempt if changing else -1):
        last = outcomes[-1]
        return bool(last.get("helped")), str(last.get("detail") or ("it helped" if last.get("helped") else "no help"))
    if changing:
        return None, NOT_KNOWN
    if any(a.action == Action.ACCEPT for a in taken):
        return True, "it is the new normal"
    return _refusal_outcome(events, [a for a in taken if a.action == Action.REFUSE], rows)


def _refusal_outcome(
    events: Sequence[EventFields], refusals: Sequence[TakenAction], rows: RowLookup
) -> tuple[bool | None, str]:
    """Whether updates are applied again."""
    if not refusals:
        return None, ""
    last_attempt = max(whole(e.get("attempt")) for e in events if e.get("action") == Action.REFUSE)
    last_attempt = rows.last_refusal_of_streak(last_attempt)
    loss, count = rows.loss_after(last_attempt), sum(a.count for a in refusals)
    if loss is None:
        return None, NOT_KNOWN
    return True, refusal_outcome(count, loss, consecutive=count == last_attempt - refusals[0].attempt + 1)


# -- trials


def tell_trial(event: EventFields) -> TrialTable:
    """The table of a trial."""
    values = event.get("values") if isinstance(event.get("values"), Mapping) else {}
    assert isinstance(values, Mapping)
    best, listed = values.get("best"), values.get("branches")
    branches = tuple(
        BranchRow(
            branch=str(row.get("branch")),
            text=branch_text(str(row.get("branch"))),
            steps=max(0, whole(row.get("steps"))),
            probe_loss=_float(row.get("probe_loss")),
            chosen=row.get("branch") == best and best != BranchId.NOTHING,
        )
        for row in (listed if isinstance(listed, list) else ())
        if isinstance(row, Mapping)
    )
    return TrialTable(
        step=whole(event.get("step")),
        result=str(event.get("result") or ""),
        sentence=str(event.get("detail") or ""),
        probes=max(0, whole(values.get("probes"))),
        reference=_float(values.get("reference")),
        branches=branches,
    )


def branch_text(branch: str) -> str:
    """What was different in a branch, in words."""
    if branch in BRANCH_TEXTS:
        return BRANCH_TEXTS[branch]
    start, _, factor = branch.partition("lr_x")
    if not factor:
        return branch.replace("_", " ")
    origin = "from the initial state, " if start.startswith("restart") else ""
    return f"{origin}with {factor} times the learning rate"


def _float(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value)  # the journal writes "nan" and "inf" as text
    except (TypeError, ValueError):
        return math.nan
