"""The frozen records and enums that travel between rooms; nothing here computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

SCHEMA = 2
"""Version of everything written to a run directory; stands in `run.json` and in every signals header."""

EVENT_MARK = "surefoot_event"
"""Marks a line of the log that tells an event: who shows events leaves the line out."""


class Verdict(IntEnum):
    """What became of one attempted update; the numbers are written to disk and never reused."""

    APPLIED = 0
    NONFINITE = 1
    """Refused: a loss, a gradient, the norm or a buffer that the batch has changed was NaN or infinite."""
    NORM_OUTLIER = 2
    """Refused: finite, but far outside anything this run has accepted."""
    OVERFLOW = 3
    """Skipped: the loss scale was too high for this batch; loss scaling lowers it and goes on."""
    DISCARDED = 4
    """The gradients were thrown away before any optimizer stepped."""


class JudgedBy(IntEnum):
    """Which number tells whether a run makes progress; the numbers are written to disk and never reused."""

    LOSS = 0
    PROGRESS = 1
    """What the loop handed to `guard.watch(progress=...)`."""
    NOTHING = 2
    """The loop passed `progress=None`: the loss is only checked for being finite."""


class Cause(StrEnum):
    """Why a run is in trouble."""

    BAD_BATCH = "bad_batch"
    INPUT_SCALE = "input_scale"
    LABELS = "labels"
    DRIFT = "drift"
    LEARNING_RATE = "learning_rate"
    SCHEDULE = "schedule"
    MOMENTUM = "momentum"
    ACCUMULATION = "accumulation"
    PRECISION_OVERFLOW = "precision_overflow"
    PRECISION_UNDERFLOW = "precision_underflow"
    OPTIMIZER_STATE = "optimizer_state"
    WEIGHTS_DAMAGED = "weights_damaged"
    TRANSIENT = "transient"
    INITIALISATION = "initialisation"
    EXPLODING_GRADIENT = "exploding_gradient"
    VANISHING_GRADIENT = "vanishing_gradient"
    DEAD_UNITS = "dead_units"
    LOGIT_GROWTH = "logit_growth"
    ATTENTION_MASK = "attention_mask"
    LOG_OF_ZERO = "log_of_zero"
    ZERO_VARIANCE = "zero_variance"
    PLATEAU = "plateau"
    NOT_UPDATING = "not_updating"
    OVERFITTING = "overfitting"
    OSCILLATION = "oscillation"
    OUT_OF_MEMORY = "out_of_memory"
    MEMORY_LEAK = "memory_leak"
    DATA_STARVATION = "data_starvation"
    RANK_FAULT = "rank_fault"
    UNKNOWN = "unknown"


class Pattern(StrEnum):
    """The shape of the trouble in the numbers."""

    NONE = "none"
    NONFINITE = "nonfinite"
    JUMP = "jump"
    EXPONENTIAL = "exponential"
    OSCILLATING = "oscillating"
    PLATEAU = "plateau"
    COLLAPSE_TO_ZERO = "collapse_to_zero"
    RECOVERED_SPIKE = "recovered_spike"
    OVERFIT = "overfit"
    OVERFLOW_SKIPS = "overflow_skips"


NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The numbers of one attempted update, as the host reads them two steps later; NaN where unknown."""

    step: int
    """Iterations of the loop that landed before this one; with one optimizer, updates. Several optimizers may have
    rows of the same step."""
    attempt: int
    """Updates tried before this one; only grows."""
    time: float
    """Seconds since the epoch at the moment of the step."""
    optimizer: int = 0
    """Which of the attached optimizers stepped."""
    verdict: Verdict = Verdict.APPLIED
    bad_microbatch: int = -1
    """The micro-batch that brought the trouble; -1 when there was none."""
    num_microbatches: int = 1
    """Micro-batches accumulated into this update."""
    rank: int = -1
    """The process that brought the trouble, or whose weights differ; -1 when there was none or it cannot be told."""
    loss: float = NAN
    loss_d1: float = NAN
    loss_d2: float = NAN
    norm: float = NAN
    """Global gradient norm before any clipping, after unscaling."""
    nonfinite: float = NAN
    """Count of non-finite gradient values."""
    norm_limit: float = NAN
    """The norm above which this update would have been refused as outlandish; NaN while the baseline forms."""
    clip: float = NAN
    """The clip threshold in force; NaN when none is."""
    clip_factor: float = NAN
    """The factor the gradients were multiplied by: 1 when clipping left them alone; NaN when no clip is set."""
    clip_fraction: float = NAN
    """Share of the recent updates that were clipped."""
    lr: float = NAN
    """Learning rate of the optimizer's first group, as the loop has set it."""
    momentum: float = NAN
    """Momentum, or the first beta, of the optimizer's first group; NaN when it has neither."""
    loss_scale: float = NAN
    weight_norm: float = NAN
    update_ratio: float = NAN
    """Norm of the change of the weights over the norm of the weights, on a sample of the weights."""
    nonfinite_params: float = NAN
    """Count of non-finite values in weights and buffers."""
    nonfinite_buffers: float = NAN
    """Count of buffers with values that the batch has made non-finite."""
    first_nonfinite_buffer: int = -1
    """The first of these, by its place in the list of buffers in `run.json`; -1 when there is none."""
    unchanged_fraction: float = NAN
    """Share of the sampled weights that are exactly what they were a whole step before."""
    applied_norm: float = NAN
    """Global gradient norm that the optimizer was handed, where the loop has changed the gradients after backward."""
    stale_grads: float = NAN
    """1 when the gradients of the update before were still there as the first backward of this one began, 1/2 when
    they were emptied because that was asked for, else 0."""
    input_mean: float = NAN
    """Of the first tensor of real numbers in the batch, as far as it lives on the device."""
    input_std: float = NAN
    """Its standard deviation."""
    input_absmax: float = NAN
    """Its largest magnitude; infinite when one of its values is not finite."""
    eval_loss: float = NAN
    """Loss on held-out data, at the first update after the loop has told it."""
    seconds: float = NAN
    """Wall time from the end of the step before to the end of this one."""
    data_wait: float = NAN
    """Part of `seconds` between the end of the step before and the start of the forward pass."""
    samples: float = NAN
    tokens: float = NAN
    memory: float = NAN
    """Bytes: on the accelerator the allocated ones, on a CPU the process's resident ones."""
    memory_peak: float = NAN
    memory_reserved: float = NAN
    """Bytes reserved on the accelerator but unused."""
    utilisation: float = NAN
    """Share of the time the device was busy, 0 to 1."""
    seconds_left: float = NAN
    judged_by: JudgedBy = JudgedBy.LOSS
    """Which number is compared with the run's past."""
    progress: float = NAN
    """What the loop handed to `guard.watch(progress=...)`, the mean over micro-batches and processes."""
    replicas: float = NAN
    """How many ranks hold other weights than most ranks do, by a checksum of what should be equal on all of them;
    0 when all are equal, infinite when they differ and so did the gradients they applied, NaN where not compared."""

    @property
    def applied(self) -> bool:
        return not self.verdict  # APPLIED is 0; this is asked many times a step


