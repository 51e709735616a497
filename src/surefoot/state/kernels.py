"""Copies between buffers and their shadow, in the direction the device itself has decided on."""

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
