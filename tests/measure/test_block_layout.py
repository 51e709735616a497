"""The block has the same layout on the device and on the host."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from surefoot.measure.block_layout import (
    MAX_MICROBATCHES,
    NUM_CHECKSUMS,
    BlockLayout,
    HostBlock,
    SharedSlot,
    SummarySlot,
    VerdictSlot,
    settings_index,
)
from surefoot.records import LAYER_STATS


@pytest.mark.parametrize("slots", [SummarySlot, VerdictSlot, SharedSlot])
def test_slots_count_from_zero(slots: type[SummarySlot] | type[VerdictSlot] | type[SharedSlot]) -> None:
    assert [slot.value for slot in slots] == list(range(len(slots)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_written_on_the_device_are_read_on_the_host(dtype: torch.dtype) -> None:
    layout = BlockLayout(dtype, tensors=3, units=2, buffers=4, world_size=1, optimizers=1)
    raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
    block = layout.view_device(raw)
    for start, part in enumerate(
        (block.verdict, block.summary, block.buffer_nonfinite, block.microbatches, block.stats)
    ):
        part.copy_(torch.arange(part.numel()).view(part.shape) + 1000 * start)
    host = HostBlock(raw.numpy().copy(), layout)
    assert host.verdict == tuple(block.verdict.tolist())
    assert host.summary == tuple(block.summary[: len(SummarySlot)].tolist())
    assert host.buffer_nonfinite.tolist() == block.buffer_nonfinite.tolist()
    assert host.microbatches.shape == (MAX_MICROBATCHES, 3)
    assert host.microbatches.tolist() == block.microbatches.tolist()
    assert host.stats.shape == (3, len(LAYER_STATS))
    assert host.stats.tolist() == block.stats.tolist()
    assert len(host.rank_losses) == len(host.shared) == len(host.replica_checksums) == 0


def test_several_ranks() -> None:
    """Rank 2 is disabled and sends zeros; rank 1 owns no weights and has other gradients than rank 0."""
    layout = BlockLayout(torch.float64, tensors=1, units=1, buffers=0, world_size=3, optimizers=2)
    raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
    block = layout.view_device(raw)
    for rank in range(2):
        summary, values = block.rank_summaries[rank], block.rank_values[rank]
        summary[SummarySlot.ACTIVE_RANKS] = 1.0
        summary[SummarySlot.LOSS] = 5.0 + rank
        summary[SummarySlot.UNCHANGED_FRACTION] = math.nan if rank else 0.25
        summary[SummarySlot.INPUT_MEAN] = 2.0 * rank
        values[:-NUM_CHECKSUMS] = math.nan
        values[SharedSlot.HAS_LOSS] = 1.0
        values[SharedSlot.INPUTS_MEASURED] = float(rank)
        values[settings_index(1)] = 0.1
        values[-NUM_CHECKSUMS:] = torch.tensor([10.0 + rank, 7.0, 8.0, 9.0])
    host = HostBlock(raw.numpy().copy(), layout)
    assert host.rank_losses.tolist() == [5.0, 6.0, 0.0]
    assert host.summary[SummarySlot.UNCHANGED_FRACTION] == 0.25
    assert host.summary[SummarySlot.INPUT_MEAN] == 1.0
    assert host.shared[SharedSlot.HAS_LOSS] == 1.0
    assert host.shared[SharedSlot.INPUTS_MEASURED] == 0.5
    assert np.isnan(host.shared[SharedSlot.SAMPLES])
    assert host.shared[settings_index(1)] == pytest.approx(0.1)
    assert host.shared[SharedSlot.GRADS_DIFFER] == 1.0
    assert host.shared[SharedSlot.APPLIED_GRADS_DIFFER] == 0.0
    assert host.replica_checksums[:2].tolist() == [[8.0, 9.0], [8.0, 9.0]]
    assert np.isnan(host.replica_checksums[2]).all()
