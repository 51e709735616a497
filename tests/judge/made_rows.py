"""Synthetic rows drawn by a seeded generator, and helpers that feed them to a detector or a judge."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.signals import Signals
from surefoot.judge.thresholds import Thresholds
from surefoot.records import LAYER_STATS, Action, Decision, Event, Finding, StepMetrics, Verdict

Kind = TypeVar("Kind", bound=Event)
BLOCKS = ("embed", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "norm", "head")
NAMES = tuple(f"{block}.weight" for block in BLOCKS)


class Source:
    """A healthy run: a noisy loss that decays to a floor, and log-normal gradient norms."""

    def __init__(
        self,
        seed: int = 0,
        *,
        loss: float = 3.0,
        floor: float = 1.0,
        half: float = 150.0,
        noise: float = 0.04,
        norm: float = 1.0,
        scatter: float = 0.25,
        lr: float = 1e-3,
        **always: Any,
    ) -> None:
        self._rng = random.Random(seed)
        self._loss, self._floor, self._half, self._noise = loss, floor, half, noise
        self._norm, self._scatter = norm, scatter
        self._always: dict[str, Any] = {"lr": lr, "momentum": 0.9} | always
        self.attempt = 0
        self.step = 0

    def row(self, *, times: float = 1.0, swells: float = 1.0, **values: Any) -> StepMetrics:
        """The next row; `times` multiplies its loss, `swells` its norm, and `values` override its fields."""
        level = self._floor + (self._loss - self._floor) * 0.5 ** (self.step / self._half)
        fields: dict[str, Any] = {
            "loss": times * level * math.exp(self._noise * self._chance()),
            "norm": swells * self._norm * math.exp(self._scatter * self._chance()),
            "nonfinite": 0.0,
        }
        fields |= self._always | values
        row = StepMetrics(step=self.step, attempt=self.attempt, time=float(self.attempt), **fields)
        self.attempt += 1
        self.step += row.applied
        return row

    def rows(self, count: int, **values: Any) -> list[StepMetrics]:
        return [self.row(**values) for _ in range(count)]

    def nan(self, **values: Any) -> StepMetrics:
        """A row refused because its loss is NaN."""
        bad: dict[str, Any] = {"loss": math.nan, "norm": math.nan, "nonfinite": 9.0, "verdict": Verdict.NONFINITE}
        return self.row(**(bad | values))

    def far(self, **values: Any) -> StepMetrics:
        """A row refused as a norm outlier."""
        return self.row(**({"norm": 900.0, "norm_limit": 100.0, "verdict": Verdict.NORM_OUTLIER} | values))

    def _chance(self) -> float:
        return max(-2.5, min(2.5, self._rng.gauss(0.0, 1.0)))


def layers(
    seed: int,
    tensors: int = len(NAMES),
    *,
    swells: float = 1.0,
    which: Sequence[int] | None = None,
    zeros: float = 0.02,
) -> np.ndarray:
    """Ordinary statistics of all tensors; norms of `which` are scaled by `swells` and have this fraction of zeros."""
    rng = np.random.default_rng(seed)
    made = np.zeros((tensors, len(LAYER_STATS)), dtype=np.float32)
    chosen = list(range(tensors)) if which is None else list(which)
    made[:, LAYER_STATS.index("norm")] = np.exp(rng.normal(0.0, 0.3, tensors))
    made[chosen, LAYER_STATS.index("norm")] *= swells
    made[:, LAYER_STATS.index("zeros")] = 0.02
    made[chosen, LAYER_STATS.index("zeros")] = zeros
    return made


class Bench:
    """The thresholds and signals that detectors read, updated as the judge updates them."""

    def __init__(self) -> None:
        self.sight = Thresholds()
        self.normal = Signals(self.sight)

    def add(self, rows: Iterable[StepMetrics]) -> None:
        """Add rows to the baselines only; no detector sees them."""
        for row in rows:
            self.normal.compare(row)
            self.normal.add(row)

    def findings(
        self, detector: Detector, rows: Iterable[StepMetrics], tensors: Iterable[np.ndarray] = ()
    ) -> list[Finding]:
        """All findings of a detector on these rows."""
        findings: list[Finding] = []
        given = iter(tensors)
        for row in rows:
            now = next(given, None)
            self.normal.compare(row, now, learn=not findings)
            findings += detector.update(row, now)
            self.normal.add(row)
        return findings


def judged(judge: Judge, rows: Iterable[StepMetrics], tensors: Iterable[np.ndarray] = ()) -> list[Event]:
    """All events of these rows."""
    given = iter(tensors)
    return [event for row in rows for event in judge.update(row, next(given, None))]


def of(kind: type[Kind], events: Iterable[Event]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def actions(events: Iterable[Event]) -> list[Action]:
    """The actions decided, without refusals."""
    return [d.action for d in of(Decision, events) if d.action is not Action.REFUSE]


def trained(
    policy: Policy | None = None, *, rows: int = 150, source: Source | None = None, **more: Any
) -> tuple[Judge, Source]:
    """A judge that has seen a healthy run, and the source of its next rows."""
    source = Source(1) if source is None else source
    judge = Judge(policy or Policy(), **more)
    assert actions(judged(judge, source.rows(rows))) == []
    return judge, source
