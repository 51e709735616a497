"""One incident: its findings in order, and the numbers around its beginning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from surefoot.journal.aliases import COLUMNS, INCIDENT_STEP, renamed, upgraded_finding, upgraded_incident
from surefoot.judge.evidence import Evidence, LrRaised, MomentumRaised
from surefoot.judge.thresholds import RECENT_ROWS, Thresholds
from surefoot.records import Finding, Pattern, Severity, StepMetrics, Verdict
from surefoot.records import FindingKind as Kind

Held = TypeVar("Held", bound=Evidence)

# -- what findings of each detector mean for an incident; all but those that are only reported open one

VETO_DETECTORS = (Kind.NONFINITE, Kind.NORM_OUTLIER)
LOSS_DETECTORS = (Kind.LOSS_LEVEL, Kind.GROWTH, Kind.OSCILLATION)
"""Detectors of a loss that is not what it was."""
SILENCE_DETECTORS = (Kind.VANISHING_GRADS, Kind.DEAD_UNITS)
"""Detectors of a part of the model that no longer learns."""
NO_DIAGNOSIS = frozenset({Kind.CLIPPING, Kind.PERIODIC_SPIKES, Kind.REPLICAS, Kind.PROGRESS})
"""Detectors whose findings need no diagnosis."""
LASTING = (Kind.HYPERPARAM_CHANGE, Kind.STALE_GRADS, Kind.CLIPPING_CHANGED)
"""What these report continues, and may cause trouble much later: their findings carry over to the next incident."""
CARRIED_BACK = (*LOSS_DETECTORS, Kind.JUMP, Kind.INPUT_SHIFT, Kind.HYPERPARAM_CHANGE)
"""Findings that turn out to have mattered when the eval loss shows harm."""
ANSWERED = frozenset(
    {
        *LOSS_DETECTORS,
        *SILENCE_DETECTORS,
        Kind.LOSS_RESCALED,
        Kind.STALE_GRADS,
        Kind.CLIPPING_CHANGED,
        Kind.EVAL_REGRESSION,
        Kind.REPLICAS,
    }
)
"""Findings that a decision has answered; should they come again, they are reported again."""


class Stage(StrEnum):
    """How far an incident has come; it is closed by dropping it."""

    OPEN = "open"
    DIAGNOSED = "diagnosed"
    """Its causes were reported."""
    ACTED_ON = "acted_on"
    """Something was done about it, or would have been if the policy did not only observe."""


@dataclass(slots=True)
class IncidentStep:
    """One step of an incident, compared with what was normal before it."""

    row: StepMetrics
    z: float
    """Sigmas of the loss above normal."""
    log_norm_ratio: float
    """Log of the norm over the largest one accepted recently."""
    lr_ratio: float
    """Learning rate over its usual value."""
    loss_factor: float
    """What the loss and all gradients were multiplied by; 1 when they were not all multiplied alike."""
    front_layers_lead: float
    """How much more the first tensors' gradients have grown than the last ones', as a logarithm."""
    attention_lead: float
    """How much more attention's gradients have grown than all others, as a logarithm."""
    silent_fraction: float
    """Fraction of the tensors in which more gradients than before are exactly zero."""
    input_novelty: float
    """How unlike earlier batches this one was; from 1 on it was a different kind of batch."""
    momentum: float = math.nan
    """The momentum of the step, overrides included."""
    language_lead: float = 0.0
    """The same of the language part, in a model that has other parts, too."""
    one_bad_tensor: bool = False
    """One tensor alone has non-finite gradients, and tensors before it have finite ones."""


