"""Runs a trial: branch after branch from a snapshot, the cheapest telling one first, until it is clear what helps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.checkpoint.copies import StateCopy
from surefoot.checkpoint.snapshots import Snapshot
from surefoot.records import Cause, StepMetrics, StepOverrides
from surefoot.trials.branches import (
    BRANCHES,
    CLIP,
    FLOAT32,
    LAST_BRANCHES,
    OLD_BATCHES,
    OLD_SETTINGS,
    OPTIMIZER_NOW,
    REPLAY,
    SKIP,
    Branch,
    BranchId,
    BranchResult,
    in_order,
    is_better,
)
from surefoot.trials.conclusion import (
    NOTHING_FOUND,
    SAME,
    Conclusion,
    Deviation,
    Difference,
    batches_alone_harm,
    conclude,
    first_difference,
)
from surefoot.trials.kept_steps import (
    MIN_PROBES,
    KeptStep,
    NotKept,
    Options,
    StepRecorder,
    TakenStep,
    ceiling_between,
    loop_clip,
    scaled_lr,
)
from surefoot.trials.pairs import depends_on_pairs
from surefoot.trials.rank_agreement import TrialFailed
from surefoot.trials.sandbox import Sandbox, UpdateFailed

HELD_OUT = 6
"""How many of them."""
STANDS_OUT_SIGMAS = 4.0
"""Sigmas of the loss above normal from which a batch is suspected."""
STANDS_OUT_NORM = 2.0
"""The same for the gradient norm, as a multiple of the largest one before."""
SETTING_CHANGE = 1.05
"""A learning rate, or a momentum's memory, that has risen by this factor may be a cause."""
UNREAD_STEPS = 2
"""Steps whose numbers have not arrived yet."""
UNSEEN_BATCHES = 3
"""Refused batches that are not trained on when it is tried whether the others teach anything about them."""


