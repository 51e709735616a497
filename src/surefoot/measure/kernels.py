"""The Triton kernels: statistics of all tensors in one launch, then two small reductions; bitwise repeatable.

Every sum is a tree inside one program or a loop in fixed order; nothing is added atomically, so the same gradients
give the same bits. `decide` is the rule of `gate.decide` on the device: keep the two in step.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 32768
"""Elements one program walks over."""
BLOCK = 1024
"""Elements it holds in registers at a time; a chunk has under 128 of these, so that four counts fit into one word."""
WARPS = 4


@triton.jit
def measure_chunks(
    addresses,
    numels,
    kinds,
    firsts,
    owners,
    scale,
    partial,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program a chunk: sum, squared deviation, largest, zeros, non-finite, tiny, sub."""
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    address = tl.load(addresses + owner)
    if address != 0:
        start = (chunk - tl.load(firsts + owner)).to(tl.int64) * CHUNK
        length = tl.minimum(tl.load(numels + owner) - start, CHUNK).to(tl.int32)
        kind = tl.load(kinds + owner)
        singles = address.to(tl.pointer_type(tl.float32)) + start
        brains = address.to(tl.pointer_type(tl.bfloat16)) + start
        halves = address.to(tl.pointer_type(tl.float16)) + start
        if ALIGNED:  # lets the compiler load sixteen bytes at a time
            length = tl.multiple_of(length, 8)
            singles = tl.multiple_of(singles, 16)
            brains = tl.multiple_of(brains, 16)
            halves = tl.multiple_of(halves, 16)
        factor = 1.0
        if SCALED:
            factor = 1.0 / tl.load(scale).to(tl.float32)
        centre = 0.0
        offs = tl.zeros((BLOCK,), tl.float32)
        offs2 = tl.zeros((BLOCK,), tl.float32)
        largest = tl.zeros((BLOCK,), tl.float32)
        counts = tl.zeros((BLOCK,), tl.int32)
        for block in range(0, length, BLOCK):
            at = block + tl.arange(0, BLOCK)
            here = at < length
            if KIND == 0:
                raw = tl.load(singles + at, here, 0.0)
            elif KIND == 1:
                raw = tl.load(brains + at, here, 0.0).to(tl.float32)
            elif KIND == 2:
                raw = tl.load(halves + at, here, 0.0).to(tl.float32)
            else:  # tensors of several kinds: each program asks for its own
                raw = tl.load(singles + at, here & (kind == 0), 0.0)
                raw += tl.load(brains + at, here & (kind == 1), 0.0).to(tl.float32)
                raw += tl.load(halves + at, here & (kind == 2), 0.0).to(tl.float32)
            finite = tl.abs(raw) < float("inf")
            value = tl.where(finite, raw, 0.0)
            if SCALED:
                value *= factor
            size = tl.abs(value)
            if block == 0:  # deviations are taken from the mean of the first block: near the mean, so nothing cancels
                centre = tl.sum(value) / tl.minimum(length, BLOCK).to(tl.float32)
            off = tl.where(finite & here, value - centre, 0.0)
            offs += off
            offs2 += off * off
            largest = tl.maximum(largest, size)
            # What is not finite and what lies behind the end counts as zero here, and is taken off below.
            counts += tl.where(size == 0.0, 1, 0) + tl.where(finite, 0, 256)
            counts += tl.where(size < 6.1e-5, 65536, 0) + tl.where(size < 5.96e-8, 16777216, 0)
        none = tl.sum(counts & 255)
        nonfinite = tl.sum((counts >> 8) & 255)
        behind = tl.cdiv(length, BLOCK) * BLOCK - length
        kept = (length - nonfinite).to(tl.float32)
        drift = tl.sum(offs)
        tl.store(partial + chunk, centre * kept + drift)
        tl.store(partial + chunks + chunk, tl.maximum(tl.sum(offs2) - drift * drift / tl.maximum(kept, 1.0), 0.0))
        tl.store(partial + 2 * chunks + chunk, tl.max(largest))
        tl.store(partial + 3 * chunks + chunk, (none - nonfinite - behind).to(tl.float32))
        tl.store(partial + 4 * chunks + chunk, nonfinite.to(tl.float32))
        tl.store(partial + 5 * chunks + chunk, (tl.sum((counts >> 16) & 255) - none).to(tl.float32))
        tl.store(partial + 6 * chunks + chunk, (tl.sum((counts >> 24) & 255) - none).to(tl.float32))


