"""Replays an incident bundle: the steps that led to it and the branches of its trial, from the state that was kept."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.copies import StateCopy
from surefoot.checkpoint.format.load_checkpoint import load_checkpoint
from surefoot.checkpoint.format.param_names import name_tensors
from surefoot.checkpoint.format.rank_files import CheckpointMismatch
from surefoot.checkpoint.snapshots import Snapshot
from surefoot.checkpoint.train_state import TrainState
from surefoot.incidents.kept_data import KeptData, read_steps
from surefoot.journal.incident_folders import (
    BATCHES_DIR,
    BEFORE_DIR,
    NOW_DIR,
    IncidentBundle,
    InvalidIncident,
    read_incident,
)
from surefoot.origin.locate import locate_in_step
from surefoot.origin_record import Origin
from surefoot.trials.branches import BranchId, BranchResult
from surefoot.trials.kept_steps import KeptStep, StepRecorder, loop_clip
from surefoot.trials.rank_agreement import TrialFailed
from surefoot.trials.restart import RestartRunner
from surefoot.trials.runner import TrialRunner
from surefoot.trials.sandbox import Sandbox, StepFn


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One update, as the run recorded it and as it was when it was taken again."""

    attempt: int
    loss: float
    norm: float
    recorded_loss: float = math.nan
    recorded_norm: float = math.nan
    has_record: bool = True
    """Its numbers had arrived when the incident was captured."""


@dataclass(frozen=True, slots=True)
class ReplayedBranch:
    """One branch of a trial: the loss on the probe batches, as recorded and as replayed."""

    branch: str
    probe_loss: float
    recorded_probe_loss: float = math.nan


@dataclass(frozen=True, slots=True)
class IncidentReplay:
    """What came of replaying an incident."""

    incident: IncidentBundle
    steps: Sequence[ReplayedStep] = ()
    branches: Sequence[ReplayedBranch] = ()
    conclusion: str = ""
    """What the replayed trial finds, in words; empty where there was no trial."""
    best: str = ""
    """The branch that the replayed trial would continue from."""
    origin: Origin | None = None
    """What makes the refused update non-finite; None where none was refused for that."""

    @property
    def bit_equal(self) -> bool:
        """Whether every branch has exactly the loss that was recorded; without branches, every step."""
        return all(_equal(*pair) for pair in self._pairs())

    @property
    def largest_difference(self) -> float:
        """The largest difference between a loss and the recorded one, as a fraction of that."""
        return max((_difference(*pair) for pair in self._pairs()), default=0.0)

    def _pairs(self) -> Iterator[tuple[float, float]]:
        if self.branches:
            yield from ((b.probe_loss, b.recorded_probe_loss) for b in self.branches)
        else:
            yield from ((s.loss, s.recorded_loss) for s in self.steps if s.has_record)

    def as_json(self) -> dict[str, Any]:
        return {
            "incident": str(self.incident.path),
            "kind": self.incident.kind,
            "step": self.incident.step,
            "reason": self.incident.info.get("reason", ""),
            "bit_equal": self.bit_equal,
            "largest_difference": self.largest_difference,
            "conclusion": self.conclusion,
            "best": self.best,
            "origin": None if self.origin is None else self.origin.as_json(),
            "recorded_best": (self.incident.info.get("trial") or {}).get("best", ""),
            "branches": [
                {
                    "branch": branch.branch,
                    "probe_loss": branch.probe_loss,
                    "recorded_probe_loss": branch.recorded_probe_loss,
                }
                for branch in self.branches
            ],
            "steps": [
                {
                    "attempt": step.attempt,
                    "loss": step.loss,
                    "recorded_loss": step.recorded_loss,
                    "norm": step.norm,
                    "recorded_norm": step.recorded_norm,
                }
                for step in self.steps
            ],
        }


def replay(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    step_fn: StepFn,
) -> IncidentReplay:
    """Replay an incident bundle with a model and an optimizer built as in the run, and its `step_fn`.

    Afterwards the model and the optimizer are as they were. Raises InvalidIncident.
    """
    incident = read_incident(Path(path))
    if incident.data_missing:
        raise InvalidIncident(f"{incident.path} cannot be replayed: {incident.data_missing}")
    state = TrainState(model, optimizer)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    data = read_steps(incident.path / BATCHES_DIR, device)
    held = state.capture()
    try:
        moment = _LoadedMoment(incident, state, data, model, step_fn)
        sandbox = Sandbox(model, state.optimizers, step_fn, state, loss_scale=_constant_scale(incident.info))
        return moment.replay(sandbox)
    except TrialFailed as error:
        raise InvalidIncident(f"{incident.path} cannot be replayed: {error}") from error
    finally:
        state.restore(held)


