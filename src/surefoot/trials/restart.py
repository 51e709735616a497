"""Restarts: a run that was broken from its first update is begun anew from its initial state, with what works."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.checkpoint.snapshots import Snapshot
from surefoot.records import Cause
from surefoot.trials.branches import Branch, BranchId, BranchResult, gain
from surefoot.trials.kept_steps import KeptStep, NotKept, StepRecorder, TakenStep, loop_clip, scaled_lr
from surefoot.trials.pairs import depends_on_pairs, ignores_pairs
from surefoot.trials.rank_agreement import TrialFailed
from surefoot.trials.sandbox import Sandbox, UpdateFailed

MIN_STEPS = 8
"""Kept steps without which a restart cannot be judged."""
HELD_OUT = 8
"""Steps whose batches no branch trains on, at most: branches are judged by their losses."""
HELD_OUT_SHARE = 4
"""At most every so many steps are held out."""
SAME_SETTINGS_SHARE = 0.5
"""Share of what the best restart has learnt from which on one with the same settings has learnt about as much."""
LEARNT_RATIO = 1.5
"""A branch must have learnt this many times as much as the run as it is: smaller updates alone lower most losses."""
TIMED_STEPS = 2
"""Steps that are taken to see how long one takes."""


def _lower_lr(id: BranchId, factor: float) -> Branch:
    return Branch(id, f"with {factor:g} times the learning rate", factor, cause=Cause.LEARNING_RATE)


BRANCHES = (
    Branch(BranchId.RESTART, "as they were"),
    _lower_lr(BranchId.RESTART_LR_03, 0.3),
    _lower_lr(BranchId.RESTART_LR_01, 0.1),
    _lower_lr(BranchId.RESTART_LR_003, 0.03),
    _lower_lr(BranchId.RESTART_LR_001, 0.01),
    _lower_lr(BranchId.RESTART_LR_0003, 0.003),
    Branch(
        BranchId.RESTART_CLIP,
        "with gradients clipped at the norm they had at first",
        clip=True,
        cause=Cause.EXPLODING_GRADIENT,
    ),
)
"""From the least change on."""
ALIKE = 0.03
"""Probe losses that differ by less than this fraction are alike."""


@dataclass(slots=True)
class RestartTrial:
    """One trial of restarts: what was tried, and what helped."""

    snapshot: Snapshot
    steps: list[KeptStep]
    probes: list[KeptStep]
    max_norm: float
    """Where the clipped branch clips."""
    reference: list[float] = field(default_factory=list)
    """Losses of the probes in the initial state."""
    loss_factor: float = 1.0
    stride: int = 1
    """Every so many steps are taken, to end in time."""
    results: dict[BranchId, BranchResult] = field(default_factory=dict)
    best: Branch | None = None
    settings_right: bool = False
    """With the same settings a restart learns about as much as with others."""
    learnt_nothing: bool = False
    """The run as it is is no better than its initial state."""
    ignores_inputs: bool = False
    """The run as it is gives the same loss whichever inputs the targets are paired with."""
    learnt_inputs: set[BranchId] = field(default_factory=set)
    """Of the branches of such a run: those whose loss depends on it."""
    complete: bool = False
    """All branches were tried."""
    seconds: float = 0.0

    @property
    def max_lr(self) -> float:
        """The highest learning rate of the steps, of the first group; 0 where it has none."""
        return max((float(step.options[0][0].get("lr", 0.0)) for step in self.steps), default=0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot.attempt,
            "onset": 0,
            "replayed": len(self.steps),
            "stride": self.stride,
            "probes": len(self.probes),
            "reference": statistics.fmean(self.reference) if self.reference else math.nan,
            "branches": [result.as_json() for result in self.results.values()],
            "best": BranchId.NOTHING.value if self.best is None else self.best.id.value,
            "causes": [] if self.best is None else [self.best.cause.value],
            "seconds": round(self.seconds, 3),
        }

    def describe(self) -> str:
        """What was found, in words."""
        nothing = self.results[BranchId.NOTHING].probe_loss
        if self.settings_right:
            return f"with its settings the first {len(self.steps)} updates teach as much as with others: they are right"
        if self.best is None:
            return f"no restart ends better than the run as it is (loss {nothing:.4g} on the probe batches)"
        ended = self.results[self.best.id].probe_loss
        return (
            f"the loss on {len(self.probes)} probe batches is {nothing:.4g} as the run is, and {ended:.4g} restarted "
            f"from its initial state, with its first {len(self.steps)} updates trained again {self.best.text}"
        )


class RestartRunner:
    """Tries restarts over the kept steps of one run."""

    def __init__(self, sandbox: Sandbox, recorder: StepRecorder) -> None:
        self._sandbox, self._recorder, self._agreement = sandbox, recorder, sandbox.agreement

    def run(self, initial: Snapshot, *, deadline: float, stride: int | None = None) -> RestartTrial:
        """Find out with which settings a run would have learnt; raises `TrialFailed`.

        With a `stride`, every so many steps are taken, however long that takes.
        """
        began = time.perf_counter()
        sandbox = self._sandbox
        with sandbox.opened() as now:
            trial = self._prepare(initial)
            sandbox.restore(initial.copy)
            self._measure_reference(trial)
            sandbox.restore(now)
            trial.results[BranchId.NOTHING] = BranchResult(BranchId.NOTHING, tuple(sandbox.losses(trial.probes)))
            trial.ignores_inputs = ignores_pairs(sandbox, trial.probes)
            sandbox.restore(initial.copy)
            trial.loss_factor = sandbox.loss_factor(trial.steps[0]) if trial.steps[0].attempt == 0 else 1.0
            trial.stride = stride or self._stride(trial, deadline - (time.perf_counter() - began))
            for branch in BRANCHES:
                if self._agreement.any(time.perf_counter() - began > deadline):
                    break
                trial.results[branch.id] = self._run_branch(branch, trial)
            else:
                trial.complete = True
        choose(trial)
        trial.seconds = time.perf_counter() - began
        return trial

    def _prepare(self, initial: Snapshot) -> RestartTrial:
        steps = self._agreement.common(self._recorder.usable_steps())
        if len(steps) < MIN_STEPS:
            raise NotKept(f"only {len(steps)} batches are kept, too few to try a restart")
        every = max(HELD_OUT_SHARE, len(steps) // HELD_OUT)
        probes = steps[every - 1 :: every]
        held_out = {s.attempt for s in probes}
        norms = [s.row.norm for s in steps if s.row is not None and 0 < s.row.norm < math.inf]
        max_norm = statistics.median(norms[:MIN_STEPS]) if norms else math.inf
        return RestartTrial(initial, [s for s in steps if s.attempt not in held_out], probes, max_norm)

    def _measure_reference(self, trial: RestartTrial) -> None:
        """The losses of the probes in the initial state; a batch whose loss is not finite even there is no probe."""
        losses = dict(zip([s.attempt for s in trial.probes], self._sandbox.losses(trial.probes), strict=True))
        trial.probes = [s for s in trial.probes if math.isfinite(losses[s.attempt])]
        if not trial.probes:
            raise NotKept("in the initial state, too, the loss is not finite on the kept batches")
        trial.reference = [losses[s.attempt] for s in trial.probes]

    def _stride(self, trial: RestartTrial, seconds: float) -> int:
        """How many steps to go on by, so that all branches end in time."""
        began = time.perf_counter()
        for step in trial.steps[:TIMED_STEPS]:
            self._sandbox.train_step(step, options=scaled_lr(step.options, 0.0))
        per_step = (time.perf_counter() - began) / TIMED_STEPS
        longest = max(1.0, seconds / (len(BRANCHES) * max(per_step, 1e-9)))
        return self._agreement.from_first(max(1, math.ceil(len(trial.steps) / longest)))

    def _run_branch(self, branch: Branch, trial: RestartTrial) -> BranchResult:
        began = time.perf_counter()
        self._sandbox.restore(trial.snapshot.copy)
        taken = self._take_steps(branch, trial, trial.steps[:: trial.stride])
        probe_losses = tuple(self._sandbox.losses(trial.probes))
        if trial.ignores_inputs and depends_on_pairs(self._sandbox, trial.probes):
            trial.learnt_inputs.add(branch.id)
        losses, norms = {k: s.loss for k, s in taken.items()}, {k: s.norm for k, s in taken.items()}
        return BranchResult(branch.id, probe_losses, losses, norms, time.perf_counter() - began)

    def _take_steps(
        self, branch: Branch, trial: RestartTrial, steps: Sequence[KeptStep], *, partly: bool = False
    ) -> dict[int, TakenStep]:
        """Train these steps as the branch does; with `partly`, up to the first that fails."""
        taken: dict[int, TakenStep] = {}
        for step in steps:
            options = scaled_lr(step.options, branch.lr_factor)
            max_norm = min(loop_clip(step), trial.max_norm if branch.clip else math.inf)
            try:
                loss, norm = self._sandbox.train_step(
                    step, options=options, loss_factor=trial.loss_factor, max_norm=max_norm
                )
            except TrialFailed as error:
                if not partly or isinstance(error, UpdateFailed):
                    raise
                break
            taken[step.attempt] = TakenStep(loss, norm, options, max_norm)
        return taken

    def retake(self, trial: RestartTrial, rewind: Callable[[], None]) -> int:
        """Begin the run anew, after `rewind`, and take its kept steps as the best branch does; returns how many updates
        that were."""
        branch = trial.best
        assert branch is not None
        taken = self._sandbox.retake(rewind, lambda: self._take_steps(branch, trial, trial.steps, partly=True))
        self._recorder.replaced(taken, since=0)
        return len(taken)


def settings_text(branch: Branch) -> str:
    """What is different after a restart, in words."""
    if branch.clip:
        return "gradients are clipped from here on at the norm they had at first"
    if branch.lr_factor == 1.0:
        return "the settings stay as they are"
    return f"the learning rate is multiplied by {branch.lr_factor:g} from here on"


def choose(trial: RestartTrial) -> None:
    """Pick the branch to continue from, if one ends better than the run as it is.

    Of branches that end alike it is the one with the least change; of learning rates the next lower one, or the one
    that ends lowest if it is lower still: what went well for these few steps may still be too high for the next ones.
    Where a restart with the same settings teaches about as much as any other, the settings are right, and what went
    wrong later is left to a trial from a newer state. Of a run that has learnt nothing about its inputs there is
    nothing to lose, unless a restart with the same settings learns: then it has only begun late.
    """
    results, reference = trial.results, trial.reference
    nothing = results[BranchId.NOTHING].probe_losses
    trial.learnt_nothing = not _is_better(nothing, reference)
    learnt = 0.0 if trial.learnt_nothing else _gained(nothing, reference)
    taught = set[BranchId]() if BranchId.RESTART in trial.learnt_inputs else trial.learnt_inputs
    helpful: list[tuple[Branch, Sequence[float]]] = []
    for branch in BRANCHES:
        losses = results[branch.id].probe_losses if branch.id in results else nothing
        more = branch.id in taught or _gained(losses, reference) >= LEARNT_RATIO * learnt
        if _is_better(losses, nothing) and not _is_better(reference, losses) and more:
            helpful.append((branch, losses))
    if not helpful:
        return
    best, lowest = min(helpful, key=lambda pair: statistics.fmean(pair[1]))
    first, losses = helpful[0]
    if first.id is BranchId.RESTART and _gained(losses, reference) >= SAME_SETTINGS_SHARE * _gained(lowest, reference):
        trial.settings_right = True
        return
    limit = (1 + ALIKE) * statistics.fmean(lowest)
    alike = [b for b, losses in helpful if statistics.fmean(losses) <= limit or not _is_better(lowest, losses)]
    if alike[0].lr_factor == 1.0:
        trial.best = alike[0]
    else:
        lower_lrs = [b for b in alike if b.lr_factor < 1.0]
        trial.best = min(lower_lrs[:2][-1], best, key=lambda b: b.lr_factor)


def _gained(losses: Sequence[float], reference: Sequence[float]) -> float:
    """How much has been learnt since the initial state."""
    return statistics.fmean(reference) - statistics.fmean(losses)


def _is_better(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the first are lower beyond the noise: by their logarithms, because losses that explode scatter by
    orders of magnitude."""
    finite = [value for value in (*losses, *others) if math.isfinite(value)]
    if finite and min(finite) > 0:
        losses, others = [math.log(v) for v in losses], [math.log(v) for v in others]
    return gain(losses, others) > 1.0
