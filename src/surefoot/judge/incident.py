"""Everything known about one trouble: what was found, in which order, and the numbers around its beginning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from surefoot.judge.policy import Thresholds
from surefoot.records import Finding, StepMetrics, Verdict

SUFFERS = ("level", "growth", "oscillation")
"""Detectors that tell of a loss which is not what it was."""
SILENCE = ("vanishing", "dead")
"""Detectors that tell of a part of the model which no longer learns."""


@dataclass(slots=True)
class IncidentStep:
    """One step of the trouble, against what was normal before it."""

    row: StepMetrics
    z: float
    """Deviations of the loss above normal."""
    norm_ratio: float
    """Logarithm of the norm over the largest accepted lately."""
    rate_ratio: float
    factor: float
    """What loss and all gradients were multiplied by; 1 when they were not, all alike."""
    lead: float
    """How much more the first tensors' gradients have grown than the last ones', as a logarithm."""
    attended: float
    """How much more attention's gradients have grown than all others, as a logarithm."""
    silent: float
    """Share of the tensors in which more gradients than before are exactly zero."""
    strange: float
    """How unlike those before the batch was; from 1 on it was another kind of batch."""
    momentum: float = math.nan
    """That a step was made with."""
    one_bad_tensor: bool = False
    """One tensor alone has non-finite gradients, and tensors before it have finite ones."""


@dataclass(slots=True)
class Incident:
    """One trouble, from its first sign on."""

    onset: int
    start: float
    """The level the loss began at."""
    normal: float
    """What the loss was before."""
    moments: list[IncidentStep] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    named: bool = False
    treated: bool = False
    rates: tuple[float, ...] = ()
    """Of each optimizer, when things were well."""
    momenta: tuple[float, ...] = ()
    attention: bool = False
    """The model has attention."""
    normed: bool = False
    """The model normalises over the batch."""
    samples: float = math.nan
    """Samples in a batch before the trouble."""
    adaptive: bool = False
    """The optimizer divides by the size of past gradients."""
    update: float = math.nan
    """How many times larger an update was than its rate and gradients explain."""
    weights: float = math.nan
    """How much the weights have changed since before, beyond what training does, as a logarithm of their norm."""
    sight: Thresholds = field(default_factory=Thresholds)
    """From when on something is worth a word."""

    def found(self, *detectors: str) -> list[Finding]:
        return [f for f in self.findings if f.detector in detectors]

    @property
    def first(self) -> IncidentStep:
        return self.moments[0]

    @property
    def last(self) -> IncidentStep:
        return self.moments[-1]

    @property
    def refused(self) -> int:
        """Refusals in a row at the end."""
        count = 0
        for moment in reversed(self.moments):
            if moment.row.verdict not in (Verdict.NONFINITE, Verdict.NORM_OUTLIER):
                break
            count += 1
        return count


def leads(usual: np.ndarray, norms: np.ndarray) -> float:
    """How much more the gradients of the first tensors have grown than those of the last, as a logarithm."""
    fit = (norms > 0) & np.isfinite(norms) & np.isfinite(usual)
    if fit.sum() < 3:
        return math.nan
    ratios = np.log(norms[fit].astype(np.float64)) - usual[fit]
    third = max(1, len(ratios) // 3)
    return float(np.median(ratios[:third]) - np.median(ratios[-third:]))


def least(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """The lower of two caps for each optimizer; an infinite one asks nothing."""
    caps = tuple(min(pair) for pair in zip_longest(one, other, fillvalue=math.inf))
    return caps if any(map(math.isfinite, caps)) else ()


def evidence_of(case: Incident) -> dict[str, object]:
    """The numbers a diagnosis rests on."""
    first = case.first
    return {
        "findings": [f.detector for f in case.findings],
        "loss": first.row.loss,
        "normal_loss": case.normal,
        "deviations": first.z,
        "norm": first.row.norm,
        "norm_ratio": math.exp(min(first.norm_ratio, 700.0)) if not math.isnan(first.norm_ratio) else math.nan,
        "rate_ratio": first.rate_ratio,
    }