@triton.jit
def reduce_chunks(addresses, numels, firsts, partial, stats, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One program a tensor: its chunks in fixed order, in float64, to one row of LAYER_STATS."""
    tensor = tl.program_id(0)
    row = stats + tensor * 8
    lane = tl.arange(0, 8)
    if tl.load(addresses + tensor) == 0:
        tl.store(row + lane, tl.where(lane == 5, -1.0, 0.0))
    else:
        numel = tl.load(numels + tensor)
        first = tl.load(firsts + tensor)
        last = tl.load(firsts + tensor + 1)
        total = tl.zeros((BLOCK,), tl.float64)
        largest = tl.zeros((BLOCK,), tl.float32)
        zeros = tl.zeros((BLOCK,), tl.float64)
        nonfinite = tl.zeros((BLOCK,), tl.float64)
        tiny = tl.zeros((BLOCK,), tl.float64)
        sub = tl.zeros((BLOCK,), tl.float64)
        for at in range(first, last, BLOCK):
            c = at + tl.arange(0, BLOCK)
            here = c < last
            total += tl.load(partial + c, here, 0.0).to(tl.float64)
            largest = tl.maximum(largest, tl.load(partial + 2 * chunks + c, here, 0.0))
            zeros += tl.load(partial + 3 * chunks + c, here, 0.0).to(tl.float64)
            nonfinite += tl.load(partial + 4 * chunks + c, here, 0.0).to(tl.float64)
            tiny += tl.load(partial + 5 * chunks + c, here, 0.0).to(tl.float64)
            sub += tl.load(partial + 6 * chunks + c, here, 0.0).to(tl.float64)
        bad = tl.sum(nonfinite)
        whole = tl.maximum(numel, 1).to(tl.float64)
        count = numel.to(tl.float64) - bad
        mean = tl.sum(total) / tl.maximum(count, 1.0)
        m2 = tl.zeros((BLOCK,), tl.float64)
        for at in range(first, last, BLOCK):
            c = at + tl.arange(0, BLOCK)
            here = c < last
            left = numel - (c - first).to(tl.int64) * CHUNK
            n = tl.minimum(left, CHUNK).to(tl.float64) - tl.load(partial + 4 * chunks + c, here, 0.0).to(tl.float64)
            n = tl.where(here, n, 0.0)
            shift = tl.load(partial + c, here, 0.0).to(tl.float64) / tl.maximum(n, 1.0) - mean
            m2 += tl.load(partial + chunks + c, here, 0.0).to(tl.float64) + n * shift * shift
        spread = tl.sum(m2)
        norm = tl.where(bad > 0.0, float("nan"), tl.sqrt(spread + count * mean * mean))
        std = tl.sqrt(spread / tl.maximum(count - 1.0, 1.0))
        tl.store(row, norm.to(tl.float32))
        tl.store(row + 1, mean.to(tl.float32))
        tl.store(row + 2, std.to(tl.float32))
        tl.store(row + 3, tl.max(largest))
        tl.store(row + 4, (tl.sum(zeros) / whole).to(tl.float32))
        tl.store(row + 5, bad.to(tl.float32))
        tl.store(row + 6, (tl.sum(tiny) / whole).to(tl.float32))
        tl.store(row + 7, (tl.sum(sub) / whole).to(tl.float32))


@triton.jit(do_not_specialize=["micro"])  # a 1 would arrive as a constant without a type
def summarise(
    stats,
    once,
    spans,
    units,
    loss,
    weight,
    summary,
    micros,
    micro,
    HEAD: tl.constexpr,
    WATCHED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: squares and non-finite counts of each unit; the loss is added to those of earlier micro-batches."""
    value = tl.load(loss).to(tl.float64)
    if WEIGHTED:
        value *= tl.load(weight).to(tl.float64)
    squares_all = tl.sum(tl.zeros((BLOCK,), tl.float64))
    bad_all = tl.sum(tl.zeros((BLOCK,), tl.float64))
    for u in range(units):
        low = tl.load(spans + 2 * u)
        high = tl.load(spans + 2 * u + 1)
        squares = tl.zeros((BLOCK,), tl.float64)
        bad = tl.zeros((BLOCK,), tl.float64)
        for at in range(low, high, BLOCK):
            t = at + tl.arange(0, BLOCK)
            here = t < high
            norm = tl.load(stats + t * 8, here, 0.0).to(tl.float64)
            counted = tl.load(once + t, here, 0) != 0
            squares += tl.where(counted, norm * norm, 0.0)
            bad += tl.maximum(tl.load(stats + t * 8 + 5, here, 0.0), 0.0).to(tl.float64)
        tl.store(summary + HEAD + 2 * u, tl.sum(squares))
        tl.store(summary + HEAD + 2 * u + 1, tl.sum(bad))
        squares_all += tl.sum(squares)
        bad_all += tl.sum(bad)
    if WATCHED:
        before = tl.where(micro == 0, 0.0, tl.load(summary))
        tl.store(summary, before + value)
        tl.store(summary + 1, (micro + 1).to(tl.float64))
    slot = micros + 3 * tl.minimum(micro, 63)
    tl.store(slot, value)
    tl.store(slot + 1, squares_all)
    tl.store(slot + 2, bad_all)
