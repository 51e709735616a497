"""The decision of `rule.torch_decider` as one small Triton kernel; a test checks that the two agree."""

from __future__ import annotations

import triton
import triton.language as tl

from surefoot.gate.clip import NORM_HISTORY
from surefoot.measure.block_layout import UNITS_START, SummarySlot, VerdictSlot
from surefoot.records import Verdict

# Triton reads only `constexpr` globals inside a kernel.
_UNITS_START = tl.constexpr(UNITS_START)
_NORM_HISTORY = tl.constexpr(NORM_HISTORY)
_APPLIED = tl.constexpr(float(Verdict.APPLIED))
_NONFINITE = tl.constexpr(float(Verdict.NONFINITE))
_NORM_OUTLIER = tl.constexpr(float(Verdict.NORM_OUTLIER))
_OVERFLOW = tl.constexpr(float(Verdict.OVERFLOW))
_IN_LOSS = tl.constexpr(int(SummarySlot.LOSS))
_IN_ACTIVE_RANKS = tl.constexpr(int(SummarySlot.ACTIVE_RANKS))
_IN_PARAM_SQUARES = tl.constexpr(int(SummarySlot.PARAM_SQUARES))
_IN_NONFINITE_PARAMS = tl.constexpr(int(SummarySlot.NONFINITE_PARAMS))
_IN_UPDATE_SQUARES = tl.constexpr(int(SummarySlot.UPDATE_SQUARES))
_IN_SAMPLED_SQUARES = tl.constexpr(int(SummarySlot.SAMPLED_SQUARES))
_IN_NONFINITE_BUFFERS = tl.constexpr(int(SummarySlot.NONFINITE_BUFFERS))
_OUT_VERDICT = tl.constexpr(int(VerdictSlot.VERDICT))
_OUT_NORM = tl.constexpr(int(VerdictSlot.NORM))
_OUT_NONFINITE = tl.constexpr(int(VerdictSlot.NONFINITE))
_OUT_NORM_LIMIT = tl.constexpr(int(VerdictSlot.NORM_LIMIT))
_OUT_CLIP_THRESHOLD = tl.constexpr(int(VerdictSlot.CLIP_THRESHOLD))
_OUT_CLIP_FACTOR = tl.constexpr(int(VerdictSlot.CLIP_FACTOR))
_OUT_LOSS = tl.constexpr(int(VerdictSlot.LOSS))
_OUT_WEIGHT_NORM = tl.constexpr(int(VerdictSlot.WEIGHT_NORM))
_OUT_NONFINITE_PARAMS = tl.constexpr(int(VerdictSlot.NONFINITE_PARAMS))
_OUT_UPDATE_RATIO = tl.constexpr(int(VerdictSlot.UPDATE_RATIO))
_OUT_ACTIVE_RANKS = tl.constexpr(int(VerdictSlot.ACTIVE_RANKS))


