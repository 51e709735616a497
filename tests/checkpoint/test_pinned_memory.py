"""Pinned copies have the layout of their tensors, do not overlap, and are unpinned."""

from __future__ import annotations

import gc

import pytest
import torch

from surefoot.checkpoint import snapshot_memory
from surefoot.checkpoint.snapshot_memory import CHUNK_BYTES, pinned_like


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that are pinned now."""
    held: set[int] = set()
    monkeypatch.setattr(snapshot_memory, "pin", lambda memory: held.add(memory.data_ptr()))
    monkeypatch.setattr(snapshot_memory, "unpin", lambda memory: held.discard(memory.data_ptr()))
    return held


def test_rooms_are_like_their_tensors_and_do_not_touch(pinned: set[int]) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    tensors = [torch.randn(3, 5, 7).to(kind) for kind in kinds]
    tensors += [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(0)]
    tensors += [torch.tensor(3.0), torch.randn(CHUNK_BYTES // 4 + 1), torch.randn(5)]
    rooms, held = pinned_like(tensors)
    for room, t in zip(rooms, tensors, strict=True):
        assert (room.shape, room.dtype, room.stride()) == (t.shape, t.dtype, torch.empty_like(t).stride())
        room.copy_(t)
    assert all(torch.equal(room, t) for room, t in zip(rooms, tensors, strict=True))
    assert all(room.data_ptr() % 256 == 0 for room in rooms if room.numel())
    assert len(held) == len(pinned) == 3, "what is larger than a piece has one to itself"


def test_pages_are_given_back_with_their_owner(pinned: set[int]) -> None:
    rooms, held = pinned_like([torch.zeros(10)])
    assert len(pinned) == 1
    del held
    gc.collect()
    assert not pinned
    assert rooms[0].zero_().sum() == 0, "and the memory is there as long as anybody looks at it"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_a_gpu_they_are_written_to_without_a_wait() -> None:
    t = torch.randn(1 << 20, device="cuda")
    (room,), held = pinned_like([t])
    assert room.is_pinned()
    room.copy_(t, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(room, t.cpu())
    del held
    gc.collect()
    assert not room.is_pinned()
