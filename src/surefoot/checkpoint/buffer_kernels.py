"""Triton kernels: buffer commit or revert, counts of non-finite buffer values, and checksums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def commit_or_revert(table, refused, count, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the shadow to the buffer if refused, else the buffer to the shadow if KEEP; programs share its bytes."""
    i = tl.program_id(0)
    live = tl.load(table + i).to(tl.pointer_type(tl.uint8))
    shadow = tl.load(table + count + i).to(tl.pointer_type(tl.uint8))
    size = tl.load(table + 2 * count + i)
    bad = tl.zeros((BLOCK,), tl.float32) + tl.load(refused) > 0
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < size
        tl.store(live + at, tl.load(shadow + at, mask & bad, 0), mask & bad)
        if KEEP:
            tl.store(shadow + at, tl.load(live + at, mask & (bad == 0), 0), mask & (bad == 0))


@triton.jit
def count_nonfinite(table, counts, total, pairs, BLOCK: tl.constexpr):
    """Count values that are finite in the shadow and not in the buffer; programs share the values of one buffer.

    Counts are integers, so that atomic sums do not depend on the order.
    """
    i = tl.program_id(0)
    live = tl.load(table + i)
    shadow = tl.load(table + pairs + i)
    size = tl.load(table + 2 * pairs + i)
    width = tl.load(table + 3 * pairs + i)
    exponent = tl.load(table + 4 * pairs + i)
    allowed = tl.load(table + 5 * pairs + i)
    index = tl.load(table + 6 * pairs + i)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < size
        now = tl.load(live.to(tl.pointer_type(tl.int16)) + at, mask & (width == 2), 0).to(tl.int64)
        now += tl.load(live.to(tl.pointer_type(tl.int32)) + at, mask & (width == 4), 0).to(tl.int64)
        now += tl.load(live.to(tl.pointer_type(tl.int64)) + at, mask & (width == 8), 0)
        was = tl.load(shadow.to(tl.pointer_type(tl.int16)) + at, mask & (width == 2), 0).to(tl.int64)
        was += tl.load(shadow.to(tl.pointer_type(tl.int32)) + at, mask & (width == 4), 0).to(tl.int64)
        was += tl.load(shadow.to(tl.pointer_type(tl.int64)) + at, mask & (width == 8), 0)
        worse = ((now & exponent) == exponent) & ((was & exponent) != exponent) & (now != allowed)
        bad += tl.where(worse, 1, 0)
    found = tl.sum(bad)
    if found > 0:
        tl.atomic_add(counts + index, found.to(tl.float64))
        tl.atomic_add(total, found.to(tl.float64))


@triton.jit
def checksum_words(
    table, sums, count, POSITION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr
):
    """Mix and sum the 64-bit words of one tensor, shared by programs; integer sums do not depend on the order."""
    i = tl.program_id(0)
    words = tl.load(table + i).to(tl.pointer_type(tl.int64))
    size = tl.load(table + count + i)
    index = tl.load(table + 2 * count + i)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, size, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = at < size
        mixed = (tl.load(words + at, mask, 0) + at * POSITION) * FIRST
        mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * SECOND
        total += tl.where(mask, mixed ^ ((mixed >> 32) & 0xFFFFFFFF), 0)
    tl.atomic_add(sums + index, tl.sum(total))
