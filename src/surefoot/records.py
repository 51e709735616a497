"""The frozen records and enums that packages exchange; nothing here computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, ClassVar

from surefoot.kinds import Action, Cause, FindingKind, Pattern, RemedyId, Severity

__all__ = [
    "EVENT_MARK",
    "LAYER_STATS",
    "NAN",
    "REFUSED",
    "SCHEMA",
    "Action",
    "Cause",
    "CheckpointEvent",
    "Decision",
    "Diagnosis",
    "Event",
    "Finding",
    "FindingKind",
    "JudgedBy",
    "Note",
    "Outcome",
    "Pattern",
    "RemedyId",
    "Severity",
    "StepMetrics",
    "StepOverrides",
    "Verdict",
]

SCHEMA = 2
"""Version of everything written to a run directory; in `run.json` and in every signals header."""

EVENT_MARK = "surefoot_event"
"""Marks a log record that repeats an event, so that a console that prints events can leave it out."""


class Verdict(IntEnum):
    """What happened to one attempted update; the numbers are written to disk and never reused."""

    APPLIED = 0
    NONFINITE = 1
    """Refused: the loss, a gradient, the norm or a buffer changed by the batch was NaN or infinite."""
    NORM_OUTLIER = 2
    """Refused: finite, but far above every norm this run has accepted."""
    OVERFLOW = 3
    """Skipped: the loss scale was too high for this batch; the GradScaler lowers it."""
    DISCARDED = 4
    """The gradients were discarded before any optimizer stepped."""


REFUSED = (Verdict.NONFINITE, Verdict.NORM_OUTLIER)
"""Verdicts of updates that surefoot did not let through."""


class JudgedBy(IntEnum):
    """Which number shows whether a run makes progress; the numbers are written to disk and never reused."""

    LOSS = 0
    PROGRESS = 1
    """The value the loop passed to `guard.watch(progress=...)`."""
    NOTHING = 2
    """The loop passed `progress=None`: only non-finite losses are detected."""


NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The numbers of one attempted update, as the host reads them two steps later; NaN where unknown."""

    step: int
    """Iterations with an applied update before this one; with one optimizer, applied updates. Several optimizers may
    have rows of the same step."""
    attempt: int
    """Updates attempted before this one; never decreases, not even in a rewind."""
    time: float
    """Seconds since the epoch at the step."""
    optimizer: int = 0
    """Which of the attached optimizers stepped."""
    verdict: Verdict = Verdict.APPLIED
    bad_microbatch: int = -1
    """The micro-batch that caused the veto; -1 when there was none."""
    num_microbatches: int = 1
    """Micro-batches accumulated into this update."""
    rank: int = -1
    """The rank that caused the veto, or whose weights differ; -1 when there is none or it is unknown."""
    loss: float = NAN
    loss_d1: float = NAN
    loss_d2: float = NAN
    norm: float = NAN
    """Global gradient norm before any clipping, after unscaling."""
    nonfinite: float = NAN
    """Count of non-finite gradient values."""
    norm_limit: float = NAN
    """The norm above which this update would have been refused as NORM_OUTLIER; NaN while the baseline forms."""
    clip: float = NAN
    """The clip threshold in force; NaN when there is none."""
    clip_factor: float = NAN
    """The factor the gradients were multiplied by: 1 when they were not clipped; NaN when no clip is set."""
    clip_fraction: float = NAN
    """Fraction of the recent updates that were clipped."""
    lr: float = NAN
    """Learning rate of the optimizer's first group, as the loop has set it."""
    momentum: float = NAN
    """Momentum, or the first beta, of the optimizer's first group; NaN when it has neither."""
    loss_scale: float = NAN
    weight_norm: float = NAN
    update_ratio: float = NAN
    """Norm of the update over the norm of the weights, on a sample of the weights."""
    nonfinite_params: float = NAN
    """Count of non-finite values in weights and buffers."""
    nonfinite_buffers: float = NAN
    """Count of buffers in which the batch made values non-finite."""
    first_nonfinite_buffer: int = -1
    """Index of the first of these in the list of buffers in `run.json`; -1 when there is none."""
    unchanged_fraction: float = NAN
    """Fraction of the sampled weights that are exactly what they were a whole step before."""
    applied_norm: float = NAN
    """Global gradient norm that the optimizer received, where the loop has changed the gradients after backward."""
    stale_grads: float = NAN
    """1 when the gradients of the previous update were still there as the first backward of this one began, 1/2 when
    they were zeroed because of `StepOverrides.zero_stale_grads`, else 0."""
    input_mean: float = NAN
    """Mean of the first floating-point tensor in the batch, if it is on the device."""
    input_std: float = NAN
    """Its standard deviation."""
    input_absmax: float = NAN
    """Its largest magnitude; infinite when any value is not finite."""
    eval_loss: float = NAN
    """Loss on held-out data, in the row of the first update after the loop reported it."""
    seconds: float = NAN
    """Wall time from the end of the previous step to the end of this one."""
    data_wait: float = NAN
    """Part of `seconds` between the end of the previous step and the start of the forward pass."""
    samples: float = NAN
    tokens: float = NAN
    memory: float = NAN
    """Bytes: allocated on the accelerator, or resident memory of the process on a CPU."""
    memory_peak: float = NAN
    memory_reserved: float = NAN
    """Bytes reserved on the accelerator but unused."""
    utilisation: float = NAN
    """Fraction of the time the device was busy, 0 to 1."""
    memory_bandwidth: float = NAN
    """Fraction of the time the device's memory was read or written, 0 to 1."""
    saving: float = NAN
    """1 while any rank was writing a checkpoint, else 0."""
    seconds_left: float = NAN
    judged_by: JudgedBy = JudgedBy.LOSS
    """Which number is compared with the baseline."""
    progress: float = NAN
    """The value passed to `guard.watch(progress=...)`, averaged over micro-batches and ranks."""
    replicas: float = NAN
    """How many ranks hold other weights than the majority, by a checksum of what should be equal on all of them;
    0 when all are equal, infinite when they differ and so did the gradients they applied, NaN where not compared."""

    @property
    def applied(self) -> bool:
        return not self.verdict  # APPLIED is 0; this is read many times a step


