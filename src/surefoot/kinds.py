"""The enums of what is found, why it happened, and what is done about it; `records.py` exports them too."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a run fails or learns badly."""

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
    LAUNCH_BOUND = "launch_bound"
    SLOW_SAVING = "slow_saving"
    SLOW_MACHINE = "slow_machine"
    RANK_FAULT = "rank_fault"
    LEAK = "leak"
    LOSS_FUNCTION = "loss_function"
    MODE = "mode"
    DATA_ORDER = "data_order"
    REPEATED_DATA = "repeated_data"
    REGULARISATION = "regularisation"
    OPTIMIZER_SETTINGS = "optimizer_settings"
    CLIPPING = "clipping"
    DETACHED = "detached"
    UNREGISTERED = "unregistered"
    FROZEN = "frozen"
    PADDING = "padding"
    SYMMETRY = "symmetry"
    COLLAPSE = "collapse"
    WEIGHTS_OVERWRITTEN = "weights_overwritten"
    UNKNOWN = "unknown"


class Pattern(StrEnum):
    """The shape of the failure in the numbers."""

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


class FindingKind(StrEnum):
    """What was found, and by which of the judge's detectors: those that rules about incidents and causes name.

    A detector that no such rule names has a kind by its name alone: `FindingKind.named("my_detector")`.
    """

    NONFINITE = "nonfinite"
    NORM_OUTLIER = "norm_outlier"
    PROGRESS = "progress"
    ORIGIN = "origin"
    LOSS_RESCALED = "loss_rescaled"
    INPUT_SHIFT = "input_shift"
    TINY_BATCHES = "tiny_batches"
    WEIGHT_JUMP = "weight_jump"
    STALE_GRADS = "stale_grads"
    CLIPPING_CHANGED = "clipping_changed"
    HYPERPARAM_CHANGE = "hyperparam_change"
    LOSS_SCALE = "loss_scale"
    FROZEN_WEIGHTS = "frozen_weights"
    JUMP = "jump"
    LOSS_LEVEL = "loss_level"
    GROWTH = "growth"
    OSCILLATION = "oscillation"
    EXPLODING_GRADS = "exploding_grads"
    VANISHING_GRADS = "vanishing_grads"
    DEAD_UNITS = "dead_units"
    PERIODIC_SPIKES = "periodic_spikes"
    REPEATED_BATCHES = "repeated_batches"
    LARGE_INITIAL_GRADS = "large_initial_grads"
    PLATEAU = "plateau"
    EVAL_RISE = "eval_rise"
    EVAL_REGRESSION = "eval_regression"
    CLIPPING = "clipping"
    SLOW_STEPS = "slow_steps"
    MEMORY_GROWTH = "memory_growth"
    IDLE_DEVICE = "idle_device"
    REPLICAS = "replicas"
    EARLY_LEARNING = "early_learning"

    @classmethod
    def named(cls, name: str) -> FindingKind:
        """The kind with this name, a new one if there is none."""
        kind = next((kind for kind in cls if kind.value == name), None) or _NAMED_KINDS.get(name)
        if kind is None:
            kind = _NAMED_KINDS[name] = str.__new__(cls, name)
            kind._name_, kind._value_ = name.upper(), name
        return kind

    @classmethod
    def _missing_(cls, value: object) -> FindingKind | None:
        return _NAMED_KINDS.get(str(value))


_NAMED_KINDS: dict[str, FindingKind] = {}
"""Kinds of detectors that no rule names."""


class Severity(StrEnum):
    """What a finding calls for."""

    REPORT_ONLY = "report_only"
    """It is reported, with its cause, and never a reason to act."""
    SUSPICIOUS = "suspicious"
    """It opens an incident: what follows shows whether the run is being harmed."""
    SEVERE = "severe"
    """The run is being damaged: act on it, instead of only reporting it."""


class Action(StrEnum):
    """What the policy may do, from the least intrusive on."""

    REFUSE = "refuse"
    """This update was not applied."""
    CONSTRAIN = "constrain"
    """Override the steps from here on: see `StepOverrides`."""
    REWIND = "rewind"
    """Go back to the last good snapshot and continue from there, with the overrides given."""
    RELAX = "relax"
    """Lift overrides, wholly or in part; with the cause out_of_memory, try larger micro-batches again."""
    REDUCE_MEMORY = "reduce_memory"
    """Compute in smaller micro-batches, or with activation checkpointing; the updates stay the same."""
    ACCEPT = "accept"
    """Accept what looked like an incident as the new baseline."""
    STOP = "stop"
    """End the run: continuing would do no good."""


class RemedyId(StrEnum):
    """What is tried against an incident; see `judge/remedies.py`."""

    REWIND = "rewind"
    CLIP = "clip"
    LOWER_LR = "lower_lr"
    FRESH_OPTIMIZER = "fresh_optimizer"
    FLOAT32 = "float32"
    FLOAT32_REWIND = "float32_rewind"
    ZERO_GRADS = "zero_grads"
    WAIT_OUT = "wait_out"
    RESTORE_SCALE = "restore_scale"
    CAP = "cap"
    WARMUP = "warmup"
    GENTLE_WARMUP = "gentle_warmup"
    EQUAL_WEIGHTS = "equal_weights"
    RESTART = "restart"