@triton.jit
def decide(
    totals,
    out,
    baseline,
    ceilings,
    thresholds,
    norms,
    factors,
    refuse,
    buffers_tainted,
    divisor,
    joint,
    first_unit,
    units,
    rule,
    SCALED: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    COMMIT: tl.constexpr,
):
    """One program: the verdict, the clip factors, and the update of the gate's memory for one optimizer."""
    max_ratio = tl.load(rule)
    warmup = tl.load(rule + 1)
    max_decay = tl.load(rule + 2)
    recent_max = tl.load(baseline)
    max_ever = tl.load(baseline + 1)
    count = tl.load(baseline + 2)
    norm_ceiling = tl.load(ceilings)
    loss_ceiling = tl.load(ceilings + 1)
    clip = tl.load(ceilings + 2)
    squares = recent_max * 0.0
    nonfinite = recent_max * 0.0
    min_factor = recent_max * 0.0 + 1.0
    min_threshold = recent_max * 0.0 + float("inf")
    for u in range(units):
        square = tl.load(totals + _UNITS_START + 2 * (first_unit + u))
        nonfinite += tl.load(totals + _UNITS_START + 2 * (first_unit + u) + 1)
        squares += square
        threshold = tl.load(thresholds + u)
        threshold = tl.where(clip < threshold, clip, threshold)
        factor = threshold / (tl.sqrt(square) + 1e-6)
        factor = tl.where(factor < 1.0, factor, 1.0)
        tl.store(factors + u, factor.to(tl.float32))
        if u == 0:
            tl.store(divisor, (1.0 / factor).to(tl.float32))
        min_factor = tl.where(factor < min_factor, factor, min_factor)
        min_threshold = tl.where(threshold < min_threshold, threshold, min_threshold)
    norm = tl.sqrt(squares)
    active_ranks = tl.load(totals + _IN_ACTIVE_RANKS)
    loss = tl.load(totals + _IN_LOSS) / tl.where(active_ranks < 1.0, 1.0, active_ranks)
    limit = tl.where(recent_max * max_ratio > max_ever, recent_max * max_ratio, max_ever)
    limit = tl.where(count >= warmup, limit, float("inf"))
    limit = tl.where(norm_ceiling < limit, norm_ceiling, limit)
    outlier = (norm > limit) | (loss > loss_ceiling)
    sound = (tl.abs(loss) < float("inf")) & (tl.load(totals + _IN_NONFINITE_BUFFERS) == 0.0)
    finite = (tl.abs(norm) < float("inf")) & sound & (nonfinite == 0.0)
    verdict = tl.where(finite, tl.where(outlier, _NORM_OUTLIER, _APPLIED), _NONFINITE)
    if SCALED:
        verdict = tl.where((finite == 0) & sound, _OVERFLOW, verdict)
    others = tl.load(joint)
    verdict = tl.where(others > verdict, others, verdict)
    tl.store(refuse, tl.where(verdict > _APPLIED, 1.0, 0.0).to(tl.float32))
    tl.store(buffers_tainted, tl.where((verdict > _APPLIED) & (verdict < _OVERFLOW), 1.0, 0.0).to(tl.float32))
    tl.store(out + _OUT_VERDICT, verdict)
    tl.store(out + _OUT_NORM, norm)
    tl.store(out + _OUT_NONFINITE, nonfinite)
    tl.store(out + _OUT_NORM_LIMIT, limit)
    tl.store(out + _OUT_CLIP_THRESHOLD, min_threshold)
    tl.store(out + _OUT_CLIP_FACTOR, min_factor)
    tl.store(out + _OUT_LOSS, loss)
    tl.store(out + _OUT_WEIGHT_NORM, tl.sqrt(tl.load(totals + _IN_PARAM_SQUARES)))
    tl.store(out + _OUT_NONFINITE_PARAMS, tl.load(totals + _IN_NONFINITE_PARAMS))
    update_ratio = tl.sqrt(tl.load(totals + _IN_UPDATE_SQUARES) / tl.load(totals + _IN_SAMPLED_SQUARES))
    tl.store(out + _OUT_UPDATE_RATIO, update_ratio)
    tl.store(out + _OUT_ACTIVE_RANKS, active_ranks)
    if COMMIT:
        applied = (verdict == _APPLIED) & (norm > 0.0)
        if ADAPTIVE:
            for u in range(units):
                entry = norms + u * _NORM_HISTORY + (count.to(tl.int64) % _NORM_HISTORY)
                tl.store(entry, tl.sqrt(tl.load(totals + _UNITS_START + 2 * (first_unit + u))), mask=applied)
        decayed = tl.where(recent_max * max_decay > norm, recent_max * max_decay, norm)
        tl.store(baseline, tl.where(applied, decayed, recent_max))
        tl.store(baseline + 1, tl.where(applied & (norm > max_ever), norm, max_ever))
        tl.store(baseline + 2, count + tl.where(applied, 1.0, 0.0))
