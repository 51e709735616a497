"""The rule of `gate.decide` as one small Triton kernel; keep the two in step, a test compares them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decide(
    totals,
    said,
    baseline,
    ceilings,
    thresholds,
    norms,
    factors,
    refuse,
    spoilt,
    divisor,
    joint,
    own,
    units,
    figures,
    HEAD: tl.constexpr,
    MEMORY: tl.constexpr,
    SCALED: tl.constexpr,
    REMEMBERS: tl.constexpr,
    COMMIT: tl.constexpr,
):
    factor = tl.load(figures)
    warmup = tl.load(figures + 1)
    fade = tl.load(figures + 2)
    recent = tl.load(baseline)
    ever = tl.load(baseline + 1)
    count = tl.load(baseline + 2)
    norm_ceiling = tl.load(ceilings)
    loss_ceiling = tl.load(ceilings + 1)
    clip = tl.load(ceilings + 2)
    squares = recent * 0.0
    nonfinite = recent * 0.0
    lowest = recent * 0.0 + 1.0
    tightest = recent * 0.0 + float("inf")
    for u in range(units):
        square = tl.load(totals + HEAD + 2 * (own + u))
        nonfinite += tl.load(totals + HEAD + 2 * (own + u) + 1)
        squares += square
        threshold = tl.load(thresholds + u)
        threshold = tl.where(clip < threshold, clip, threshold)
        each = threshold / (tl.sqrt(square) + 1e-6)
        each = tl.where(each < 1.0, each, 1.0)
        tl.store(factors + u, each.to(tl.float32))
        if u == 0:
            tl.store(divisor, (1.0 / each).to(tl.float32))
        lowest = tl.where(each < lowest, each, lowest)
        tightest = tl.where(threshold < tightest, threshold, tightest)
    norm = tl.sqrt(squares)
    alive = tl.load(totals + 2)
    loss = tl.load(totals) / tl.where(alive < 1.0, 1.0, alive)
    limit = tl.where(recent * factor > ever, recent * factor, ever)
    limit = tl.where(count >= warmup, limit, float("inf"))
    limit = tl.where(norm_ceiling < limit, norm_ceiling, limit)
    outlandish = (norm > limit) | (loss > loss_ceiling)
    sound = (tl.abs(loss) < float("inf")) & (tl.load(totals + 13) == 0.0)
    good = (tl.abs(norm) < float("inf")) & sound & (nonfinite == 0.0)
    verdict = tl.where(good, tl.where(outlandish, 2.0, 0.0), 1.0)
    if SCALED:
        verdict = tl.where((good == 0) & sound, 3.0, verdict)
    others = tl.load(joint)
    verdict = tl.where(others > verdict, others, verdict)
    tl.store(refuse, tl.where(verdict > 0.0, 1.0, 0.0).to(tl.float32))
    tl.store(spoilt, tl.where((verdict > 0.0) & (verdict < 3.0), 1.0, 0.0).to(tl.float32))
    tl.store(said, verdict)
    tl.store(said + 1, norm)
    tl.store(said + 2, nonfinite)
    tl.store(said + 3, limit)
    tl.store(said + 4, tightest)
    tl.store(said + 5, lowest)
    tl.store(said + 6, loss)
    tl.store(said + 9, tl.sqrt(tl.load(totals + 3)))
    tl.store(said + 10, tl.load(totals + 4))
    tl.store(said + 11, tl.sqrt(tl.load(totals + 5) / tl.load(totals + 6)))
    tl.store(said + 12, alive)
    if COMMIT:
        landed = (verdict == 0.0) & (norm > 0.0)
        if REMEMBERS:
            for u in range(units):
                place = norms + u * MEMORY + (count.to(tl.int64) % MEMORY)
                tl.store(place, tl.sqrt(tl.load(totals + HEAD + 2 * (own + u))), mask=landed)
        kept = tl.where(recent * fade > norm, recent * fade, norm)
        tl.store(baseline, tl.where(landed, kept, recent))
        tl.store(baseline + 1, tl.where(landed & (norm > ever), norm, ever))
        tl.store(baseline + 2, count + tl.where(landed, 1.0, 0.0))
