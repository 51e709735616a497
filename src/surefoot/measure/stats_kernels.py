"""Triton kernels that measure: statistics of all tensors in one launch, then two small reductions; bitwise repeatable.

Every sum is a tree inside one program or a loop in fixed order. There are no atomic adds, so the same gradients give
the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surefoot.measure.block_layout import (
    MAX_MICROBATCHES,
    NONFINITE_COLUMN,
    NORM_COLUMN,
    UNITS_START,
    SummarySlot,
)
from surefoot.records import LAYER_STATS

CHUNK = 32768
"""Elements one program reads."""
BLOCK = 1024
"""Elements it holds in registers at a time; a chunk has under 128 of these, so that four counts fit into one word."""
WARPS = 4

# Triton reads only `constexpr` globals inside a kernel.
_COLUMNS = tl.constexpr(len(LAYER_STATS))
_NORM = tl.constexpr(NORM_COLUMN)
_MEAN = tl.constexpr(LAYER_STATS.index("mean"))
_STD = tl.constexpr(LAYER_STATS.index("std"))
_ABSMAX = tl.constexpr(LAYER_STATS.index("absmax"))
_ZEROS = tl.constexpr(LAYER_STATS.index("zeros"))
_NONFINITE = tl.constexpr(NONFINITE_COLUMN)
_TINY = tl.constexpr(LAYER_STATS.index("tiny"))
_SUB = tl.constexpr(LAYER_STATS.index("sub"))
_LOSS = tl.constexpr(int(SummarySlot.LOSS))
_NUM_MICROBATCHES = tl.constexpr(int(SummarySlot.NUM_MICROBATCHES))
_UNITS_START = tl.constexpr(UNITS_START)
_LAST_MICROBATCH = tl.constexpr(MAX_MICROBATCHES - 1)


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
    """One program a chunk: sum, squared deviation, absmax, zeros, non-finite, tiny, sub."""
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    address = tl.load(addresses + owner)
    if address != 0:
        start = (chunk - tl.load(firsts + owner)).to(tl.int64) * CHUNK
        length = tl.minimum(tl.load(numels + owner) - start, CHUNK).to(tl.int32)
        kind = tl.load(kinds + owner)
        fp32 = address.to(tl.pointer_type(tl.float32)) + start
        bf16 = address.to(tl.pointer_type(tl.bfloat16)) + start
        fp16 = address.to(tl.pointer_type(tl.float16)) + start
        if ALIGNED:  # lets the compiler load 16 bytes at a time
            length = tl.multiple_of(length, 8)
            fp32 = tl.multiple_of(fp32, 16)
            bf16 = tl.multiple_of(bf16, 16)
            fp16 = tl.multiple_of(fp16, 16)
        factor = 1.0
        if SCALED:
            factor = 1.0 / tl.load(scale).to(tl.float32)
        center = 0.0
        deviations = tl.zeros((BLOCK,), tl.float32)
        deviations2 = tl.zeros((BLOCK,), tl.float32)
        absmax = tl.zeros((BLOCK,), tl.float32)
        counts = tl.zeros((BLOCK,), tl.int32)
        for block in range(0, length, BLOCK):
            offset = block + tl.arange(0, BLOCK)
            mask = offset < length
            if KIND == 0:
                raw = tl.load(fp32 + offset, mask, 0.0)
            elif KIND == 1:
                raw = tl.load(bf16 + offset, mask, 0.0).to(tl.float32)
            elif KIND == 2:
                raw = tl.load(fp16 + offset, mask, 0.0).to(tl.float32)
            else:  # tensors of several dtypes: each program selects its own
                raw = tl.load(fp32 + offset, mask & (kind == 0), 0.0)
                raw += tl.load(bf16 + offset, mask & (kind == 1), 0.0).to(tl.float32)
                raw += tl.load(fp16 + offset, mask & (kind == 2), 0.0).to(tl.float32)
            finite = tl.abs(raw) < float("inf")
            value = tl.where(finite, raw, 0.0)
            if SCALED:
                value *= factor
            size = tl.abs(value)
            if block == 0:  # deviations from the mean of the first block, which is near the mean: nothing cancels
                center = tl.sum(value) / tl.minimum(length, BLOCK).to(tl.float32)
            deviation = tl.where(finite & mask, value - center, 0.0)
            deviations += deviation
            deviations2 += deviation * deviation
            absmax = tl.maximum(absmax, size)
            # Non-finite values and lanes past the end count as zeros here and are subtracted below.
            counts += tl.where(size == 0.0, 1, 0) + tl.where(finite, 0, 256)
            counts += tl.where(size < 6.1e-5, 65536, 0) + tl.where(size < 5.96e-8, 16777216, 0)
        num_zeros = tl.sum(counts & 255)
        nonfinite = tl.sum((counts >> 8) & 255)
        past_end = tl.cdiv(length, BLOCK) * BLOCK - length
        num_finite = (length - nonfinite).to(tl.float32)
        total_deviation = tl.sum(deviations)
        tl.store(partial + chunk, center * num_finite + total_deviation)
        tl.store(
            partial + chunks + chunk,
            tl.maximum(tl.sum(deviations2) - total_deviation * total_deviation / tl.maximum(num_finite, 1.0), 0.0),
        )
        tl.store(partial + 2 * chunks + chunk, tl.max(absmax))
        tl.store(partial + 3 * chunks + chunk, (num_zeros - nonfinite - past_end).to(tl.float32))
        tl.store(partial + 4 * chunks + chunk, nonfinite.to(tl.float32))
        tl.store(partial + 5 * chunks + chunk, (tl.sum((counts >> 16) & 255) - num_zeros).to(tl.float32))
        tl.store(partial + 6 * chunks + chunk, (tl.sum((counts >> 24) & 255) - num_zeros).to(tl.float32))


@triton.jit
def reduce_chunks(addresses, numels, firsts, partial, stats, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One program a tensor: its chunks in fixed order, in float64, to one row of LAYER_STATS."""
    tensor = tl.program_id(0)
    row = stats + tensor * _COLUMNS
    lane = tl.arange(0, _COLUMNS)
    if tl.load(addresses + tensor) == 0:
        tl.store(row + lane, tl.where(lane == _NONFINITE, -1.0, 0.0))
    else:
        numel = tl.load(numels + tensor)
        first = tl.load(firsts + tensor)
        last = tl.load(firsts + tensor + 1)
        total = tl.zeros((BLOCK,), tl.float64)
        absmax = tl.zeros((BLOCK,), tl.float32)
        zeros = tl.zeros((BLOCK,), tl.float64)
        nonfinite = tl.zeros((BLOCK,), tl.float64)
        tiny = tl.zeros((BLOCK,), tl.float64)
        sub = tl.zeros((BLOCK,), tl.float64)
        for offset in range(first, last, BLOCK):
            c = offset + tl.arange(0, BLOCK)
            mask = c < last
            total += tl.load(partial + c, mask, 0.0).to(tl.float64)
            absmax = tl.maximum(absmax, tl.load(partial + 2 * chunks + c, mask, 0.0))
            zeros += tl.load(partial + 3 * chunks + c, mask, 0.0).to(tl.float64)
            nonfinite += tl.load(partial + 4 * chunks + c, mask, 0.0).to(tl.float64)
            tiny += tl.load(partial + 5 * chunks + c, mask, 0.0).to(tl.float64)
            sub += tl.load(partial + 6 * chunks + c, mask, 0.0).to(tl.float64)
        bad = tl.sum(nonfinite)
        elements = tl.maximum(numel, 1).to(tl.float64)
        count = numel.to(tl.float64) - bad
        mean = tl.sum(total) / tl.maximum(count, 1.0)
        m2 = tl.zeros((BLOCK,), tl.float64)
        for offset in range(first, last, BLOCK):
            c = offset + tl.arange(0, BLOCK)
            mask = c < last
            left = numel - (c - first).to(tl.int64) * CHUNK
            n = tl.minimum(left, CHUNK).to(tl.float64) - tl.load(partial + 4 * chunks + c, mask, 0.0).to(tl.float64)
            n = tl.where(mask, n, 0.0)
            shift = tl.load(partial + c, mask, 0.0).to(tl.float64) / tl.maximum(n, 1.0) - mean
            m2 += tl.load(partial + chunks + c, mask, 0.0).to(tl.float64) + n * shift * shift
        total_m2 = tl.sum(m2)
        norm = tl.where(bad > 0.0, float("nan"), tl.sqrt(total_m2 + count * mean * mean))
        std = tl.sqrt(total_m2 / tl.maximum(count - 1.0, 1.0))
        tl.store(row + _NORM, norm.to(tl.float32))
        tl.store(row + _MEAN, mean.to(tl.float32))
        tl.store(row + _STD, std.to(tl.float32))
        tl.store(row + _ABSMAX, tl.max(absmax))
        tl.store(row + _ZEROS, (tl.sum(zeros) / elements).to(tl.float32))
        tl.store(row + _NONFINITE, bad.to(tl.float32))
        tl.store(row + _TINY, (tl.sum(tiny) / elements).to(tl.float32))
        tl.store(row + _SUB, (tl.sum(sub) / elements).to(tl.float32))