@dataclass(slots=True)
class Incident:
    """Something that went wrong, from its first finding on."""

    onset: int
    """The attempt it began with."""
    start_loss: float
    """The level the loss began at."""
    normal_loss: float
    """The usual loss before the incident."""
    steps: list[IncidentStep] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    stage: Stage = Stage.OPEN
    suspected: bool = False
    """A trial was proposed, because much was lost."""
    healthy_lrs: tuple[float, ...] = ()
    """Healthy learning rate of each optimizer, and healthy momentum."""
    healthy_momenta: tuple[float, ...] = ()
    has_attention: bool = False
    has_batch_norm: bool = False
    usual_batch_size: float = math.nan
    """Samples in a batch before the incident."""
    adaptive: bool = False
    """The optimizer divides by the size of past gradients."""
    update_excess: float = math.nan
    """How many times larger an update was than its lr and gradients explain."""
    weight_change: float = math.nan
    """Change of the log weight norm since before, beyond what training does."""
    thresholds: Thresholds = field(default_factory=Thresholds)

    def half_lost(self, losses: Iterable[float]) -> bool:
        """By the last of these losses, at least half of what the loss had fallen since the run began is lost."""
        recent = sorted(list(losses)[-RECENT_ROWS:])
        learnt = self.start_loss - self.normal_loss
        return learnt > 0 and bool(recent) and recent[len(recent) // 2] > self.normal_loss + learnt / 2

    def found(self, *detectors: Kind) -> list[Finding]:
        """The findings of these detectors."""
        return [finding for finding in self.findings if finding.detector in detectors]

    def facts(self, evidence: type[Held]) -> list[tuple[Finding, Held]]:
        """The findings that rest on such evidence, with it."""
        read = ((finding, evidence.read(finding)) for finding in self.findings)
        return [(finding, held) for finding, held in read if held is not None]

    @property
    def raised(self) -> list[tuple[Finding, LrRaised | MomentumRaised]]:
        """Findings that the learning rate or the momentum was raised."""
        read = ((finding, LrRaised.read(finding) or MomentumRaised.read(finding)) for finding in self.findings)
        return [(finding, held) for finding, held in read if held is not None]

    @property
    def first(self) -> IncidentStep:
        return self.steps[0]

    @property
    def last(self) -> IncidentStep:
        return self.steps[-1]

    @property
    def refused(self) -> int:
        """Refused updates in a row at the end."""
        count = 0
        for step in reversed(self.steps):
            if step.row.verdict not in (Verdict.NONFINITE, Verdict.NORM_OUTLIER):
                break
            count += 1
        return count


def front_layers_lead(usual_log_norms: np.ndarray, norms: np.ndarray) -> float:
    """How much more the gradients of the first tensors have grown than those of the last, as a logarithm."""
    valid = (norms > 0) & np.isfinite(norms) & np.isfinite(usual_log_norms)
    if valid.sum() < 3:
        return math.nan
    log_ratios = np.log(norms[valid].astype(np.float64)) - usual_log_norms[valid]
    third = max(1, len(log_ratios) // 3)
    return float(np.median(log_ratios[:third]) - np.median(log_ratios[-third:]))


def lower_caps(caps: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """The lower of two caps for each optimizer; an infinite cap limits nothing."""
    lower = tuple(min(pair) for pair in zip_longest(caps, others, fillvalue=math.inf))
    return lower if any(map(math.isfinite, lower)) else ()


def evidence_of(incident: Incident) -> dict[str, object]:
    """The numbers a diagnosis rests on."""
    first = incident.first
    log_ratio = first.log_norm_ratio
    return {
        "findings": [finding.detector for finding in incident.findings],
        "loss": first.row.loss,
        "normal_loss": incident.normal_loss,
        "deviations": first.z,
        "norm": first.row.norm,
        "norm_ratio": math.exp(min(log_ratio, 700.0)) if not math.isnan(log_ratio) else math.nan,
        "rate_ratio": first.lr_ratio,
    }


# -- state


def incident_state(incident: Incident) -> dict[str, Any]:
    """An incident in plain values."""
    skipped = ("steps", "findings", "thresholds")
    state = {name: getattr(incident, name) for name in incident.__slots__ if name not in skipped}
    state["steps"] = [asdict(step) for step in incident.steps]
    state["findings"] = [asdict(finding) for finding in incident.findings]
    return _plain(state)


def finding_state(finding: Finding) -> dict[str, Any]:
    return _plain(asdict(finding))


def _plain(value: Any) -> Any:
    """The same with enums replaced by their values: a checkpoint leaves out what is not plain."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def load_incident(state: dict[str, Any], thresholds: Thresholds) -> Incident:
    state = upgraded_incident(state)
    steps = [_load_step(step) for step in state["steps"]]
    findings = [load_finding(finding) for finding in state["findings"]]
    tuples: dict[str, Any] = {name: tuple(state[name]) for name in ("healthy_lrs", "healthy_momenta")}
    parts: dict[str, Any] = {"steps": steps, "findings": findings, "stage": Stage(state["stage"])}
    return Incident(**state | tuples | parts, thresholds=thresholds)


def _load_step(state: dict[str, Any]) -> IncidentStep:
    row: dict[str, Any] = {"row": _load_row(state["row"])}
    return IncidentStep(**renamed(state, INCIDENT_STEP) | row)


def load_finding(state: dict[str, Any]) -> Finding:
    state = upgraded_finding(state)
    names: dict[str, Any] = {
        "detector": Kind(state["detector"]),
        "pattern": Pattern(state["pattern"]),
        "severity": Severity(state["severity"]),
    }
    return Finding(**state | names)


def _load_row(state: dict[str, Any]) -> StepMetrics:
    row: dict[str, Any] = renamed(state, COLUMNS)
    row["verdict"] = Verdict(row["verdict"])
    return StepMetrics(**row)