LAYER_STATS = ("norm", "mean", "std", "absmax", "zeros", "nonfinite", "tiny", "sub")
"""Columns of a per-tensor row. `zeros`, `tiny` (under 6.1e-5) and `sub` (under 5.96e-8) are fractions of the elements,
`nonfinite` is a count; mean, std and absmax are over the finite elements. A tensor without a gradient has
`nonfinite` = -1 and zeros elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a step; each kind adds its own fields."""

    kind: ClassVar[str] = "note"
    step: int
    attempt: int
    rank: int = 0
    time: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Event):
    """A detector found something in the numbers."""

    kind: ClassVar[str] = "finding"
    detector: FindingKind
    pattern: Pattern = Pattern.NONE
    detail: str = ""
    severity: Severity = Severity.SUSPICIOUS
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def severe(self) -> bool:
        return self.severity is Severity.SEVERE

    def as_json(self) -> dict[str, Any]:
        return super(Finding, self).as_json() | {"severe": self.severe}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Event):
    """A cause for the findings."""

    kind: ClassVar[str] = "diagnosis"
    cause: Cause
    confidence: float
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    detail: str = ""
    similar_cases: tuple[dict[str, Any], ...] = ()
    """Up to three incidents of earlier runs that were like this one, and what helped in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverrides:
    """Changes to every step (lower lr, tighter clip) until they are lifted; undone outside the step.

    Values that differ between optimizers are tuples with one for each; an empty tuple changes nothing. With several
    optimizers they apply to those that the decision names.
    """

    lr_factor: float = 1.0
    """Factor on the learning rate."""
    rewarmup_steps: int = 0
    """Steps over which that factor rises linearly from 0 to its value."""
    lasting_lr_factor: float = 1.0
    """Factor on the learning rate for the rest of the run, which was restarted because it was too high."""
    max_lr: tuple[float, ...] = ()
    """Cap on the learning rate of the first group; the other groups are lowered in proportion."""
    max_momentum: tuple[float, ...] = ()
    """Cap on momentum, or on the first beta."""
    clip: tuple[float, ...] = ()
    """Global norm to clip gradients at, on top of the loop's own clipping or `clip=`."""
    norm_ceiling: tuple[float, ...] = ()
    """Updates with a larger norm are refused as NORM_OUTLIER."""
    loss_ceiling: float = math.inf
    """Updates with a larger loss are refused as NORM_OUTLIER."""
    float32: bool = False
    """Compute in float32, whatever autocast says."""
    zero_stale_grads: bool = False
    """Zero the gradients left over from the previous update before backward adds to them."""
    zero_all_grads: bool = False
    """Zero whatever the first backward of an update would add to, since a trial showed that it does harm."""

    @property
    def temporary(self) -> bool:
        """Whether anything is to be lifted again."""
        return replace(self, lasting_lr_factor=1.0) != StepOverrides()

    @property
    def has_ceilings(self) -> bool:
        """Whether finite updates are refused that would be accepted otherwise."""
        return bool(self.norm_ceiling) or math.isfinite(self.loss_ceiling)

    def without_ceilings(self) -> StepOverrides:
        return replace(self, norm_ceiling=(), loss_ceiling=math.inf)

    def as_json(self) -> dict[str, Any]:
        """Only the fields that change something."""
        defaults = StepOverrides()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(defaults, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Event):
    """What the policy decided; `applied` is false when the policy only observes."""

    kind: ClassVar[str] = "decision"
    action: Action
    reason: str
    applied: bool = True
    remedy: str = ""
    """The remedy in words."""
    remedy_id: RemedyId | None = None
    """Which remedy it is; None if it is none."""
    cause: Cause = Cause.UNKNOWN
    overrides: StepOverrides | None = None
    """All overrides from now on; None leaves them as they are."""
    max_attempt: int = -1
    """A rewind goes to the newest good snapshot taken before this attempt."""
    onset_known: bool = False
    """The incident is known to have begun there: a snapshot from before need not have proved good."""
    reset_optimizer: bool = False
    """Clear the optimizers' state, after the rewind if there is one."""
    loss_scale: float = 0.0
    """Set the loss scale to this; 0 leaves it as it is."""
    optimizers: tuple[int, ...] = ()
    """The optimizers the overrides apply to, of several that alternate; empty for all of them."""

    def as_json(self) -> dict[str, Any]:
        values = super(Decision, self).as_json()
        return values | {"overrides": None if self.overrides is None else self.overrides.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Event):
    """Whether an action helped, by the numbers after it."""

    kind: ClassVar[str] = "outcome"
    action: Action
    helped: bool
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """Something that happened to a checkpoint: saved, not saved, resumed from, marked."""

    kind: ClassVar[str] = "checkpoint"
    name: str
    """saved, failed, resumed, proved, unproven, exact_if, inexact, trouble, left_out or stopped."""
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """Anything else a reader of the journal should know: a start, an end, a degradation, a reported value."""

    kind: ClassVar[str] = "note"
    name: str
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)