@triton.jit(do_not_specialize=["microbatch"])  # Triton would pass a 1 as an untyped constant
def summarise(
    stats,
    owned,
    spans,
    units,
    loss,
    weight,
    summary,
    microbatches,
    microbatch,
    HAS_LOSS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: squares and non-finite counts of each unit; the loss is added to that of earlier microbatches."""
    value = tl.load(loss).to(tl.float64)
    if HAS_WEIGHT:
        value *= tl.load(weight).to(tl.float64)
    squares_all = tl.sum(tl.zeros((BLOCK,), tl.float64))
    nonfinite_all = tl.sum(tl.zeros((BLOCK,), tl.float64))
    for u in range(units):
        start = tl.load(spans + 2 * u)
        end = tl.load(spans + 2 * u + 1)
        squares = tl.zeros((BLOCK,), tl.float64)
        nonfinite = tl.zeros((BLOCK,), tl.float64)
        for offset in range(start, end, BLOCK):
            t = offset + tl.arange(0, BLOCK)
            mask = t < end
            norm = tl.load(stats + t * _COLUMNS + _NORM, mask, 0.0).to(tl.float64)
            counted = tl.load(owned + t, mask, 0) != 0
            squares += tl.where(counted, norm * norm, 0.0)
            nonfinite += tl.maximum(tl.load(stats + t * _COLUMNS + _NONFINITE, mask, 0.0), 0.0).to(tl.float64)
        tl.store(summary + _UNITS_START + 2 * u, tl.sum(squares))
        tl.store(summary + _UNITS_START + 2 * u + 1, tl.sum(nonfinite))
        squares_all += tl.sum(squares)
        nonfinite_all += tl.sum(nonfinite)
    if HAS_LOSS:
        before = tl.where(microbatch == 0, 0.0, tl.load(summary + _LOSS))
        tl.store(summary + _LOSS, before + value)
        tl.store(summary + _NUM_MICROBATCHES, (microbatch + 1).to(tl.float64))
    line = microbatches + 3 * tl.minimum(microbatch, _LAST_MICROBATCH)
    tl.store(line, value)
    tl.store(line + 1, squares_all)
    tl.store(line + 2, nonfinite_all)