class _LoadedMoment:
    """A bundle whose states were loaded; the model is in the state in which the incident was noticed."""

    def __init__(
        self, incident: IncidentBundle, state: TrainState, data: KeptData, model: nn.Module, step_fn: StepFn
    ) -> None:
        self._incident, self._state, self._data = incident, state, data
        self._model, self._step_fn = model, step_fn
        info = incident.info
        self._before = Snapshot(int(info["snapshot"]), int(info["step"]), self._load(BEFORE_DIR), good=True)
        if (incident.path / NOW_DIR).is_dir():
            self._load(NOW_DIR)

    def replay(self, sandbox: Sandbox) -> IncidentReplay:
        info = self._incident.info
        trial: Mapping[str, Any] | None = info.get("trial")
        recorder = StepRecorder(self._state.optimizers, max_steps=len(self._data.steps) + 1)
        recorder.load(self._data.steps, self._data.probes)
        if trial is None:
            steps, origin = self._replay_steps(sandbox)
            return IncidentReplay(self._incident, steps, origin=origin)
        recorded = {str(b["branch"]): float(b["probe_loss"]) for b in trial["branches"]}
        if "deviation" not in trial:
            restart = RestartRunner(sandbox, recorder).run(
                self._before, deadline=math.inf, stride=int(trial.get("stride", 1))
            )
            best = BranchId.NOTHING if restart.best is None else restart.best.id
            branches = _compared(restart.results, recorded)
            return IncidentReplay(self._incident, (), branches, restart.describe(), best.value)
        float32 = BranchId.FLOAT32.value in recorded
        result = TrialRunner(sandbox, recorder).run(
            [self._before], int(trial["onset"]), deadline=math.inf, try_float32=float32
        )
        steps = _compared_steps(self._data.steps, result.results[BranchId.REPLAY])
        branches = _compared(result.results, recorded)
        return IncidentReplay(self._incident, steps, branches, result.conclusion.detail, result.conclusion.best.value)

    def _replay_steps(self, sandbox: Sandbox) -> tuple[list[ReplayedStep], Origin | None]:
        """Take the kept steps again, as the run took them, and locate what makes the last one non-finite."""
        steps = [s for s in self._data.steps if s.batches and s.attempt > self._before.attempt]
        replayed: list[ReplayedStep] = []
        origin: Origin | None = None
        with sandbox.opened():
            sandbox.restore(self._before.copy)
            factor = sandbox.loss_factor(steps[0]) if steps else 1.0
            sandbox.restore(self._before.copy)
            for step in steps:
                if step is steps[-1] and not step.applied:
                    origin = self._locate(step)
                loss, norm = sandbox.train_step(
                    step, options=step.options, loss_factor=factor, max_norm=loop_clip(step), apply=step.applied
                )
                replayed.append(_with_recorded(step, loss, norm))
        return replayed, origin

    def _locate(self, step: KeptStep) -> Origin | None:
        scale = self._incident.info.get("loss_scale")
        origin = locate_in_step(
            self._model,
            step.batches,
            self._step_fn,
            rng_states=step.rng_states,
            loss_factor=1.0 if scale is None else float(scale),
        )
        return origin or None

    def _load(self, name: str) -> StateCopy:
        names = name_tensors([("model", self._state.roots[0])], self._state.optimizers)
        try:
            load_checkpoint(self._incident.path / name, self._state, names)
        except CheckpointMismatch as error:
            raise InvalidIncident(f"{error}. Build model and optimizer as in the run") from None
        return self._state.capture()


def _constant_scale(info: Mapping[str, Any]) -> Callable[[], Tensor | None]:
    scale = info.get("loss_scale")
    return lambda: None if scale is None else torch.tensor(float(scale))


def _compared(results: Mapping[BranchId, BranchResult], recorded: Mapping[str, float]) -> list[ReplayedBranch]:
    """The branches that were recorded, too; the run may not have had the time for all of them."""
    return [
        ReplayedBranch(branch.value, result.probe_loss, recorded[branch.value])
        for branch, result in results.items()
        if branch.value in recorded
    ]


def _compared_steps(steps: Sequence[KeptStep], branch: BranchResult) -> list[ReplayedStep]:
    return [
        _with_recorded(s, branch.losses[s.attempt], branch.norms[s.attempt])
        for s in steps
        if s.attempt in branch.losses
    ]


def _with_recorded(step: KeptStep, loss: float, norm: float) -> ReplayedStep:
    if step.row is None:
        return ReplayedStep(step.attempt, loss, norm, has_record=False)
    return ReplayedStep(step.attempt, loss, norm, step.row.loss, step.row.norm)


def _equal(value: float, recorded: float) -> bool:
    return value == recorded or (math.isnan(value) and math.isnan(recorded))


def _difference(value: float, recorded: float) -> float:
    if _equal(value, recorded):
        return 0.0
    return abs(value - recorded) / abs(recorded) if recorded and math.isfinite(value - recorded) else math.inf
