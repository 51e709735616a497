"""What the clues in `rank_causes` ask about an incident: each fact is computed when the first clue asks for it."""

from __future__ import annotations

import math
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

from surefoot.judge.evidence import BrokenBatch, EvalRiseEvidence, LayersEvidence, OriginEvidence
from surefoot.judge.incident import SILENCE_DETECTORS, Incident, IncidentStep
from surefoot.judge.param_roles import GradProblem, Role, cause_of_role, hint_of_part, role_of
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    DOUBLE_RATIO,
    HUGE_RATIO,
    MAX_MICROBATCHES,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
)
from surefoot.records import Cause, Finding, StepMetrics, Verdict
from surefoot.records import FindingKind as Kind


class Nonfinite(StrEnum):
    """Where non-finite values were first seen, that nothing had grown into."""

    INFINITE_LOSS = "infinite_loss"
    BUFFER = "buffer"
    ONE_GRADIENT = "one_gradient"
    GRADIENTS = "gradients"
    EVERY_BATCH = "every_batch"
    SOME_BATCHES = "some_batches"


PROBLEMS = {Kind.EXPLODING_GRADS: GradProblem.EXPLODING, Kind.VANISHING_GRADS: GradProblem.VANISHING}


class CaseFacts:
    """An incident, and the finding that a clue is about."""

    NO_FINDING: ClassVar = Finding(step=-1, attempt=-1, detector=Kind.PROGRESS)
    """Stands for a finding where there is none."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident
        self.first, self.last = incident.first, incident.last
        self.finding: Finding = self.NO_FINDING
        self.usual_samples = incident.usual_batch_size
        self._jump_log_ratio = math.log(incident.thresholds.norm_jump_ratio)

    def found(self, *kinds: Kind) -> bool:
        return bool(self.incident.found(*kinds))

    @property
    def suffers_from_lr(self) -> bool:
        kinds = (Kind.LOSS_LEVEL, Kind.JUMP, Kind.GROWTH, Kind.OSCILLATION)
        return self.first.lr_ratio > DOUBLE_RATIO and self.found(*kinds)

    @property
    def may_see_targets(self) -> bool:
        """This finding shows an eval loss that rises apart from the training loss."""
        rise = EvalRiseEvidence.read(self.finding)
        apart = rise is not None and rise.apart
        return apart and self.incident.has_attention and not self.found(Kind.REPEATED_BATCHES)

    @property
    def origin(self) -> Cause | None:
        """The cause that this finding's module shows."""
        origin = OriginEvidence.read(self.finding)
        return None if origin is None else Cause(origin.cause)

    # -- batches

    @cached_property
    def novel_since(self) -> list[bool]:
        """From the first novel batch on: which were novel."""
        novel = [step.input_novelty >= 1 for step in self.incident.steps]
        return novel[novel.index(True) :] if any(novel) else []

    @property
    def novelty_passed(self) -> bool:
        return not all(self.novel_since)

    @property
    def novelty_stays(self) -> bool:
        return all(self.novel_since) and len(self.novel_since) > REPEAT_COUNT

    @property
    def novelty_open(self) -> bool:
        """Too few batches have come since to say."""
        return bool(self.novel_since) and not self.novelty_passed and not self.novelty_stays

    @property
    def novelty(self) -> str:
        shifts = self.incident.found(Kind.INPUT_SHIFT)
        return shifts[0].detail if shifts else "the batch is unlike those before"

    @property
    def batch_is_broken(self) -> bool:
        return bool(self.incident.facts(BrokenBatch))

    @property
    def batches_are_tiny(self) -> bool:
        samples = self.last.row.samples
        return self.incident.has_batch_norm and samples <= RECENT_ROWS and samples < self.usual_samples

    # -- weights

    @cached_property
    def weights_changed(self) -> bool:
        """The weights changed by more than training explains, and it shows."""
        incident = self.incident
        kinds = (Kind.LOSS_LEVEL, Kind.JUMP, Kind.NONFINITE, Kind.DEAD_UNITS, Kind.VANISHING_GRADS)
        explained = self.found(Kind.HYPERPARAM_CHANGE) or incident.update_excess > 1 or self.novel_since
        return abs(incident.weight_change) > 0 and self.found(*kinds) and not explained

    @property
    def weights_ratio(self) -> float:
        return math.exp(min(self.incident.weight_change, 700.0))

    @property
    def units_went_dead(self) -> bool:
        dead = self.found(Kind.DEAD_UNITS) or self.last.silent_fraction > NOTABLE_FRACTION
        return self.weights_changed and dead

    @property
    def first_layers_starve(self) -> bool:
        shrunk = self.incident.weight_change < 0 and self.last.front_layers_lead < -1
        return self.weights_changed and (shrunk or self.found(Kind.VANISHING_GRADS))

    @property
    def attention_changed_most(self) -> bool:
        if not self.weights_changed:
            return False
        held = [held for f, held in self.incident.facts(LayersEvidence) if f.detector in SILENCE_DETECTORS]
        silent = [name for layers in held for name in layers.layers]
        return all_attention(silent) or abs(max((s.attention_lead for s in self.incident.steps), key=abs)) > 1

    @property
    def silent_attention(self) -> bool:
        """This finding's layers all belong to attention."""
        held = LayersEvidence.read(self.finding)
        return held is not None and all_attention(held.layers)

    @property
    def cause_by_part(self) -> Cause | None:
        """What it points to that this finding is about layers of one part of the model."""
        held, problem = LayersEvidence.read(self.finding), PROBLEMS.get(self.finding.detector)
        known = None if held is None or problem is None else hint_of_part(held.layers, held.share, problem)
        return None if known is None else known[0]

    @property
    def language_hint(self) -> str:
        """What it means that the loss swings while the gradients of the language part lead; empty where they do not."""
        leads = sorted(step.language_lead for step in self.incident.steps)
        if not self.found(Kind.OSCILLATION) or not leads[len(leads) // 2] > 1.0:
            return ""
        known = cause_of_role(Role.LANGUAGE, GradProblem.OSCILLATING)
        return "" if known is None else known[1]

    @cached_property
    def vanishing(self) -> Finding:
        """The first finding of vanishing gradients."""
        return next(iter(self.incident.found(Kind.VANISHING_GRADS)), self.NO_FINDING)

    @property
    def much_vanishes(self) -> bool:
        held = LayersEvidence.read(self.vanishing)
        return held is not None and held.share > NOTABLE_FRACTION

    @property
    def excess_update(self) -> bool:
        return self.incident.update_excess > 1 and not self.found(Kind.HYPERPARAM_CHANGE)

    @property
    def optimizer_has_state(self) -> bool:
        return self.incident.adaptive or self.last.row.momentum >= 1 - NOTABLE_FRACTION

    # -- non-finite values

    @cached_property
    def _bad_step(self) -> IncidentStep | None:
        return next((step for step in self.incident.steps if step.row.verdict is Verdict.NONFINITE), None)

    @property
    def bad_row(self) -> StepMetrics:
        return self.first.row if self._bad_step is None else self._bad_step.row

    @cached_property
    def nonfinite(self) -> Nonfinite | None:
        """None without non-finite values, and where values grew into them: the growth has causes of its own."""
        steps, bad = self.incident.steps, self._bad_step
        if bad is None or any(self._has_grown(step) for step in steps[: steps.index(bad)]):
            return None
        row = bad.row
        if math.isinf(row.loss):
            return Nonfinite.INFINITE_LOSS
        if row.nonfinite_buffers > 0 and math.isfinite(row.loss) and math.isfinite(row.norm):
            return Nonfinite.BUFFER
        if math.isfinite(row.loss):
            alone = all(step.one_bad_tensor for step in self._bad_backwards)
            return Nonfinite.ONE_GRADIENT if alone else Nonfinite.GRADIENTS
        return Nonfinite.EVERY_BATCH if self.incident.refused >= REPEAT_COUNT else Nonfinite.SOME_BATCHES

    def _has_grown(self, step: IncidentStep) -> bool:
        high = step.log_norm_ratio > 1 or step.z > self.incident.thresholds.loss_jump_sigmas
        return high or step.row.verdict is Verdict.NORM_OUTLIER

    @cached_property
    def _bad_backwards(self) -> list[IncidentStep]:
        rows = self.incident.steps
        return [step for step in rows if step.row.verdict is Verdict.NONFINITE and math.isfinite(step.row.loss)]

    @property
    def once(self) -> bool:
        """In one backward pass only."""
        return len(self._bad_backwards) == 1

    @property
    def backward(self) -> str:
        updates = "one update" if self.once else f"{len(self._bad_backwards)} updates"
        return f"in {updates} the loss was finite and gradients were not: they became non-finite in the backward pass"

    # -- jumps

    @cached_property
    def jumped(self) -> bool:
        """Loss or gradients jumped from one step to the next, and nothing else explains it."""
        return self.found(Kind.JUMP, Kind.NORM_OUTLIER) and not self.found(Kind.HYPERPARAM_CHANGE, Kind.LOSS_SCALE)

    @property
    def norm_jumped(self) -> bool:
        return self.first.log_norm_ratio > self._jump_log_ratio

    @property
    def loss_jumped(self) -> bool:
        return self.first.z > self.incident.thresholds.loss_jump_sigmas

    @property
    def loss_is_high(self) -> bool:
        return self.first.z > self.incident.thresholds.level_sigmas

    @property
    def only_norm_jumped(self) -> bool:
        return self.jumped and self.norm_jumped and self.first.z < self.incident.thresholds.level_sigmas

    @property
    def attention_jumped(self) -> bool:
        return self.first.attention_lead > 1.0 or (self.incident.has_attention and self.incident.weight_change > 0)

    @cached_property
    def lasts(self) -> bool:
        after, level_sigmas = self.incident.steps[1:], self.incident.thresholds.level_sigmas
        high = sum(step.z > level_sigmas or not step.row.applied for step in after)
        return (bool(after) and high > len(after) / 2) or self.found(Kind.LOSS_LEVEL)

    @property
    def fell_back_on_ordinary_inputs(self) -> bool:
        after, row = self.incident.steps[1:], self.first.row
        ordinary = not math.isnan(row.input_absmax) and self.first.input_novelty < 1
        return (
            self.jumped
            and ordinary
            and bool(after)
            and row.loss > max(HUGE_RATIO * self.incident.normal_loss, DOUBLE_RATIO * after[0].row.loss)
        )

    @property
    def rescaled(self) -> bool:
        return self.jumped and self.first.loss_factor > DOUBLE_RATIO

    @property
    def rescaled_for_good(self) -> bool:
        """As if micro-batches were summed instead of averaged."""
        level = self.last.z / self.first.z if len(self.incident.steps) > 1 and self.first.z > 0 else 0.0
        return self.rescaled and self.lasts and level > NOTABLE_FRACTION and self.first.loss_factor < MAX_MICROBATCHES

    @property
    def passing_jump(self) -> bool:
        return self.jumped and self.loss_jumped and not self.lasts

    @property
    def began_refused(self) -> bool:
        return self.jumped and self.first.row.verdict is Verdict.NORM_OUTLIER

    @property
    def lasting_jump(self) -> bool:
        """The loss jumped at once and is still high."""
        return self.jumped and self.loss_jumped and self.lasts and len(self.incident.steps) > 1

    @property
    def falls(self) -> bool:
        """It fell back most of the way within three steps."""
        soon = self.incident.steps[1:][:REPEAT_COUNT][-1]
        return soon.z < self.first.z / REPEAT_COUNT and soon.row.applied

    @property
    def weights_unchanged(self) -> bool:
        """The weights did not change, and no single update damaged them."""
        return self.incident.weight_change == 0 and not self.falls

    @property
    def back_at_start(self) -> bool:
        return self.first.row.loss < CLEAR_RATIO * self.incident.start_loss

    @property
    def first_layers_lead(self) -> bool:
        """The first layers' gradients jumped furthest, and the inputs were not measured."""
        return self.first.front_layers_lead > 1.0 and not self.falls and math.isnan(self.first.row.input_absmax)


def all_attention(names: list[str]) -> bool:
    """There are such tensors, and all belong to attention."""
    return bool(names) and all(role_of(name) is Role.ATTENTION for name in names)