@dataclass(slots=True)
class Trial:
    """One trial: what was tried, and what was found."""

    snapshot: Snapshot
    onset: int
    steps: list[KeptStep]
    probes: list[KeptStep]
    suspects: frozenset[int] = frozenset()
    """Attempts whose batches stand out."""
    changed: frozenset[Cause] = frozenset()
    """Causes among the settings that have changed since the snapshot."""
    options_before: list[Options] = field(default_factory=list)
    """Options of the optimizers before the onset."""
    loss_factor: float = 1.0
    """What the loop multiplies step_fn's loss by."""
    reference: tuple[float, ...] = ()
    """Losses of the probes at the snapshot."""
    results: dict[BranchId, BranchResult] = field(default_factory=dict)
    difference: Difference = SAME
    conclusion: Conclusion = NOTHING_FOUND
    loss_ceiling: float = math.inf
    """A loss that no healthy batch had and most suspects have; infinite where there is none."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot.attempt,
            "onset": self.onset,
            "replayed": len(self.steps),
            "probes": len(self.probes),
            "reference": statistics.fmean(self.reference) if self.reference else math.nan,
            "branches": [result.as_json() for result in self.results.values()],
            "deviation": self.difference.kind.value,
            "deviation_attempt": self.difference.attempt,
            "suspects": sorted(self.suspects),
            "best": self.conclusion.best.value,
            "causes": sorted(cause.value for cause in self.conclusion.causes),
            "seconds": round(self.seconds, 3),
        }


class TrialRunner:
    """Runs trials over the kept steps of one run."""

    def __init__(self, sandbox: Sandbox, recorder: StepRecorder) -> None:
        self._sandbox, self._recorder, self._agreement = sandbox, recorder, sandbox.agreement

    def run(
        self,
        snapshots: Sequence[Snapshot],
        onset: int,
        *,
        deadline: float,
        try_float32: bool,
        first: BranchId | None = None,
    ) -> Trial:
        """Find out what helps a run that went wrong at attempt `onset`, from one of these snapshots (oldest first);
        raises `TrialFailed`. The branch `first` is tried before the others; on several ranks that of rank 0."""
        began = time.perf_counter()
        sandbox = self._sandbox
        with sandbox.opened() as now:
            trial = self._prepare(*self._newest_sound(snapshots, onset))
            results = trial.results
            sandbox.restore(now)
            results[BranchId.NOTHING] = BranchResult(BranchId.NOTHING, tuple(sandbox.losses(trial.probes)))
            sandbox.restore(trial.snapshot.copy)
            trial.reference = tuple(sandbox.losses(trial.probes))
            trial.loss_factor = self._loss_factor(trial)
            results[BranchId.REPLAY] = self._run_branch(REPLAY, trial)
            rows = {s.attempt: s.row for s in trial.steps if s.row is not None}
            trial.difference = first_difference(rows, results[BranchId.REPLAY])
            first = self._agreement.from_first(first)
            for branch in in_order(self._telling_branches(trial, try_float32=try_float32), first):
                if self._agreement.any(time.perf_counter() - began + results[BranchId.REPLAY].seconds > deadline):
                    break
                if branch in LAST_BRANCHES and branch.id is not first and _is_cured(trial):
                    break
                if branch is OPTIMIZER_NOW:
                    self._run_optimizer_now(trial, now)
                elif branch is OLD_BATCHES:
                    self._run_old_batches(trial)
                else:
                    results[branch.id] = self._run_branch(branch, trial)
        trial.loss_ceiling = self._agreement.from_first(ceiling_between([*self._recorder], trial.onset, trial.suspects))
        trial.conclusion = self._agreement.from_first(
            conclude(
                results,
                trial.reference,
                trial.difference,
                trial.changed,
                clipped=any(map(_clips, trial.probes)),
                update_excess=update_excess([*self._recorder], trial.difference.attempt),
            )
        )
        trial.seconds = time.perf_counter() - began
        return trial

    def _newest_sound(self, snapshots: Sequence[Snapshot], onset: int) -> tuple[Snapshot, int]:
        """The newest snapshot that no older one is better than by the probes, and the onset: the trouble may have
        begun before it was seen."""
        sound, probes = snapshots[0], self._agreement.common(self._recorder.probes(onset))
        best: list[float] = []
        for snapshot in snapshots if len(probes) >= MIN_PROBES else ():
            self._sandbox.restore(snapshot.copy)
            losses = self._sandbox.losses(probes)
            if best and is_better(best, losses):
                return sound, min(onset, sound.attempt + 1)
            best = losses if not best or is_better(losses, best) else best
            sound = snapshot
        return (sound if best else snapshots[-1]), onset

    def _prepare(self, snapshot: Snapshot, onset: int) -> Trial:
        first = snapshot.attempt + 1
        steps = self._agreement.common(self._agreement.together(lambda: self._recorder.since(first)))
        probes = self._agreement.common(self._recorder.probes(first))
        if len(probes) < MIN_PROBES:  # of a run that has just begun: hold out some of its steps
            known = [s for s in steps if s.row is not None and s.applied]
            probes = known[:: max(1, len(known) // HELD_OUT)][:HELD_OUT]
            held_out = {s.attempt for s in probes}
            steps = [s for s in steps if s.attempt not in held_out]
        if not probes or not steps:
            raise NotKept("too few batches are kept")
        if all(s.row is None for s in steps):
            raise NotKept("no numbers of the steps since the snapshot have arrived yet")
        suspects = find_suspects([*probes, *steps], onset)
        changed = self._agreement.from_first(changed_settings(probes[-1], steps))
        return Trial(
            snapshot, onset, steps, probes, suspects=suspects, changed=changed, options_before=probes[-1].options
        )

    def _telling_branches(self, trial: Trial, *, try_float32: bool) -> list[Branch]:
        if trial.difference.kind is Deviation.LOSS:
            return [OPTIMIZER_NOW]
        branches = [OLD_SETTINGS] if trial.changed else []
        harmed = _is_harmed(trial)
        branches += [SKIP, *([OLD_BATCHES] if harmed else []), CLIP, *([FLOAT32] if try_float32 else [])]
        return branches + list(LAST_BRANCHES if harmed else ())

    def _loss_factor(self, trial: Trial) -> float:
        """What the loop multiplies step_fn's loss by; 1 where the trouble may have begun already."""
        first = trial.steps[0]
        return 1.0 if first.attempt >= trial.onset else self._sandbox.loss_factor(first)

    def would_refuse(self, overrides: StepOverrides) -> bool:
        """Whether these overrides would refuse most of the batches that the run trained on when it was healthy, too:
        then it is the state of the run that they are too tight for."""
        refused = self._agreement.common(self._recorder.last_refused())
        probes = self._agreement.common(self._recorder.probes(refused[0].attempt)) if refused else []
        if len(probes) < MIN_PROBES:
            return False
        with self._sandbox.opened():
            factor = self._sandbox.loss_factor(refused[-1])  # no update was made since
            taken = [self._sandbox.train_step(s, options=(), loss_factor=factor, apply=False) for s in probes]
        norm_ceiling = min(overrides.norm_ceiling, default=math.inf)
        above = [norm > norm_ceiling or loss > overrides.loss_ceiling for loss, norm in taken]
        return 2 * sum(above) > len(above)

    def can_be_learnt(self) -> bool | None:
        """Whether the batches that are being refused hold something to learn: after training on most of them, the loss
        of the others must rise when their inputs are paired with other targets; None where that is unknown."""
        refused = self._agreement.common(self._recorder.last_refused())
        if len(refused) <= UNSEEN_BATCHES:
            return None
        unseen = refused[-max(UNSEEN_BATCHES, len(refused) // 3) :]
        with self._sandbox.opened():
            for step in refused[: -len(unseen)]:
                self._sandbox.train_step(step, options=step.options, max_norm=loop_clip(step))
            return depends_on_pairs(self._sandbox, unseen)

    def retake(self, trial: Trial, rewind: Callable[[], None]) -> int:
        """Take the steps of the best branch once more, after `rewind`, and keep what they lead to; returns how many
        updates that were. What is kept of these steps is then about the run as it continues."""
        branch = BRANCHES[trial.conclusion.best]
        taken = self._sandbox.retake(rewind, lambda: self._take_steps(branch, trial, trial.steps, partly=True))
        self._recorder.replaced(taken, since=trial.snapshot.attempt + 1)
        return len(taken)

    # -- one branch

    def _run_branch(self, branch: Branch, trial: Trial) -> BranchResult:
        began = time.perf_counter()
        self._sandbox.restore(trial.snapshot.copy)
        taken = self._take_steps(branch, trial, trial.steps)
        return self._result(branch, trial, taken, began)

    def _run_optimizer_now(self, trial: Trial, now: StateCopy) -> None:
        """Train on from where the run differed from its replay, with the optimizer's state as it is now."""
        began = time.perf_counter()
        before = [s for s in trial.steps if s.attempt < trial.difference.attempt]
        self._sandbox.restore(now)
        tensors = self._sandbox.optimizer_tensors()
        self._sandbox.restore(trial.snapshot.copy)
        self._take_steps(REPLAY, trial, before)
        if self._sandbox.set_optimizer_tensors(tensors):
            taken = self._take_steps(OPTIMIZER_NOW, trial, trial.steps[len(before) :])
            trial.results[BranchId.OPTIMIZER_NOW] = self._result(OPTIMIZER_NOW, trial, taken, began)

    def _run_old_batches(self, trial: Trial) -> None:
        """Where leaving out the batches that stand out does not cure: take the steps since the onset on batches from
        before it. If that does no harm, it is the batches since, whether each of them stands out or not."""
        cured = not is_better(trial.reference, trial.results[BranchId.SKIP].probe_losses)
        probes = {s.attempt for s in trial.probes}
        usable = (s for s in self._recorder.usable_steps() if s.attempt <= trial.snapshot.attempt and s.applied)
        others = self._agreement.common([s for s in usable if s.attempt not in probes])
        since = [s for s in trial.steps if s.attempt >= trial.onset]
        if cured or len(others) < len(since):
            return
        began = time.perf_counter()
        self._sandbox.restore(trial.snapshot.copy)
        taken = self._take_steps(REPLAY, trial, [s for s in trial.steps if s.attempt < trial.onset])
        swapped = zip(since, others[-len(since) :], strict=True)
        steps = [
            replace(step, batches=old.batches, weights=old.weights, rng_states=old.rng_states) for step, old in swapped
        ]
        taken |= self._take_steps(OLD_BATCHES, trial, steps)
        trial.results[BranchId.OLD_BATCHES] = self._result(OLD_BATCHES, trial, taken, began)
        if self._agreement.any(batches_alone_harm(trial.results, trial.reference)):
            trial.suspects = frozenset(s.attempt for s in since)
            trial.results[BranchId.SKIP] = self._run_branch(SKIP, trial)

    def _result(self, branch: Branch, trial: Trial, taken: dict[int, TakenStep], began: float) -> BranchResult:
        probe_losses = tuple(self._sandbox.losses(trial.probes))
        losses, norms = {k: s.loss for k, s in taken.items()}, {k: s.norm for k, s in taken.items()}
        return BranchResult(branch.id, probe_losses, losses, norms, time.perf_counter() - began)

    def _take_steps(
        self, branch: Branch, trial: Trial, steps: Sequence[KeptStep], *, partly: bool = False
    ) -> dict[int, TakenStep]:
        """Train these steps as in a branch from the state the model is in; with `partly`, up to the first that
        fails."""
        usual = usual_norm(trial.probes)
        taken: dict[int, TakenStep] = {}
        if branch.fresh_optimizer:
            self._sandbox.clear_optimizers()
        with self._sandbox.float32(enabled=branch.float32):
            for step in steps:
                if branch.skip and step.attempt in trial.suspects:
                    continue
                options = trial.options_before if branch.old_settings else scaled_lr(step.options, branch.lr_factor)
                max_norm = usual if branch.clip else loop_clip(step)
                try:
                    loss, norm = self._sandbox.train_step(
                        step, options=options, loss_factor=trial.loss_factor, max_norm=max_norm, apply=step.applied
                    )
                except TrialFailed as error:
                    if not partly or isinstance(error, UpdateFailed):
                        raise
                    break
                taken[step.attempt] = TakenStep(loss, norm, options, max_norm)
        return taken


def _is_harmed(trial: Trial) -> bool:
    """The run is worse than it was at the snapshot."""
    return is_better(trial.reference, trial.results[BranchId.NOTHING].probe_losses)


def _is_cured(trial: Trial) -> bool:
    """A branch that changes something ends no worse than the snapshot."""
    changed = [result for result in trial.results.values() if result.branch is not BranchId.NOTHING]
    return any(not is_better(trial.reference, result.probe_losses) for result in changed)


def find_suspects(steps: Sequence[KeptStep], onset: int) -> frozenset[int]:
    """Attempts from the onset on whose loss or gradient norm stands out from those before, or that were refused, and
    those between where most do; all of them where none does."""
    before = [s.row for s in steps if s.row is not None and s.attempt < onset and s.row.applied]
    after = [s for s in steps if s.attempt >= onset]
    everything = frozenset(s.attempt for s in after)
    if len(before) < MIN_PROBES:
        return everything
    losses = [row.loss for row in before]
    median = statistics.median(losses)
    sigma = 1.5 * statistics.median(abs(loss - median) for loss in losses) + 1e-3 * abs(median)
    max_norm = STANDS_OUT_NORM * max((row.norm for row in before if row.norm > 0), default=math.inf)

    def stands_out(row: StepMetrics) -> bool:
        return not row.applied or not row.loss < median + STANDS_OUT_SIGMAS * sigma or row.norm > max_norm

    found = [s.attempt for s in after if s.row is not None and stands_out(s.row)]
    since = [s.attempt for s in after if found and s.attempt >= found[0]]
    if 2 * len(found) > len(since) - UNREAD_STEPS:  # most stand out: the others between them are of the same kind
        return frozenset(since) or everything
    return frozenset(found)


def changed_settings(before: KeptStep, steps: Sequence[KeptStep]) -> frozenset[Cause]:
    """The causes among learning rate and momentum: those that are higher in any step than they were before."""
    causes: set[Cause] = set()
    for step in steps:
        for old, new in zip(_groups(before), _groups(step), strict=False):
            if _risen(float(old.get("lr", 0.0)), float(new.get("lr", 0.0))):
                causes |= {Cause.LEARNING_RATE, Cause.SCHEDULE}
            if _risen(_memory(old), _memory(new)):
                causes.add(Cause.MOMENTUM)
    return frozenset(causes)


def _groups(step: KeptStep) -> list[dict[str, Any]]:
    return [group for options in step.options for group in options]


def _risen(old: float, new: float) -> bool:
    return new > SETTING_CHANGE * old


def _memory(group: dict[str, Any]) -> float:
    """About how many updates a momentum averages over."""
    momentum = float(group.get("momentum") or group.get("betas", (0.0,))[0])
    return 1.0 / (1.0 - momentum) if momentum < 1.0 else math.inf


def update_excess(steps: Sequence[KeptStep], since: int) -> float:
    """How many times further than usual an update at or after this attempt moved the weights; 0 where unknown."""
    ratios = [(s.attempt, s.row.update_ratio) for s in steps if s.row is not None and s.row.update_ratio > 0]
    # The update before the first loss that differs may be the one that was wrong.
    usual = [ratio for attempt, ratio in ratios if attempt < since - 1]
    return max((ratio for attempt, ratio in ratios if attempt >= since - 1), default=0.0) / max(usual) if usual else 0.0


def usual_norm(steps: Sequence[KeptStep]) -> float:
    norms = [s.row.norm for s in steps if s.row is not None and s.row.norm > 0]
    return statistics.median(norms) if norms else math.inf


def _clips(step: KeptStep) -> bool:
    return loop_clip(step) < math.inf
