"""Keeps the case that is open: what was found since the first sign, the numbers around it, and when it is over."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import asdict
from enum import Enum
from typing import Any

import numpy as np

from surefoot.journal.aliases import COLUMNS, DETECTORS, EVENTS, renamed
from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.inputs import Inputs
from surefoot.judge.detectors.layers import NONFINITE, NORM, LayerPast
from surefoot.judge.detectors.loss_rescaled import LossRescaled
from surefoot.judge.incident import SILENCE, SUFFERS, Incident, IncidentStep, leads, least
from surefoot.judge.policy import CLEARLY, FEW, LONG, MANIFOLD, NOTHING, SMALL, STRETCH, WHILE, Thresholds
from surefoot.records import Finding, Pattern, StepMetrics, Verdict

STANDING = ("settings", "stale_grads", "lost_clip")
"""What these have found goes on, and may be the reason for what comes of it much later."""
SPENT = frozenset(
    {"level", "growth", "oscillation", "vanishing", "dead", "units", "stale_grads", "lost_clip", "astray", "replicas"}
)
"""Signs that a decision has answered; should they come again, they are told again."""


class IncidentTracker:
    """Opens a case at the first sign, adds to it, and closes it when all has been quiet for long."""

    def __init__(
        self,
        normal: Baselines,
        past: LayerPast,
        units: LossRescaled,
        inputs: Inputs,
        *,
        heads: Sequence[int],
        normed: bool,
        adaptive: bool,
        values: int,
        first: float,
        reach: int,
    ) -> None:
        self.case: Incident | None = None
        self.quiet_rows = 0
        self._normal = normal
        self._past = past
        self._units = units
        self._inputs = inputs
        self._heads = heads
        """The tensors of attention."""
        self._normed = normed
        self._adaptive = adaptive
        self._values = values
        self._first = first
        self._reach = reach
        """Attempts that a run can go back by, about."""
        self._update = math.nan
        """The usual size of an update at a rate of one."""
        self._outgrown = (-1, 1.0)
        """The attempt after which updates were last found too large, and how many times."""
        self._norms: deque[float] = deque(maxlen=WHILE)
        self._weights: list[tuple[int, float]] = []
        """The last looks at the weights while all was quiet: attempt and norm."""
        self._ratios: deque[float] = deque(maxlen=FEW)
        """How far the last updates that were looked at have moved the weights."""
        self._signs: deque[Finding] = deque(maxlen=WHILE)
        self._unit: list[Finding] = []
        """The loss was told in another unit before the last action, which does not change that."""
        self._bore: Incident | None = None
        """A rate was raised in this case, and the run bore it."""

    @property
    def curious(self) -> bool:
        """A look at the weights would help to tell what has happened."""
        return self.case is not None and math.isnan(self.case.weights) and len(self.case.moments) < STRETCH

    @property
    def learns(self) -> bool:
        """What is seen now may be taken for normal."""
        return self.case is None or self.quiet_rows > LONG // 2

    def close(self) -> None:
        self.case = self._bore = None
        self._signs.clear()

    def answered(self, case: Incident) -> None:
        """Something was decided about a case: its signs need no further answer."""
        self._unit = case.found("units")[:1]
        self._forget(SPENT)

    def blink(self) -> None:
        """Forget the signs that came before the answer was in force; what held-out data says of the weights stands, for
        the answer has left them as they are."""
        self._forget(SPENT - {"astray"})

    def _forget(self, signs: Set[str]) -> None:
        if self.case is not None:
            self.case.findings = [f for f in self.case.findings if not f.severe and f.detector not in signs]

    def opened(self, row: StepMetrics, found: Sequence[Finding] = ()) -> Incident:
        """A new case that begins with this row."""
        return Incident(
            onset=row.attempt,
            start=self._normal.start,
            normal=self._normal.loss.middle,
            attention=bool(self._heads),
            normed=self._normed,
            samples=self._normal.samples,
            adaptive=self._adaptive,
            findings=list(found),
            sight=self._normal.sight,
        )

    def follow(self, row: StepMetrics, layers: np.ndarray | None, found: Sequence[Finding]) -> None:
        before = self.case
        if found and (before is None or (before.named and self.quiet_rows > WHILE)):
            self.case, self.quiet_rows = self._after(before, row, found), 0
        case = self.case
        self._signs += (f for f in found if f.detector in (*SUFFERS, "jump", "inputs", "settings"))
        self._look(row, case)
        if case is None:
            return
        if case.onset - WHILE <= self._outgrown[0] <= case.onset + WHILE:
            case.update = self._outgrown[1]
        if not case.rates or any(f.detector == "settings" for f in found):
            rates, momenta = self._normal.settings
            case.rates, case.momenta = least(case.rates, rates), least(case.momenta, momenta)
        for told in (f for f in found if f.detector == "replicas"):
            case.onset = min(case.onset, told.evidence["well"])  # states from after that differ between the ranks
        case.findings += found
        if row.optimizer == 0:
            case.moments.append(self.moment(row, layers))
            del case.moments[LONG // 2 : -LONG // 2]
        calm = not found and row.applied and not self._normal.z(row.loss) > self._normal.raised
        self.quiet_rows = self.quiet_rows + 1 if calm else 0
        if self.quiet_rows >= LONG:
            self._bore = case if _rate_raised(case) else self._bore
            self.case = None

    def _after(self, before: Incident | None, row: StepMetrics, found: Sequence[Finding]) -> Incident:
        """A new case, with what is left of the one before and of signs that are now known to have meant something."""
        case = self.opened(row, self._unit)
        self._unit = []
        if before is not None and before.found(*STANDING):
            case.findings += before.found(*STANDING)
            case.rates, case.momenta = before.rates, before.momenta
            case.onset = before.onset if before.treated else case.onset  # what was done about it did not end it
        if before is not None and before.found(*SILENCE):
            case.findings += before.found(*SILENCE)
            case.onset = before.onset  # states from after it are not sound
        if before is None and self._bore is not None and self._climbs(row, self._bore):
            case.findings += _rate_raised(self._bore)
            case.rates, case.momenta = self._bore.rates, self._bore.momenta
        for told in (f for f in found if f.detector == "weights"):
            case.onset = told.evidence["well"]  # that was the last look before
        for told in (f for f in found if f.detector == "replicas"):
            case.onset = told.evidence["well"]
        for told in (f for f in found if f.detector == "astray"):
            since = max(told.evidence["well"], row.attempt - self._reach)
            signs = [f for f in self._signs if f.attempt >= since and f not in case.findings]
            case.findings += signs
            case.onset = min([case.onset, *(f.attempt for f in signs)])
        return case

    def _climbs(self, row: StepMetrics, bore: Incident) -> bool:
        """A raised rate that the run bore is higher still by now, and not yet what is usual."""
        told = max(f.evidence["lr"] for f in _rate_raised(bore))
        usual, _ = self._normal.settings
        return row.lr > CLEARLY * told and usual[0] < told

    def moment(self, row: StepMetrics, layers: np.ndarray | None) -> IncidentStep:
        """One row against what is normal."""
        normal = self._normal
        return IncidentStep(
            row=row,
            z=normal.z(row.loss),
            norm_ratio=normal.norm_ratio(row),
            rate_ratio=normal.rate_ratio(row),
            factor=self._units.factor,
            lead=math.nan if layers is None else leads(self._past.usual, layers[:, NORM]),
            attended=0.0 if layers is None else self._attended(layers),
            silent=0.0 if layers is None else float((self._past.zeros_now > normal.sight.hushed).mean()),
            strange=self._inputs.strange,
            momentum=normal.momentum(row),
            one_bad_tensor=layers is not None and _one_bad_tensor(layers),
        )

    def _attended(self, layers: np.ndarray) -> float:
        """How much more attention's gradients have grown than all others, as a logarithm."""
        mine = np.zeros(len(layers), dtype=bool)
        mine[[k for k in self._heads if k < len(mine)]] = True
        fit = (layers[:, NORM] > 0) & np.isfinite(layers[:, NORM]) & np.isfinite(self._past.usual)
        if not (mine & fit).any() or not (~mine & fit).any():
            return 0.0
        ratios = np.log(np.where(fit, layers[:, NORM], 1.0).astype(np.float64)) - self._past.usual
        return float(np.median(ratios[mine & fit]) - np.median(ratios[~mine & fit]))

    # -- the weights, where they were looked at

    def _look(self, row: StepMetrics, case: Incident | None) -> None:
        self._look_at_weights(row, case)
        if row.optimizer == 0 and row.norm > 0:
            self._norms.append(row.norm)  # only now: a row tells of the weights after the update before it

    def _look_at_weights(self, row: StepMetrics, case: Incident | None) -> None:
        if math.isnan(row.weight_norm) and not row.nonfinite_params > 0:
            return
        self._look_at_update(row, case)
        if math.isfinite(row.update_ratio):
            self._ratios.append(row.update_ratio)
        if case is None:
            self._weights = [*self._weights, (row.attempt, row.weight_norm)][-FEW:]
        elif case.onset < row.attempt <= case.onset + STRETCH:  # a row tells of the weights after the update before it
            case.weights = self._changed(case.onset, row)

    def _changed(self, onset: int, row: StepMetrics) -> float:
        """How much the weights have changed since before the trouble, as a logarithm of their norm: nothing to speak
        of is 0, and what updates may have done is not told."""
        looks = [(attempt, known) for attempt, known in self._weights if attempt <= onset - WHILE // 2 and known > 0]
        if not looks:
            return math.nan
        if not math.isfinite(row.weight_norm) or not row.weight_norm > 0:
            return math.inf
        usual = max((abs(math.log(b / a)) for (_, a), (_, b) in itertools.pairwise(looks)), default=0.0)
        at, before = looks[-1]
        change = math.log(row.weight_norm / before)
        if abs(change) <= MANIFOLD * max(usual, NOTHING):
            return 0.0
        return change if abs(change) > (row.attempt - at) * max(self._ratios, default=0.0) else math.nan

    def _look_at_update(self, row: StepMetrics, case: Incident | None) -> None:
        """How large the update of the attempt before was, beyond what its rate and its gradients explain."""
        rate, known = self._normal.rate(row), self._normal.norms.get(row.optimizer)
        if not row.update_ratio > 0 or not rate > 0:
            return
        size = row.update_ratio / rate
        if math.isnan(self._update) or not self._weights:
            self._update = size
            return
        grown = max(self._norms, default=0.0) / math.exp(known.middle) if known is not None and len(known) else 1.0
        # Weights that have shrunk make an update of the same size look larger, and those that have grown hide it.
        lesser = min(1.0, row.weight_norm / self._weights[-1][1]) if self._weights[-1][1] > 0 else 1.0
        times = size * lesser / self._update / max(grown, 1.0)
        # An optimizer that starts anew, as for another stage, takes steps as large as its very first: no damage.
        # Weights may move a little further than by that one, for their decay.
        apart = row.update_ratio * row.weight_norm / rate / math.sqrt(self._values) if self._values else math.inf
        if times > self._normal.sight.faster and not (self._adaptive and apart <= (1 + SMALL) * self._first):
            self._outgrown = (row.attempt, times)
        elif times <= self._normal.sight.faster and case is None:
            self._update += (size - self._update) / 4

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "case": None if self.case is None else _packed(self.case),
            "bore": None if self._bore is None else _packed(self._bore),
            "quiet_rows": self.quiet_rows,
            "update": self._update,
            "outgrown": list(self._outgrown),
            "norms": list(self._norms),
            "ratios": list(self._ratios),
            "weights": [list(pair) for pair in self._weights],
            "signs": [_plain(asdict(f)) for f in self._signs],
            "unit": [_plain(asdict(f)) for f in self._unit],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.case = None if state["case"] is None else _unpacked(state["case"], self._normal.sight)
        self._bore = None if state.get("bore") is None else _unpacked(state["bore"], self._normal.sight)
        self.quiet_rows, self._update = state["quiet_rows"], state["update"]
        attempt, times = state["outgrown"]
        self._outgrown = (attempt, times)
        self._norms = deque(state["norms"], maxlen=WHILE)
        self._ratios = deque(state["ratios"], maxlen=FEW)
        self._weights = [(attempt, norm) for attempt, norm in state["weights"]]
        self._signs = deque(map(_finding, state["signs"]), maxlen=WHILE)
        self._unit = [_finding(f) for f in state.get("unit", [])]


def _one_bad_tensor(layers: np.ndarray) -> bool:
    bad = layers[:, NONFINITE] > 0
    return int(bad.sum()) == 1 and not bad[np.argmax(layers[:, NONFINITE] >= 0)]


def _rate_raised(case: Incident) -> list[Finding]:
    return [f for f in case.found("settings") if "times" in f.evidence]


def _packed(case: Incident) -> dict[str, Any]:
    """A case in plain values."""
    told = {name: getattr(case, name) for name in case.__slots__ if name not in ("moments", "findings", "sight")}
    return _plain(told | {"moments": [asdict(m) for m in case.moments], "findings": [asdict(f) for f in case.findings]})


def _plain(value: Any) -> Any:
    """The same with values in place of names for them: what a checkpoint cannot hold, it leaves out."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _unpacked(told: dict[str, Any], sight: Thresholds) -> Incident:
    moments = [IncidentStep(**m | {"row": _row(m["row"])}) for m in told["moments"]]
    findings = [_finding(f) for f in told["findings"]]
    tuples: dict[str, Any] = {name: tuple(told[name]) for name in ("rates", "momenta")}
    return Incident(**told | tuples | {"moments": moments, "findings": findings, "sight": sight})


def _finding(told: dict[str, Any]) -> Finding:
    detector = DETECTORS.get(told["detector"], told["detector"])
    own: dict[str, Any] = {"pattern": Pattern(told["pattern"]), "detector": detector}
    return Finding(**renamed(told, EVENTS["finding"]) | own)


def _row(told: dict[str, Any]) -> StepMetrics:
    row: dict[str, Any] = renamed(told, COLUMNS)
    row["verdict"] = Verdict(row["verdict"])
    return StepMetrics(**row)
