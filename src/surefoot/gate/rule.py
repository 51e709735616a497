"""The rule that lets an update land or refuses it, worked out on the device from a summary of the gradients.

Refused is what is not finite (the loss, a gradient, or a buffer that the batch has made so), and what is outlandish: a
norm above `factor` times the largest accepted in recent memory and above every norm this run has ever accepted, or
above a ceiling that was set on the way. Rejected norms never enter that memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from surefoot.gate import clip as clips
from surefoot.gate.clip import Unit
from surefoot.measure.block_layout import HEAD, SummarySlot
from surefoot.measure.grad_stats import VERDICT, has_triton
from surefoot.records import Verdict


class VerdictSlot(IntEnum):
    """Places of a decision in the measured block."""

    VERDICT = 0
    NORM = 1
    NONFINITE = 2
    LIMIT = 3
    CLIP = 4
    CLIPPED = 5
    LOSS = 6
    SCALE = 7
    LR = 8
    WEIGHT_NORM = 9
    BAD_WEIGHTS = 10
    UPDATE_RATIO = 11
    ALIVE = 12
    """Processes that still measure: one whose protection has ended only stands in."""


assert len(VerdictSlot) == VERDICT


@dataclass(frozen=True, slots=True)
class NormRule:
    """When a finite update is outlandish."""

    factor: float
    """Times the recent largest norm; infinite switches the rule off."""
    warmup: int
    """Accepted norms before the rule may speak."""
    fade: float
    """What is left of the recent largest norm after each step."""


class Ceiling(IntEnum):
    """Places of what may be asked of the steps on the way; infinite asks nothing."""

    NORM = 0
    """Updates with a larger norm are outlandish."""
    LOSS = 1
    """Updates with a larger loss are outlandish."""
    CLIP = 2
    """No threshold of a unit is above this."""


class Decider(Protocol):
    """Decides for one optimizer from the totals; writes its verdict, and remembers the norm when it lands."""

    def __call__(self, totals: Tensor, *, said: Tensor, scaled: bool, joint: Tensor | None, commit: bool) -> None: ...


@dataclass(slots=True)
class GateMemory:
    """What one optimizer's gate remembers, all on the device."""

    units: Sequence[int]
    """Which units of the summary are this optimizer's; they stand side by side."""
    baseline: Tensor
    """Recent largest norm, largest ever, norms counted."""
    ceilings: Tensor
    """See `Ceiling`; figures on the device, so that none of them needs a kernel of its own."""
    thresholds: Tensor
    """Clip threshold of each unit."""
    norms: Tensor
    """Accepted norms of each unit, a ring."""
    adaptive: Tensor
    """Which units adapt."""
    factors: Tensor
    """What each unit's gradients are multiplied by in this step."""
    refuse: Tensor
    """1.0 to refuse the update, in the form fused optimizers read."""
    spoilt: Tensor
    """1.0 when what the batch left in the buffers must go too: not so when loss scaling merely overflowed."""
    divisor: Tensor
    """What gradients are divided by in this step, in the form fused optimizers read."""

    def state_dict(self) -> dict[str, Tensor]:
        """What goes back with a run."""
        return {"baseline": self.baseline, "thresholds": self.thresholds, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, now in self.state_dict().items():
            if now.shape == state[name].shape:  # else the groups have changed since
                now.copy_(state[name])

    def refresh(self) -> None:
        """Take the adaptive thresholds anew from the norms known so far."""
        if self.norms.numel() == 0:
            return
        top = torch.nanquantile(self.norms, clips.PERCENTILE, dim=1).clamp(clips.LEAST, clips.MOST)
        top = top.where(self.baseline[2] >= clips.KNOWN, clips.FIRST)
        self.thresholds.copy_(top.where(self.adaptive, self.thresholds))


def memory_for(number: int, units: Sequence[Unit], device: torch.device) -> GateMemory:
    """An empty memory for one optimizer."""
    real = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    mine = [i for i, u in enumerate(units) if u.optimizer == number]
    adaptive = [units[i].clip.adaptive for i in mine]
    return GateMemory(
        units=mine,
        baseline=torch.zeros(3, dtype=real, device=device),
        ceilings=torch.full((len(Ceiling),), math.inf, dtype=real, device=device),
        thresholds=torch.tensor(
            [clips.FIRST if units[i].clip.adaptive else units[i].clip.norm for i in mine], dtype=real, device=device
        ),
        norms=torch.full((len(mine), clips.MEMORY if any(adaptive) else 0), math.nan, dtype=real, device=device),
        adaptive=torch.tensor(adaptive, device=device),
        factors=torch.ones(len(mine), dtype=torch.float32, device=device),
        refuse=torch.zeros((), dtype=torch.float32, device=device),
        spoilt=torch.zeros((), dtype=torch.float32, device=device),
        divisor=torch.ones((), dtype=torch.float32, device=device),
    )


def decider_for(memory: GateMemory, rule: NormRule) -> Decider:
    """The decider for the device the memory lives on."""
    return _fused(memory, rule) if has_triton(memory.baseline.device) else _portable(memory, rule)


def _portable(memory: GateMemory, rule: NormRule) -> Decider:
    low, high = HEAD + 2 * memory.units[0], HEAD + 2 * memory.units[-1] + 2

    def decide(totals: Tensor, *, said: Tensor, scaled: bool, joint: Tensor | None, commit: bool) -> None:
        squares, nonfinite = totals[low:high:2], totals[low + 1 : high : 2].sum()
        norm = squares.sum().sqrt()
        loss = totals[SummarySlot.LOSS] / totals[SummarySlot.ALIVE].clamp(min=1)
        recent, ever, count = memory.baseline.unbind()
        norm_ceiling, loss_ceiling, clip = memory.ceilings.unbind()
        limit = torch.maximum(recent * rule.factor, ever).where(count >= rule.warmup, math.inf)
        limit = torch.minimum(limit, norm_ceiling)
        outlandish = (norm > limit) | (loss > loss_ceiling)
        spoils = totals[SummarySlot.BAD_BUFFERS] > 0
        bad = ~norm.isfinite() | ~loss.isfinite() | (nonfinite > 0) | spoils
        kind = torch.where(
            loss.isfinite() & ~spoils,
            float(Verdict.OVERFLOW if scaled else Verdict.NONFINITE),
            float(Verdict.NONFINITE),
        )
        verdict = kind.where(bad, torch.where(outlandish, float(Verdict.NORM_OUTLIER), float(Verdict.APPLIED)))
        if joint is not None:
            verdict = torch.maximum(verdict.to(joint.dtype), joint)
        each = squares.sqrt()
        thresholds = torch.minimum(memory.thresholds, clip)
        ratios = thresholds / (each + 1e-6)
        factors = ratios.where(ratios < 1.0, 1.0)
        memory.factors.copy_(factors)
        memory.divisor.copy_(1.0 / factors[0])
        memory.refuse.copy_(verdict != 0)
        memory.spoilt.copy_((verdict != 0) & (verdict != float(Verdict.OVERFLOW)))
        said[VerdictSlot.VERDICT] = verdict
        said[VerdictSlot.NORM] = norm
        said[VerdictSlot.NONFINITE] = nonfinite
        said[VerdictSlot.LIMIT] = limit
        said[VerdictSlot.CLIP] = thresholds.amin()
        said[VerdictSlot.CLIPPED] = factors.amin()
        said[VerdictSlot.LOSS] = loss
        said[VerdictSlot.WEIGHT_NORM] = totals[SummarySlot.WEIGHTS].sqrt()
        said[VerdictSlot.BAD_WEIGHTS] = totals[SummarySlot.BAD_WEIGHTS]
        said[VerdictSlot.UPDATE_RATIO] = (totals[SummarySlot.CHANGE] / totals[SummarySlot.SAMPLED]).sqrt()
        said[VerdictSlot.ALIVE] = totals[SummarySlot.ALIVE]
        if commit:
            _remember(memory, rule, norm, each, landed=(verdict == 0) & (norm > 0))

    return decide


def _remember(memory: GateMemory, rule: NormRule, norm: Tensor, each: Tensor, *, landed: Tensor) -> None:
    recent, ever, count = memory.baseline.unbind()
    if memory.norms.numel():
        here = torch.arange(clips.MEMORY, device=norm.device) == count % clips.MEMORY
        memory.norms.copy_(torch.where(here & landed, each[:, None], memory.norms))
    memory.baseline[0] = torch.maximum(recent * rule.fade, norm).where(landed, recent)
    memory.baseline[1] = torch.maximum(ever, norm).where(landed, ever)
    memory.baseline[2] += landed


def _fused(memory: GateMemory, rule: NormRule) -> Decider:
    from surefoot.gate import kernels
    from surefoot.triton_launch import Launch

    launch = Launch(kernels.decide, memory.baseline.device, num_warps=1)
    own, count = memory.units[0], len(memory.units)
    remembers = memory.norms.numel() > 0
    nobody = torch.zeros((), dtype=torch.float64, device=memory.baseline.device)
    figures = torch.tensor([rule.factor, rule.warmup, rule.fade], dtype=torch.float64, device=memory.baseline.device)

    def decide(totals: Tensor, *, said: Tensor, scaled: bool, joint: Tensor | None, commit: bool) -> None:
        others = None if joint is None else joint.data_ptr()
        launch.at(
            (totals.data_ptr(), said.data_ptr(), others, scaled, commit),
            (1, 1, 1),
            totals,
            said,
            memory.baseline,
            memory.ceilings,
            memory.thresholds,
            memory.norms if remembers else nobody,
            memory.factors,
            memory.refuse,
            memory.spoilt,
            memory.divisor,
            nobody if joint is None else joint,
            own,
            count,
            figures,
            HEAD=HEAD,
            MEMORY=clips.MEMORY,
            SCALED=scaled,
            REMEMBERS=remembers,
            COMMIT=commit,
        )

    return decide
