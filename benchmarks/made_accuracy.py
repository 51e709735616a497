"""`surefoot bench logs --made`: `surefoot diagnose` on made-up long curves, whole and at every prefix of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.made_curves import MadeCurve, make_curves
from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth
from surefoot.records import Pattern

AFTER_ONSET = (20, 30, 50, 80, 100, 150, 300, 1000, 3000, 10_000)
"""Rows after the onset at which a prefix is judged, as `--follow` would."""
SHARES = tuple(np.linspace(0.05, 1.0, 13).tolist())
"""Shares of the whole curve at which a prefix is judged."""
MIN_ROWS = 40
SUDDEN_ROWS = 5
"""An onset this near to the true row is right."""


@dataclass(frozen=True, slots=True)
class CurveScore:
    """The diagnosis of one curve, compared with the truth."""

    curve: MadeCurve
    whole: LogDiagnosis
    missed: tuple[int, ...]
    """Prefixes called healthy while the run was above its best."""
    failed: tuple[int, ...]
    """Prefixes of a healthy run called failed."""
    prefixes: int
    harmed: int
    findings: int
    """Times that a healthy run, read as it grows, is called anything but healthy anew."""

    @property
    def right(self) -> bool:
        return self.whole.verdict in self.curve.verdicts

    @property
    def onset_error(self) -> int | None:
        """For jumps that were found: by how many rows the onset is off."""
        curve, whole = self.curve, self.whole
        if not curve.sudden or not whole.is_trouble or whole.onset_step is None or curve.onset is None:
            return None
        return abs(whole.onset_step - curve.onset)


def main(*, held_back: bool, say: Callable[[str], None]) -> str:
    """The figures of one half, as text."""
    scores: list[CurveScore] = []
    for curve in make_curves(held_back=held_back):
        scores.append(score(curve))
        if len(scores) % 20 == 0:
            say(f"{len(scores)} curves judged")
    lines = summary("held back" if held_back else "tuning", scores)
    for curve_score in scores:
        lines += _mistakes(curve_score)
    return "\n".join(lines)


def score(curve: MadeCurve) -> CurveScore:
    """Judge a curve whole and at every prefix of the grid."""
    missed: list[int] = []
    failed: list[int] = []
    harmed = findings = 0
    before = RunHealth.UNKNOWN
    grid = prefix_grid(curve)
    diagnosis: LogDiagnosis | None = None
    for rows in grid:
        diagnosis = diagnose(curve.curves(rows))
        if curve.harmed_at(rows):
            harmed += 1
            if diagnosis.verdict in (RunHealth.HEALTHY, RunHealth.UNKNOWN):
                missed.append(rows)
        if curve.healthy:
            findings += diagnosis.is_trouble and before is not diagnosis.verdict
            if diagnosis.verdict is RunHealth.FAILED:
                failed.append(rows)
        before = diagnosis.verdict
    assert diagnosis is not None
    return CurveScore(curve, diagnosis, tuple(missed), tuple(failed), len(grid), harmed, findings)


def prefix_grid(curve: MadeCurve) -> list[int]:
    """Lengths at which a log that grows is judged."""
    whole = len(curve)
    grid = {int(share * whole) for share in SHARES}
    for row in (curve.onset, *curve.events):
        if row is not None:
            grid |= {row + after for after in AFTER_ONSET}
    return sorted(rows for rows in grid if MIN_ROWS <= rows <= whole)


def summary(name: str, scores: Iterable[CurveScore]) -> list[str]:
    """The figures of some scores."""
    scores = list(scores)
    right = sum(score.right for score in scores)
    harmed = sum(score.harmed for score in scores)
    missed = sum(len(score.missed) for score in scores)
    errors = sorted(error for score in scores if (error := score.onset_error) is not None)
    near = sum(error <= SUDDEN_ROWS for error in errors)
    healthy = [score for score in scores if score.curve.healthy]
    rows = sum(len(score.curve) for score in healthy)
    findings = sum(score.findings for score in healthy)
    failed, prefixes = sum(len(score.failed) for score in healthy), sum(score.prefixes for score in healthy)
    count, total = len(scores), sum(len(score.curve) for score in scores)
    return [
        f"{name}: {count} curves, {total:,} rows; verdict right in {right} ({right / max(count, 1):.0%})",
        f"  {missed} of {harmed} prefixes of a harmed run called healthy",
        f"  {near} of {len(errors)} jumps dated within {SUDDEN_ROWS} rows; worst {errors[-1] if errors else 0:,}",
        f"  {failed} of {prefixes} prefixes of healthy runs called failed",
        f"  {findings} findings in {rows:,} healthy rows ({findings / max(rows, 1) * 1e6:.1f} a million)",
    ]


def _mistakes(score: CurveScore) -> list[str]:
    verdict = (
        f"{score.whole.verdict} / {score.whole.pattern}, onset {score.whole.onset_step}, truly {score.curve.onset}"
    )
    words: list[str] = []
    if not score.right:
        words.append("wrong verdict")
    if score.missed:
        words.append(f"healthy at rows {', '.join(map(str, score.missed[:6]))} ({len(score.missed)} of {score.harmed})")
    if score.failed:
        words.append(f"failed at rows {', '.join(map(str, score.failed[:6]))}")
    if (score.onset_error or 0) > SUDDEN_ROWS:
        words.append(f"onset off by {score.onset_error:,}")
    if score.curve.healthy and score.findings and score.whole.pattern is not Pattern.NONE:
        words.append(f"{score.findings} findings")
    return [f"  {score.curve.name}: {'; '.join(words)} ({verdict})"] if words else []
