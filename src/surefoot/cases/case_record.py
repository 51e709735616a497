"""One incident of a run as a case: what happened, in which model, what was tried, and whether it helped.

A case holds no weights, no batches, no free text and no path: a library of them can be shared.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.kinds import Action, Cause

CASE_SCHEMA = 1
MAX_TEXT = 120
MAX_ITEMS = 32
MAX_NUMBER = 1e300
UNKNOWN = Cause.UNKNOWN.value
REFUSE = Action.REFUSE.value


class InvalidCase(ValueError):
    """A line is no case; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One incident; names are those of causes, findings, actions, remedies and branches in the journal."""

    run: str
    """The run's folder, relative to the one that was searched."""
    step: int
    cause: str = UNKNOWN
    confidence: float = 0.0
    causes: tuple[str, ...] = ()
    """All causes that were named, the likeliest first."""
    findings: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    module: str = ""
    """The module in which a non-finite value first appeared."""
    operation: str = ""
    model: str = ""
    """The model's class, or the factory of its recipe."""
    family: str = ""
    """Such as transformer or convolutional; see `model_family`."""
    optimizer: str = ""
    phase: str = ""
    """start, early or late; see `phase_of`."""
    actions: tuple[str, ...] = ()
    """What was decided, in order, each once."""
    remedies: tuple[str, ...] = ()
    branches: dict[str, float | None] = field(default_factory=dict)
    """What a trial has tried, with the loss on its probe batches; None where that was not finite."""
    best: str = ""
    """The branch that the run continued from."""
    banned: int = 0
    """Samples that were banned."""
    helped: bool | None = None
    """None where no outcome is known."""
    loss_before: float | None = None
    loss_after: float | None = None

    @property
    def remedy(self) -> str:
        """What was done in the end: the branch of a trial, a remedy of the rules, or an action."""
        return self.best or next(iter(reversed(self.remedies or self.actions)), "")

    def as_json(self) -> dict[str, Any]:
        return {"schema": CASE_SCHEMA} | asdict(self)


def case_from_json(values: Mapping[str, Any]) -> Case:
    """The case that `as_json` has written; unknown fields are ignored; raises InvalidCase."""
    if values.get("schema") != CASE_SCHEMA:
        raise InvalidCase(f"schema {text(values.get('schema'), 20)!r}, this version reads {CASE_SCHEMA}")
    step = values.get("step")
    if type(step) is not int or abs(step) > 1 << 62:
        raise InvalidCase("step is not a whole number")
    helped, banned, branches = values.get("helped"), values.get("banned"), values.get("branches")
    tried = list(branches.items())[:MAX_ITEMS] if isinstance(branches, Mapping) else []
    return Case(
        run=text(values.get("run")) or "?",
        step=step,
        cause=text(values.get("cause")) or UNKNOWN,
        confidence=number(values.get("confidence")) or 0.0,
        causes=texts(values.get("causes")),
        findings=texts(values.get("findings")),
        patterns=texts(values.get("patterns")),
        module=text(values.get("module")),
        operation=text(values.get("operation")),
        model=text(values.get("model")),
        family=text(values.get("family")),
        optimizer=text(values.get("optimizer")),
        phase=text(values.get("phase")),
        actions=texts(values.get("actions")),
        remedies=texts(values.get("remedies")),
        branches={text(name): number(loss) for name, loss in tried},
        best=text(values.get("best")),
        banned=banned if type(banned) is int and 0 <= banned < 1 << 62 else 0,
        helped=helped if isinstance(helped, bool) else None,
        loss_before=number(values.get("loss_before")),
        loss_after=number(values.get("loss_after")),
    )


# -- values from files that anybody may have written


def text(value: object, max_chars: int = MAX_TEXT) -> str:
    """Short and without control characters, which could steer a terminal; empty where it is no text or number."""
    if not isinstance(value, str | int | float):
        return ""
    words = " ".join(str(value)[: 4 * max_chars].split())
    safe = "".join(c for c in words if not unicodedata.category(c).startswith("C"))
    return safe if len(safe) <= max_chars else safe[: max_chars - 3] + "..."


def texts(values: object) -> tuple[str, ...]:
    listed = values[:MAX_ITEMS] if isinstance(values, list | tuple) else ()
    return tuple(word for word in map(text, listed) if word)


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < MAX_NUMBER else None