ADDED_COLUMNS = ("judged_by", "progress", "replicas", "nonfinite_buffers", "first_nonfinite_buffer")
"""Columns of a row that files of this schema may lack, because an earlier version wrote them."""

LAYER_STATS = ("norm", "mean", "std", "absmax", "zeros", "nonfinite", "tiny", "sub")
"""Columns of a per-tensor row. `zeros`, `tiny` (under 6.1e-5) and `sub` (under 5.96e-8) are shares of the elements,
`nonfinite` is a count; mean, std and absmax are over the finite elements. A tensor that had no gradient has
`nonfinite` = -1 and zeros elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a step; each kind of record adds its own fields."""

    kind: ClassVar[str] = "note"
    step: int
    attempt: int
    rank: int = 0
    time: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Event):
    """A detector saw something in the numbers."""

    kind: ClassVar[str] = "finding"
    detector: str
    pattern: Pattern = Pattern.NONE
    detail: str = ""
    severe: bool = False
    """The run is being damaged: something is to be done about it, not only told."""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Event):
    """A named cause for what was found."""

    kind: ClassVar[str] = "diagnosis"
    cause: Cause
    confidence: float
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverrides:
    """What is asked of every step until it is loosened again; all of it is taken off outside the step.

    Figures that differ between optimizers are tuples with one for each of them; an empty tuple asks nothing. Of
    several optimizers it is asked of those that the decision names.
    """

    lr_factor: float = 1.0
    """Factor on the rate."""
    rewarmup_steps: int = 0
    """Steps over which that factor rises from nothing to what it is."""
    max_lr: tuple[float, ...] = ()
    """The rate of the first group, and in proportion that of the others, is no higher than this."""
    max_momentum: tuple[float, ...] = ()
    """Momentum, or the first beta, is no higher than this."""
    clip: tuple[float, ...] = ()
    """Global norm that gradients are clipped at, on top of what the loop or `clip=` does."""
    norm_ceiling: tuple[float, ...] = ()
    """Updates with a larger norm are refused as outlandish."""
    loss_ceiling: float = math.inf
    """Updates with a larger loss are refused as outlandish."""
    float32: bool = False
    """The model computes in float32, whatever autocast says."""
    zero_stale_grads: bool = False
    """Gradients that are left over from the update before are emptied before backward adds to them."""

    def as_json(self) -> dict[str, Any]:
        """Only what is asked for."""
        free = StepOverrides()
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in told.items() if value != getattr(free, name)}


