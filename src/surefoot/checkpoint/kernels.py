"""Buffers and their shadow: what became non-finite is counted, copies go the way the device decides; checksums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def settle(table, refused, count, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Programs share the bytes of one buffer: from the shadow when refused, else to it when it is to keep."""
    i = tl.program_id(0)
    live = tl.load(table + i).to(tl.pointer_type(tl.uint8))
    kept = tl.load(table + count + i).to(tl.pointer_type(tl.uint8))
    size = tl.load(table + 2 * count + i)
    bad = tl.zeros((BLOCK,), tl.float32) + tl.load(refused) > 0
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < size
        tl.store(live + at, tl.load(kept + at, here & bad, 0), here & bad)
        if KEEP:
            tl.store(kept + at, tl.load(live + at, here & (bad == 0), 0), here & (bad == 0))


@triton.jit
def count_nonfinite(table, counts, total, pairs, BLOCK: tl.constexpr):
    """Programs share the values of one buffer: finite in the shadow, and not any more in the buffer.

    Counts are whole numbers, so that atomic sums are the same in any order.
    """
    i = tl.program_id(0)
    live = tl.load(table + i)
    kept = tl.load(table + pairs + i)
    size = tl.load(table + 2 * pairs + i)
    width = tl.load(table + 3 * pairs + i)
    exponent = tl.load(table + 4 * pairs + i)
    allowed = tl.load(table + 5 * pairs + i)
    number = tl.load(table + 6 * pairs + i)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < size
        now = tl.load(live.to(tl.pointer_type(tl.int16)) + at, here & (width == 2), 0).to(tl.int64)
        now += tl.load(live.to(tl.pointer_type(tl.int32)) + at, here & (width == 4), 0).to(tl.int64)
        now += tl.load(live.to(tl.pointer_type(tl.int64)) + at, here & (width == 8), 0)
        was = tl.load(kept.to(tl.pointer_type(tl.int16)) + at, here & (width == 2), 0).to(tl.int64)
        was += tl.load(kept.to(tl.pointer_type(tl.int32)) + at, here & (width == 4), 0).to(tl.int64)
        was += tl.load(kept.to(tl.pointer_type(tl.int64)) + at, here & (width == 8), 0)
        worse = ((now & exponent) == exponent) & ((was & exponent) != exponent) & (now != allowed)
        bad += tl.where(worse, 1, 0)
    found = tl.sum(bad)
    if found > 0:
        tl.atomic_add(counts + number, found.to(tl.float64))
        tl.atomic_add(total, found.to(tl.float64))


@triton.jit
def checksum_words(
    table, sums, count, POSITION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs share the 64-bit words of one tensor; sums of whole numbers are the same in any order."""
    i = tl.program_id(0)
    words = tl.load(table + i).to(tl.pointer_type(tl.int64))
    size = tl.load(table + count + i)
    place = tl.load(table + 2 * count + i)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, size, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        here = at < size
        mixed = (tl.load(words + at, here, 0) + at * POSITION) * FIRST
        mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * SECOND
        total += tl.where(here, mixed ^ ((mixed >> 32) & 0xFFFFFFFF), 0)
    tl.atomic_add(sums + place, tl.sum(total))
