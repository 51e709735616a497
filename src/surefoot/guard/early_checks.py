"""`attach(preflight=True)`: checks a loop on its first batches, as `surefoot.preflight` does; it never acts."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.checkpoint.train_state import TrainState
from surefoot.guard.context import GuardContext
from surefoot.guard.hooks import HasSwitch, switched_off
from surefoot.preflight_checks.findings import PreflightFinding, PreflightReport, doubtful, place_of, some_names, sure
from surefoot.preflight_checks.observe import Observation
from surefoot.preflight_checks.preflight import Settings, check_loop, merged, quick_facts, several_ranks
from surefoot.records import Cause
from surefoot.trials.kept_steps import copied

log = logging.getLogger("surefoot")
BATCHES = 4
"""Updates whose batches are looked at."""
LOSSES = 8
"""Watched losses after which the checks are made, even if fewer batches were passed with them."""
STEPS = 8
SECONDS = 10.0
REPORT_VARIABLE = "SUREFOOT_PREFLIGHT_REPORT"
"""Set by `surefoot check script.py`: where to write the report; the script ends there."""
_SAMPLE = 1 << 14


class Notes(Protocol):
    """Writes notes to the journal."""

    def note(self, name: str, detail: str = "", *, values: Any = None, attempt: int = 0) -> None: ...


def report_path() -> Path | None:
    """Where `surefoot check script.py` wants the report, in the process that it started."""
    path = os.environ.get(REPORT_VARIABLE)
    return Path(path) if path else None


class EarlyChecks:
    """Collects the first batches of a run, then checks its loop once."""

    def __init__(self, guard: HasSwitch, context: GuardContext, notes: Notes) -> None:
        self._guard, self._context, self._notes = guard, context, notes
        self._batches: list[Any] = []
        self._losses = 0
        self._findings: list[PreflightFinding] = []
        self._before_step: list[Tensor] | None = None
        self._after_step: list[Tensor] | None = None
        self._overwritten: dict[str, bool] = {}
        self._why_not = "they work on a single rank so far" if several_ranks() else ""

    def watched(self, loss: Tensor, batch: Any) -> None:
        self._losses += 1
        if self._why_not:
            return
        if self._losses == 1 and self._context.step_fn is None:
            self._findings += quick_facts(self._context.model, self._context.optimizers, Observation(loss))
        if batch is not None and len(self._batches) < BATCHES:
            self._batches.append(copied(batch))
        now = self._weights()  # compared on the host: a wait for the device, in the first updates only
        if self._after_step is not None:
            self._compare(now, self._after_step, self._before_step)
            self._after_step = None
        self._before_step = now

    def step_ended(self, attempt: int) -> bool:
        """Whether the checks are made: then nothing of this is needed any more."""
        if self._why_not:
            self._notes.note("preflight", f"not checked: {self._why_not}", attempt=attempt)
            log.info("surefoot: the checks of preflight=True were not made: %s", self._why_not)
            return True
        self._after_step = self._weights()
        if len(self._batches) < BATCHES and self._losses < LOSSES:
            return False
        report = self._check()
        values = report.as_json()
        self._notes.note("preflight", str(report), values=values, attempt=attempt)
        write = log.warning if report.findings else log.info
        write("surefoot: preflight of the first %d batches\n%s", len(self._batches), report)
        path = report_path()
        if path is not None:
            path.write_text(json.dumps(values), encoding="utf-8")
            raise SystemExit(1 if report.failed else 0)
        return True

    def _check(self) -> PreflightReport:
        start = time.monotonic()
        context, step_fn = self._context, self._context.step_fn
        findings = [*self._findings, *self._overwriting()]
        if step_fn is None or not self._batches:
            why = "pass step_fn=" if step_fn is None else "pass the batch: guard.watch(loss, batch)"
            return PreflightReport(tuple(findings), {"everything that needs a forward pass": why}, 0.0)
        optimizers = list(context.optimizers)
        state = TrainState(
            context.model, optimizers, scheduler=context.schedulers, scaler=context.scaler, extra=context.extra
        )
        clip = context.clip if isinstance(context.clip, int | float) else None
        settings = Settings(clip=clip, deadline=start + SECONDS, steps=STEPS)
        try:
            with switched_off(self._guard):
                report = check_loop(context.model, optimizers, self._batches, step_fn, settings, state)
        except Exception as error:  # of step_fn: the loop itself goes on
            return PreflightReport(tuple(findings), {"step_fn": f"{type(error).__name__}: {error}"}, 0.0)
        return merged(report, findings)

    @torch.no_grad()
    def _weights(self) -> list[Tensor]:
        return [p.detach().reshape(-1)[:_SAMPLE].clone() for p in self._context.model.parameters()]

    def _compare(self, now: list[Tensor], after: list[Tensor], before: list[Tensor] | None) -> None:
        """Whether weights changed between a step and the next loss."""
        names = [name for name, _ in self._context.model.named_parameters()]
        for k, (name, x, y) in enumerate(zip(names, now, after, strict=False)):
            if x.shape == y.shape and not torch.equal(x, y):
                undone = before is not None and torch.equal(x, before[k])
                self._overwritten[name] = self._overwritten.get(name, False) or undone

    def _overwriting(self) -> list[PreflightFinding]:
        if not self._overwritten:
            return []
        names, undone = list(self._overwritten), any(self._overwritten.values())
        make = sure if undone else doubtful
        return [
            make(
                Cause.WEIGHTS_OVERWRITTEN,
                f"{some_names(names)} change between steps" + (", back to what they were before" if undone else ""),
                f"{len(names)} parameters have other values at the next loss than after the optimizer's step",
                "Only the optimizer should change weights: look for copies and load_state_dict in the loop.",
                where=place_of(self._context.model, names[0]),
            )
        ]