class Action(StrEnum):
    """What may be done about a run, from the least harmful on."""

    REFUSE = "refuse"
    """This update was left out, in its own step."""
    CONSTRAIN = "constrain"
    """The steps from here on are asked for something: see `Restraint`."""
    REWIND = "rewind"
    """Back to the last good state and on from there, with the restraint that is told."""
    RELAX = "relax"
    """A restraint is taken back, wholly or in part."""
    ACCEPT = "accept"
    """What looked like trouble is the new normal."""
    STOP = "stop"
    """Going on would do no good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Event):
    """What the policy chose to do; `applied` is false when the policy only observes."""

    kind: ClassVar[str] = "decision"
    action: Action
    reason: str
    applied: bool = True
    remedy: str = ""
    """In words, the rung of the ladder that this is."""
    cause: Cause = Cause.UNKNOWN
    overrides: StepOverrides | None = None
    """What steps are asked for from now on, all of it; None leaves it as it is."""
    max_attempt: int = -1
    """A rewind goes to the newest good state taken before this attempt."""
    onset_known: bool = False
    """It is known to have begun there: a state from before need not have proved good."""
    reset_optimizer: bool = False
    """The optimizers' state is emptied, after the rewind if there is one."""
    loss_scale: float = 0.0
    """The loss scale is set to this; 0 leaves it as it is."""
    optimizers: tuple[int, ...] = ()
    """The optimizers whose steps are asked for it, of several that step in turn; empty for all of them."""

    def as_json(self) -> dict[str, Any]:
        told = super(Decision, self).as_json()
        return told | {"overrides": None if self.overrides is None else self.overrides.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Event):
    """What came of an action, by the numbers after it."""

    kind: ClassVar[str] = "outcome"
    action: Action
    helped: bool
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """Something about a state on disk: saved, not saved, resumed from, marked."""

    kind: ClassVar[str] = "checkpoint"
    name: str
    """saved, failed, resumed, proved, unproven, exact_if, inexact, trouble, left_out or stopped."""
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """Anything a reader of the journal should know: a start, an end, a degradation, a reported value."""

    kind: ClassVar[str] = "note"
    name: str
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)
