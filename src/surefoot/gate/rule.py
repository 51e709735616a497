"""The rule that applies or refuses an update, computed on the device from the summary of the gradients.

Refused as non-finite: a NaN or infinite loss, gradient, or buffer value that the batch produced. Refused as a norm
outlier: a norm above `max_ratio` times the recent maximum of the accepted norms and above every norm this run has ever
accepted, or above a ceiling set by an override. Refused norms never enter the memory.
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
from surefoot.gate.clip import ClipUnit
from surefoot.measure.block_layout import UNITS_START, SummarySlot, VerdictSlot
from surefoot.measure.grad_stats import has_triton
from surefoot.records import Verdict


@dataclass(frozen=True, slots=True)
class NormRule:
    """When a finite update is a norm outlier."""

    max_ratio: float
    """Limit, as a multiple of the recent maximum norm; infinite turns the rule off."""
    warmup: int
    """Accepted norms before the rule applies."""
    max_decay: float
    """Factor on the recent maximum norm after each step."""


class Ceiling(IntEnum):
    """Ceilings set by overrides, as indices into `GateMemory.ceilings`; infinite is none."""

    NORM = 0
    """Updates with a larger norm are refused."""
    LOSS = 1
    """Updates with a larger loss are refused."""
    CLIP = 2
    """Upper bound on the clip threshold of every unit."""


class Decider(Protocol):
    """Decides for one optimizer from the totals and writes the verdict to `out`.

    `joint` is the worst verdict of the optimizers that share the backward. `commit` records an accepted norm.
    """

    def __call__(self, totals: Tensor, *, out: Tensor, scaled: bool, joint: Tensor | None, commit: bool) -> None: ...


@dataclass(slots=True)
class GateMemory:
    """What one optimizer's gate remembers, all on the device."""

    units: Sequence[int]
    """Indices of this optimizer's units in the summary; consecutive."""
    baseline: Tensor
    """Recent maximum norm, maximum ever, number of norms."""
    ceilings: Tensor
    """See `Ceiling`; values on the device, so that a new one needs no kernel of its own."""
    thresholds: Tensor
    """Clip threshold of each unit."""
    norms: Tensor
    """Ring buffer of the accepted norms of each unit."""
    adaptive: Tensor
    """Which units have an adaptive threshold."""
    factors: Tensor
    """Clip factor of each unit in this step."""
    refuse: Tensor
    """1.0 to refuse the update; fused optimizers read it as `found_inf`."""
    buffers_tainted: Tensor
    """1.0 when the buffers must be restored too; 0.0 when the loss scale merely overflowed."""
    divisor: Tensor
    """What the gradients are divided by in this step; fused optimizers read it as `grad_scale`."""

    def state_dict(self) -> dict[str, Tensor]:
        """The part that a rewind restores."""
        return {"baseline": self.baseline, "thresholds": self.thresholds, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            if tensor.shape == state[name].shape:  # else the parameter groups have changed since
                tensor.copy_(state[name])

    def refresh_thresholds(self) -> None:
        """Recompute the adaptive thresholds from the accepted norms."""
        if self.norms.numel() == 0:
            return
        quantile = torch.nanquantile(self.norms, clips.ADAPTIVE_PERCENTILE, dim=1).clamp(
            clips.ADAPTIVE_MIN, clips.ADAPTIVE_MAX
        )
        quantile = quantile.where(self.baseline[2] >= clips.ADAPTIVE_MIN_NORMS, clips.ADAPTIVE_START)
        self.thresholds.copy_(quantile.where(self.adaptive, self.thresholds))


def new_gate_memory(optimizer: int, units: Sequence[ClipUnit], device: torch.device) -> GateMemory:
    """An empty memory for one optimizer."""
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    indices = [i for i, u in enumerate(units) if u.optimizer == optimizer]
    adaptive = [units[i].clip.adaptive for i in indices]
    return GateMemory(
        units=indices,
        baseline=torch.zeros(3, dtype=dtype, device=device),
        ceilings=torch.full((len(Ceiling),), math.inf, dtype=dtype, device=device),
        thresholds=torch.tensor(
            [clips.ADAPTIVE_START if units[i].clip.adaptive else units[i].clip.norm for i in indices],
            dtype=dtype,
            device=device,
        ),
        norms=torch.full(
            (len(indices), clips.NORM_HISTORY if any(adaptive) else 0), math.nan, dtype=dtype, device=device
        ),
        adaptive=torch.tensor(adaptive, device=device),
        factors=torch.ones(len(indices), dtype=torch.float32, device=device),
        refuse=torch.zeros((), dtype=torch.float32, device=device),
        buffers_tainted=torch.zeros((), dtype=torch.float32, device=device),
        divisor=torch.ones((), dtype=torch.float32, device=device),
    )


def make_decider(memory: GateMemory, rule: NormRule) -> Decider:
    """The decider for the device the memory lives on."""
    return triton_decider(memory, rule) if has_triton(memory.baseline.device) else torch_decider(memory, rule)


def torch_decider(memory: GateMemory, rule: NormRule) -> Decider:
    """The decider in plain torch operations."""
    start, end = UNITS_START + 2 * memory.units[0], UNITS_START + 2 * memory.units[-1] + 2

    def decide(totals: Tensor, *, out: Tensor, scaled: bool, joint: Tensor | None, commit: bool) -> None:
        squares, nonfinite = totals[start:end:2], totals[start + 1 : end : 2].sum()
        norm = squares.sum().sqrt()
        loss = totals[SummarySlot.LOSS] / totals[SummarySlot.ACTIVE_RANKS].clamp(min=1)
        recent_max, max_ever, count = memory.baseline.unbind()
        norm_ceiling, loss_ceiling, clip = memory.ceilings.unbind()
        limit = torch.maximum(recent_max * rule.max_ratio, max_ever).where(count >= rule.warmup, math.inf)
        limit = torch.minimum(limit, norm_ceiling)
        outlier = (norm > limit) | (loss > loss_ceiling)
        bad_buffers = totals[SummarySlot.NONFINITE_BUFFERS] > 0
        bad = ~norm.isfinite() | ~loss.isfinite() | (nonfinite > 0) | bad_buffers
        nonfinite_verdict = torch.where(
            loss.isfinite() & ~bad_buffers,
            float(Verdict.OVERFLOW if scaled else Verdict.NONFINITE),
            float(Verdict.NONFINITE),
        )
        finite_verdict = torch.where(outlier, float(Verdict.NORM_OUTLIER), float(Verdict.APPLIED))
        verdict = nonfinite_verdict.where(bad, finite_verdict)
        if joint is not None:
            verdict = torch.maximum(verdict.to(joint.dtype), joint)
        norms = squares.sqrt()
        thresholds = torch.minimum(memory.thresholds, clip)
        ratios = thresholds / (norms + 1e-6)
        factors = ratios.where(ratios < 1.0, 1.0)
        memory.factors.copy_(factors)
        memory.divisor.copy_(1.0 / factors[0])
        memory.refuse.copy_(verdict != 0)
        memory.buffers_tainted.copy_((verdict != 0) & (verdict != float(Verdict.OVERFLOW)))
        out[VerdictSlot.VERDICT] = verdict
        out[VerdictSlot.NORM] = norm
        out[VerdictSlot.NONFINITE] = nonfinite
        out[VerdictSlot.NORM_LIMIT] = limit
        out[VerdictSlot.CLIP_THRESHOLD] = thresholds.amin()
        out[VerdictSlot.CLIP_FACTOR] = factors.amin()
        out[VerdictSlot.LOSS] = loss
        out[VerdictSlot.WEIGHT_NORM] = totals[SummarySlot.PARAM_SQUARES].sqrt()
        out[VerdictSlot.NONFINITE_PARAMS] = totals[SummarySlot.NONFINITE_PARAMS]
        update_ratio = (totals[SummarySlot.UPDATE_SQUARES] / totals[SummarySlot.SAMPLED_SQUARES]).sqrt()
        out[VerdictSlot.UPDATE_RATIO] = update_ratio
        out[VerdictSlot.ACTIVE_RANKS] = totals[SummarySlot.ACTIVE_RANKS]
        if commit:
            _commit(memory, rule, norm, norms, applied=(verdict == 0) & (norm > 0))

    return decide


def _commit(memory: GateMemory, rule: NormRule, norm: Tensor, norms: Tensor, *, applied: Tensor) -> None:
    """Record the norm of the update, and of each unit, if it is applied."""
    recent_max, max_ever, count = memory.baseline.unbind()
    if memory.norms.numel():
        entry = torch.arange(clips.NORM_HISTORY, device=norm.device) == count % clips.NORM_HISTORY
        memory.norms.copy_(torch.where(entry & applied, norms[:, None], memory.norms))
    memory.baseline[0] = torch.maximum(recent_max * rule.max_decay, norm).where(applied, recent_max)
    memory.baseline[1] = torch.maximum(max_ever, norm).where(applied, max_ever)
    memory.baseline[2] += applied


def triton_decider(memory: GateMemory, rule: NormRule) -> Decider:
    """The decider in one Triton launch."""
    from surefoot.gate import rule_kernels
    from surefoot.triton_launch import KernelLauncher

    device = memory.baseline.device
    launcher = KernelLauncher(rule_kernels.decide, device, num_warps=1)
    first_unit, num_units = memory.units[0], len(memory.units)
    adaptive = memory.norms.numel() > 0
    unused = torch.zeros((), dtype=torch.float64, device=device)
    rule_values = torch.tensor([rule.max_ratio, rule.warmup, rule.max_decay], dtype=torch.float64, device=device)

    def decide(totals: Tensor, *, out: Tensor, scaled: bool, joint: Tensor | None, commit: bool) -> None:
        joint_key = None if joint is None else joint.data_ptr()
        launcher.launch_cached(
            (totals.data_ptr(), out.data_ptr(), joint_key, scaled, commit),
            (1, 1, 1),
            totals,
            out,
            memory.baseline,
            memory.ceilings,
            memory.thresholds,
            memory.norms if adaptive else unused,
            memory.factors,
            memory.refuse,
            memory.buffers_tainted,
            memory.divisor,
            unused if joint is None else joint,
            first_unit,
            num_units,
            rule_values,
            SCALED=scaled,
            ADAPTIVE=adaptive,
            COMMIT=commit,
        )

    return decide
