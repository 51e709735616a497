"""Runs the suite: each loop through `surefoot.preflight` and some steps of `surefoot.attach`, and prints the table."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import surefoot
from benchmarks.silent_bugs import report_bugs, tuning_bugs, twins
from benchmarks.silent_bugs.loops import CASES, Case, Half, Loop
from surefoot.preflight_checks.findings import PreflightReport
from surefoot.records import Diagnosis, Event

REGISTERED = (tuning_bugs, report_bugs, twins)
ATTACHED_STEPS = 60
SEED = 1


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What was said about one loop."""

    case: Case
    sure: tuple[str, ...]
    doubtful: tuple[str, ...]
    attached: tuple[str, ...]
    """Causes named by `attach` within its first steps, where preflight had named none that is right."""
    seconds: float
    error: str = ""

    @property
    def causes(self) -> list[str]:
        return [*self.sure, *self.doubtful, *self.attached]

    @property
    def named(self) -> bool:
        return any(str(cause) in self.causes for cause in self.case.causes)

    @property
    def how(self) -> str:
        right = {str(cause) for cause in self.case.causes}
        for label, causes in (("sure", self.sure), ("doubtful", self.doubtful), ("attached", self.attached)):
            if right & set(causes):
                return label
        return "-"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.case.name,
            "half": str(self.case.half),
            "family": self.case.family,
            "healthy": self.case.healthy,
            "accepted": sorted(map(str, self.case.causes)),
            "named": self.named,
            "sure": list(self.sure),
            "doubtful": list(self.doubtful),
            "attached": list(self.attached),
            "seconds": round(self.seconds, 2),
            "source": self.case.source,
            "error": self.error,
        }


def selected(half: Half | None, only: str = "") -> list[Case]:
    return [c for c in CASES.values() if (half is None or c.half is half) and only in f"{c.name} {c.family}"]


def run_case(case: Case, *, say: Callable[[str], None] = lambda line: None) -> CaseResult:
    """One loop: preflight, then some steps of attach where preflight did not name the bug."""
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = preflight_of(built(case))
        for finding in report.findings:
            say("\n".join(finding.lines()))
        for name, why in report.not_checked.items():
            say(f"    not checked: {name}: {why}")
        sure = tuple(dict.fromkeys(str(f.cause) for f in report.sure))
        doubtful = tuple(dict.fromkeys(str(f.cause) for f in report.doubtful))
        result = CaseResult(case, sure, doubtful, (), time.monotonic() - start)
        if case.healthy or result.named:
            return result
        attached = attached_causes(built(case))
    return CaseResult(case, sure, doubtful, attached, time.monotonic() - start)


def built(case: Case) -> Loop:
    torch.manual_seed(SEED)
    return case.build()


def preflight_of(loop: Loop) -> PreflightReport:
    return surefoot.preflight(
        loop.model,
        loop.optimizer,
        loop.batches,
        loop.step_fn,
        scheduler=loop.scheduler,
        total_steps=loop.total_steps,
        clip=loop.clip,
        eval_batches=loop.eval_batches,
    )


def attached_causes(loop: Loop) -> tuple[str, ...]:
    """Causes diagnosed within the first steps; nothing is changed."""
    causes: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, Diagnosis):
            causes.append(str(event.cause))

    with tempfile.TemporaryDirectory() as folder:
        guard = surefoot.attach(loop.model, loop.optimizer, run_dir=folder, policy="observe")
        guard.on_event(listener)
        for i in range(ATTACHED_STEPS):
            batch = loop.batches[i % len(loop.batches)]
            loss = guard.watch(loop.step_fn(loop.model, batch), batch)
            (loop.update or plain_update)(loop, loss)
        guard.close()
    return tuple(dict.fromkeys(causes))


def plain_update(loop: Loop, loss: Tensor) -> None:
    loop.optimizer.zero_grad()
    if loss.requires_grad:
        loss.backward()
    loop.optimizer.step()


def main(
    half: Half | None,
    *,
    only: str = "",
    details: bool = False,
    as_json: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, bool]:
    """The table, and whether the goals are met."""
    results: list[CaseResult] = []
    for case in selected(half, only):
        try:
            result = run_case(case, say=say if details else lambda line: None)
        except Exception as error:
            result = CaseResult(case, (), (), (), 0.0, f"{type(error).__name__}: {error}")
        results.append(result)
        say(_line(result))
    text = json.dumps([r.as_json() for r in results], indent=1) if as_json else table(results)
    return text, not any(r.case.healthy and r.sure for r in results) and not any(r.error for r in results)


def _line(r: CaseResult) -> str:
    if r.case.healthy:
        verdict = "FAILED" if r.sure else "doubted" if r.doubtful else "ok"
    else:
        verdict = f"named ({r.how})" if r.named else "missed"
    said = ", ".join([*r.sure, *(f"{c}?" for c in r.doubtful), *(f"{c} (attach)" for c in r.attached)]) or "nothing"
    return (
        f"{r.case.half:7} {r.case.name:32} {verdict:18} {r.seconds:5.1f} s  {said}{'  ' + r.error if r.error else ''}"
    )


def table(results: Sequence[CaseResult]) -> str:
    lines = [
        "| half | bugs | named rightly | of them sure | healthy loops | failed | doubted | seconds per loop |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for half in Half:
        part = [r for r in results if r.case.half is half]
        bugs, healthy = [r for r in part if not r.case.healthy], [r for r in part if r.case.healthy]
        if not part:
            continue
        named = [r for r in bugs if r.named]
        share = f" ({100 * len(named) / len(bugs):.0f} %)" if bugs else ""
        failed, doubted = sum(bool(r.sure) for r in healthy), sum(bool(r.doubtful) and not r.sure for r in healthy)
        seconds = sum(r.seconds for r in part) / len(part)
        lines.append(
            f"| {half} | {len(bugs)} | {len(named)}{share} | {sum(r.how == 'sure' for r in named)} | {len(healthy)} "
            f"| {failed} | {doubted} | {seconds:.1f} |"
        )
    missed = [r.case.name for r in results if not r.case.healthy and not r.named]
    touched = [f"{r.case.name} ({', '.join(r.causes)})" for r in results if r.case.healthy and r.causes]
    lines.append("")
    lines.append(f"Missed: {', '.join(missed) or 'none'}. Healthy and doubted: {', '.join(touched) or 'none'}.")
    return "\n".join(lines)
