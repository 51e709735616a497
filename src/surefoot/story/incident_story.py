"""One incident of a run as data: when, what, why, what was done, whether it helped, what to change."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from surefoot.records import Action, Cause


class IncidentLevel(StrEnum):
    """How far an incident went."""

    REPORTED = "reported"
    """It was only reported, such as a slow step: nothing was wrong with the training."""
    SUSPECTED = "suspected"
    """It was diagnosed, and passed without any action."""
    REFUSED = "refused"
    """Updates were refused, which changed nothing."""
    ACTED = "acted"
    """The run was rewound, or continued with overrides."""
    STOPPED = "stopped"
    """The run was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFinding:
    """What a detector reported."""

    step: int
    attempt: int
    detector: str
    detail: str
    rank: int = 0
    severity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCause:
    """A possible cause."""

    cause: Cause
    phrase: str
    """In a few words, as "learning rate too high"."""
    sentence: str
    """What it means."""
    confidence: float
    evidence: tuple[str, ...] = ()
    """Sentences with numbers, the decisive one first."""
    advice: tuple[str, ...] = ()
    """What to do, in the order to try."""
    by_trial: bool = False
    """A trial has shown it."""

    @property
    def named(self) -> str:
        """The phrase and, unless the cause is unknown, the confidence."""
        return self.phrase if self.cause is Cause.UNKNOWN else f"{self.phrase} ({self.confidence:.0%} sure)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """Where it happened, as far as it is known."""

    module: str = ""
    operation: str = ""
    code: str = ""
    """The line of code, with its file and number."""
    samples: tuple[int, ...] = ()
    """Places in the batch."""
    dataset_samples: tuple[int, ...] = ()
    rank: int | None = None
    microbatch: int | None = None
    """Counted from 0."""
    tensors: tuple[str, ...] = ()
    """The tensors with the most unusual gradients."""

    def parts(self) -> list[tuple[str, str]]:
        """What is known, each with its name."""
        known = (
            ("module", self.module),
            ("operation", self.operation),
            ("code", self.code),
            ("sample", ", ".join(map(str, self.samples))),
            ("in the data set", ", ".join(map(str, self.dataset_samples))),
            ("rank", "" if self.rank is None else str(self.rank)),
            ("micro-batch", "" if self.microbatch is None else str(self.microbatch + 1)),
            ("tensors", ", ".join(self.tensors)),
        )
        return [(name, text) for name, text in known if text]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRow:
    """One branch of a trial."""

    branch: str
    text: str
    """What was different in it, in words."""
    steps: int
    probe_loss: float
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Short runs from a snapshot over kept batches, each with one thing changed."""

    step: int
    result: str
    """continued, rewound, left_alone or not_run."""
    sentence: str
    probes: int = 0
    reference: float = float("nan")
    """The loss on the probe batches at the snapshot."""
    branches: tuple[BranchRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenAction:
    """What surefoot did, or would have done if it did not only observe."""

    step: int
    attempt: int
    action: str
    sentence: str
    reason: str = ""
    applied: bool = True
    done: bool = True
    """False if it could not be carried out, or a trial showed that nothing is wrong."""
    count: int = 1
    """Refused updates in a row."""
    updates_lost: int | None = None
    """Applied updates that a rewind has undone and that were not trained again; None where it is not known."""
    updates_kept: int = 0
    """Updates that were trained again in a way that helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStory:
    """One incident, from its first finding to its outcome."""

    level: IncidentLevel
    step: int
    attempt: int
    time: float
    last_step: int
    last_attempt: int
    findings: tuple[SeenFinding, ...] = ()
    causes: tuple[NamedCause, ...] = ()
    """The most likely first."""
    place: FaultPlace = FaultPlace()
    trials: tuple[TrialTable, ...] = ()
    actions: tuple[TakenAction, ...] = ()
    helped: bool | None = None
    """None while it is not known, and where nothing was done."""
    outcome: str = ""
    path: str = ""
    """The questions of the decision tree with their answers."""
    bundle: str = ""
    """The folder to replay it from, relative to the run directory; empty where none was written."""

    @property
    def first_cause(self) -> NamedCause | None:
        return self.causes[0] if self.causes else None

    @property
    def what(self) -> str:
        """The first finding that opened it, in words."""
        return self.findings[0].detail if self.findings else next((a.reason for a in self.actions if a.reason), "")

    @property
    def cause_text(self) -> str:
        cause = self.first_cause
        return "the numbers do not show the cause" if cause is None else cause.named

    @property
    def refused(self) -> int:
        """Updates that were refused and changed nothing."""
        return sum(action.count for action in self.actions if action.action == Action.REFUSE and action.applied)

    @property
    def updates_lost(self) -> int:
        return sum(action.updates_lost or 0 for action in self.actions)

    def as_json(self) -> dict[str, Any]:
        return plain_story(self)


def plain_story(value: Any) -> Any:
    """A story in plain values, for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_story(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain_story(part) for part in value]
    if isinstance(value, dict):
        return {str(name): plain_story(part) for name, part in value.items()}
    if isinstance(value, float) and value != value:
        return None
    return value
