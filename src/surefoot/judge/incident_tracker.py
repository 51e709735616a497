"""Tracks the open incident: its findings, the numbers around it, and when it is over."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from surefoot.judge.baselines import NONFINITE, NORM
from surefoot.judge.detectors.data import InputShift
from surefoot.judge.detectors.gradients import LossRescaled
from surefoot.judge.evidence import LrRaised, RegressionEvidence, ReplicasEvidence, WeightJumpEvidence
from surefoot.judge.incident import (
    ANSWERED,
    CARRIED_BACK,
    LASTING,
    SILENCE_DETECTORS,
    Incident,
    IncidentStep,
    Stage,
    finding_state,
    front_layers_lead,
    incident_state,
    load_finding,
    load_incident,
    lower_caps,
)
from surefoot.judge.signals import Signals
from surefoot.judge.thresholds import (
    BASELINE_ROWS,
    CLEAR_RATIO,
    NEGLIGIBLE_FRACTION,
    RECENT_ROWS,
    SMALL_FRACTION,
    STRONG_RATIO,
    TREND_ROWS,
    WINDOW_ROWS,
)
from surefoot.records import Finding, FindingKind, StepMetrics


class IncidentTracker:
    """Opens an incident at the first finding, adds to it, and closes it after 64 quiet rows."""

    def __init__(
        self,
        signals: Signals,
        loss_rescaled: LossRescaled,
        input_shift: InputShift,
        *,
        attention_tensors: Sequence[int],
        language_tensors: Sequence[int],
        has_batch_norm: bool,
        adaptive: bool,
        num_values: int,
        first_update_lrs: float,
        reach: int,
    ) -> None:
        self.incident: Incident | None = None
        self.quiet_rows = 0
        self._signals = signals
        self._loss_rescaled = loss_rescaled
        self._input_shift = input_shift
        self._attention_tensors, self._language_tensors = attention_tensors, language_tensors
        self._has_batch_norm = has_batch_norm
        self._adaptive = adaptive
        self._num_values = num_values
        self._first_update_lrs = first_update_lrs
        self._reach = reach
        """About how many attempts a run can be rewound by."""
        self._update_size = math.nan
        """The usual size of an update at a learning rate of one."""
        self._excess_update = (-1, 1.0)
        """The attempt after which an update was last found too large, and how many times."""
        self._weight_norms: list[tuple[int, float]] = []
        """The last weight checks while no incident was open: attempt and norm."""
        self._update_ratios: deque[float] = deque(maxlen=RECENT_ROWS)
        """How far the last checked updates moved the weights."""
        self._recent_findings: deque[Finding] = deque(maxlen=WINDOW_ROWS)
        self._rescaled: list[Finding] = []
        """A `loss_rescaled` finding from before the last action, which does not change the loss's unit."""
        self._tolerated: Incident | None = None
        """An incident in which the lr was raised and the run tolerated it."""

    @property
    def wants_weight_check(self) -> bool:
        """A check of the weights would help to find the cause."""
        incident = self.incident
        return incident is not None and math.isnan(incident.weight_change) and len(incident.steps) < TREND_ROWS

    @property
    def can_learn(self) -> bool:
        """Rows seen now may become part of the layers' baselines."""
        return self.incident is None or self.quiet_rows > BASELINE_ROWS // 2

    def close(self) -> None:
        self.incident = self._tolerated = None
        self._recent_findings.clear()

    def acted_on(self, incident: Incident) -> None:
        """A decision was made about the incident: its findings need no further answer."""
        self._rescaled = incident.found(FindingKind.LOSS_RESCALED)[:1]
        self._forget(ANSWERED)

    def forget_earlier_signs(self) -> None:
        """Forget findings from before the decision took effect. A risen eval loss stays: it is about the weights, which
        a decision without a rewind leaves as they are."""
        self._forget(ANSWERED - {FindingKind.EVAL_REGRESSION})

    def _forget(self, detectors: Set[FindingKind]) -> None:
        if self.incident is not None:
            kept = [f for f in self.incident.findings if not f.severe and f.detector not in detectors]
            self.incident.findings = kept

    def take_lost(self) -> Incident | None:
        """The diagnosed incident in which half of what was learnt is lost; each is given out once."""
        incident = self.incident
        if incident is None or incident.stage is not Stage.DIAGNOSED or incident.suspected:
            return None
        incident.suspected = incident.half_lost(self._signals.recent_losses)
        return incident if incident.suspected else None

    def new_incident(self, row: StepMetrics, findings: Sequence[Finding] = ()) -> Incident:
        """An incident that begins with this row."""
        return Incident(
            onset=row.attempt,
            start_loss=self._signals.start_loss,
            normal_loss=self._signals.loss.median,
            has_attention=bool(self._attention_tensors),
            has_batch_norm=self._has_batch_norm,
            usual_batch_size=self._signals.batch_sizes.median,
            adaptive=self._adaptive,
            findings=list(findings),
            thresholds=self._signals.thresholds,
        )

    def update(self, row: StepMetrics, layers: np.ndarray | None, findings: Sequence[Finding]) -> None:
        """Add a row and what was found in it; open or close the incident."""
        previous = self.incident
        if findings and (previous is None or (previous.stage is not Stage.OPEN and self.quiet_rows > WINDOW_ROWS)):
            self.incident, self.quiet_rows = self._next_incident(previous, row, findings), 0
        incident = self.incident
        self._recent_findings += (f for f in findings if f.detector in CARRIED_BACK)
        self._check_weights(row, incident)
        if incident is None:
            return
        if incident.onset - WINDOW_ROWS <= self._excess_update[0] <= incident.onset + WINDOW_ROWS:
            incident.update_excess = self._excess_update[1]
        if not incident.healthy_lrs or any(f.detector is FindingKind.HYPERPARAM_CHANGE for f in findings):
            lrs, momenta = self._signals.healthy_settings
            incident.healthy_lrs = lower_caps(incident.healthy_lrs, lrs)
            incident.healthy_momenta = lower_caps(incident.healthy_momenta, momenta)
        for finding in findings:
            if differ := ReplicasEvidence.read(finding):
                incident.onset = min(incident.onset, differ.well)  # later states differ between the ranks
        incident.findings += findings
        if row.optimizer == 0:
            incident.steps.append(self.incident_step(row, layers))
            del incident.steps[BASELINE_ROWS // 2 : -BASELINE_ROWS // 2]
        loss_is_high = self._signals.z > self._signals.level_sigmas
        self.quiet_rows = self.quiet_rows + 1 if not findings and row.applied and not loss_is_high else 0
        if self.quiet_rows >= BASELINE_ROWS:
            self._tolerated = incident if incident.facts(LrRaised) else self._tolerated
            self.incident = None

    def _next_incident(self, previous: Incident | None, row: StepMetrics, findings: Sequence[Finding]) -> Incident:
        """A new incident, with what carries over from the one before and from findings that now turn out to matter."""
        incident = self.new_incident(row, self._rescaled)
        self._rescaled = []
        if previous is not None and previous.found(*LASTING):
            incident.findings += previous.found(*LASTING)
            incident.healthy_lrs, incident.healthy_momenta = previous.healthy_lrs, previous.healthy_momenta
            incident.onset = (
                previous.onset if previous.stage is Stage.ACTED_ON else incident.onset
            )  # the action did not end it
        if previous is not None and previous.found(*SILENCE_DETECTORS):
            incident.findings += previous.found(*SILENCE_DETECTORS)
            incident.onset = previous.onset  # later states are not sound
        tolerated = self._tolerated
        if previous is None and tolerated is not None and self._lr_climbs(row, tolerated):
            incident.findings += [finding for finding, _ in tolerated.facts(LrRaised)]
            incident.healthy_lrs, incident.healthy_momenta = tolerated.healthy_lrs, tolerated.healthy_momenta
        for finding in findings:
            if held := WeightJumpEvidence.read(finding):
                incident.onset = held.well  # the last weight check before
        for finding in findings:
            if held := ReplicasEvidence.read(finding):
                incident.onset = held.well
        for finding in findings:
            if held := RegressionEvidence.read(finding):
                since = max(held.well, row.attempt - self._reach)
                earlier = [f for f in self._recent_findings if f.attempt >= since and f not in incident.findings]
                incident.findings += earlier
                incident.onset = min([incident.onset, *(f.attempt for f in earlier)])
        return incident

    def _lr_climbs(self, row: StepMetrics, tolerated: Incident) -> bool:
        """A raised lr that the run tolerated is higher still by now, and not yet usual."""
        reported = max(raised.lr for _, raised in tolerated.facts(LrRaised))
        usual, _ = self._signals.healthy_settings
        return row.lr > CLEAR_RATIO * reported and usual[0] < reported

    def incident_step(self, row: StepMetrics, layers: np.ndarray | None) -> IncidentStep:
        """One row compared with the baselines."""
        signals, past = self._signals, self._signals.layers
        lead, attention_lead, language_lead, silent = math.nan, 0.0, 0.0, 0.0
        if layers is not None:
            lead = front_layers_lead(past.log_norms, layers[:, NORM])
            attention_lead = self._lead_of(self._attention_tensors, layers)
            language_lead = self._lead_of(self._language_tensors, layers) if self._language_tensors else 0.0
            silent = float((past.zeros_change > SMALL_FRACTION).mean())
        return IncidentStep(
            row=row,
            z=signals.z,
            log_norm_ratio=signals.log_norm_ratio,
            lr_ratio=signals.lr_ratio,
            loss_factor=self._loss_rescaled.factor,
            front_layers_lead=lead,
            attention_lead=attention_lead,
            language_lead=language_lead,
            silent_fraction=silent,
            input_novelty=self._input_shift.novelty,
            momentum=signals.effective_momentum(row),
            one_bad_tensor=layers is not None and _one_bad_tensor(layers),
        )

    def _lead_of(self, tensors: Sequence[int], layers: np.ndarray) -> float:
        """How much more the gradients of these tensors have grown than all others, as a logarithm."""
        usual, norms = self._signals.layers.log_norms, layers[:, NORM]
        chosen = np.zeros(len(layers), dtype=bool)
        chosen[[k for k in tensors if k < len(chosen)]] = True
        valid = (norms > 0) & np.isfinite(norms) & np.isfinite(usual)
        if not (chosen & valid).any() or not (~chosen & valid).any():
            return 0.0
        log_ratios = np.log(np.where(valid, norms, 1.0).astype(np.float64)) - usual
        return float(np.median(log_ratios[chosen & valid]) - np.median(log_ratios[~chosen & valid]))

    # -- the weights, where they were checked; a row's check is about the weights after the update before it

    def _check_weights(self, row: StepMetrics, incident: Incident | None) -> None:
        if math.isnan(row.weight_norm) and not row.nonfinite_params > 0:
            return
        self._check_update_size(row, incident)
        if math.isfinite(row.update_ratio):
            self._update_ratios.append(row.update_ratio)
        if incident is None:
            self._weight_norms = [*self._weight_norms, (row.attempt, row.weight_norm)][-RECENT_ROWS:]
        elif incident.onset < row.attempt <= incident.onset + TREND_ROWS:
            incident.weight_change = self._weight_change(incident.onset, row)

    def _weight_change(self, onset: int, row: StepMetrics) -> float:
        """Change of the log weight norm since before the incident: 0 if negligible, NaN if updates may explain it."""
        checks = [(at, norm) for at, norm in self._weight_norms if at <= onset - WINDOW_ROWS // 2 and norm > 0]
        if not checks:
            return math.nan
        if not math.isfinite(row.weight_norm) or not row.weight_norm > 0:
            return math.inf
        usual = max((abs(math.log(b / a)) for (_, a), (_, b) in itertools.pairwise(checks)), default=0.0)
        attempt, norm = checks[-1]
        change = math.log(row.weight_norm / norm)
        if abs(change) <= STRONG_RATIO * max(usual, NEGLIGIBLE_FRACTION):
            return 0.0
        by_updates = (row.attempt - attempt) * max(self._update_ratios, default=0.0)
        return change if abs(change) > by_updates else math.nan

    def _check_update_size(self, row: StepMetrics, incident: Incident | None) -> None:
        """How large the update of the attempt before was, beyond what its lr and gradients explain."""
        lr, norms = self._signals.lr, self._signals.log_norms.get(row.optimizer)
        if not row.update_ratio > 0 or not lr > 0:
            return
        size = row.update_ratio / lr
        if math.isnan(self._update_size) or not self._weight_norms:
            self._update_size = size
            return
        norm_growth = (
            max(self._signals.recent_norms, default=0.0) / math.exp(norms.median)
            if norms is not None and len(norms)
            else 1.0
        )
        # Weights that have shrunk make an update of the same size look larger, and those that have grown hide it.
        last_norm = self._weight_norms[-1][1]
        shrinkage = min(1.0, row.weight_norm / last_norm) if last_norm > 0 else 1.0
        ratio = size * shrinkage / self._update_size / max(norm_growth, 1.0)
        # A fresh adaptive optimizer, as for another training stage, takes steps as large as its very first: no damage.
        # Weights may move 10% further than that, because of weight decay.
        lrs = row.update_ratio * row.weight_norm / lr / math.sqrt(self._num_values) if self._num_values else math.inf
        fresh = self._adaptive and lrs <= (1 + SMALL_FRACTION) * self._first_update_lrs
        max_ratio = self._signals.thresholds.lr_jump_ratio
        if ratio > max_ratio and not fresh:
            self._excess_update = (row.attempt, ratio)
        elif ratio <= max_ratio and incident is None:
            self._update_size += (size - self._update_size) / 4

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "case": None if self.incident is None else incident_state(self.incident),
            "bore": None if self._tolerated is None else incident_state(self._tolerated),
            "quiet_rows": self.quiet_rows,
            "update": self._update_size,
            "outgrown": list(self._excess_update),
            "ratios": list(self._update_ratios),
            "weights": [list(pair) for pair in self._weight_norms],
            "signs": [finding_state(f) for f in self._recent_findings],
            "unit": [finding_state(f) for f in self._rescaled],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        thresholds = self._signals.thresholds
        self.incident = None if state["case"] is None else load_incident(state["case"], thresholds)
        self._tolerated = None if state.get("bore") is None else load_incident(state["bore"], thresholds)
        self.quiet_rows, self._update_size = state["quiet_rows"], state["update"]
        attempt, ratio = state["outgrown"]
        self._excess_update = (attempt, ratio)
        self._update_ratios = deque(state["ratios"], maxlen=RECENT_ROWS)
        self._weight_norms = [(attempt, norm) for attempt, norm in state["weights"]]
        self._recent_findings = deque(map(load_finding, state["signs"]), maxlen=WINDOW_ROWS)
        self._rescaled = [load_finding(f) for f in state.get("unit", [])]


def _one_bad_tensor(layers: np.ndarray) -> bool:
    """Exactly one tensor has non-finite gradients, and it is not the first that has any."""
    bad = layers[:, NONFINITE] > 0
    return int(bad.sum()) == 1 and not bad[np.argmax(layers[:, NONFINITE] >= 0)]
