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
    addresses: set[int] = set()
    monkeypatch.setattr(snapshot_memory, "pin", lambda memory: addresses.add(memory.data_ptr()))
    monkeypatch.setattr(snapshot_memory, "unpin", lambda memory: addresses.discard(memory.data_ptr()))
    return addresses


def test_pinned_copies_have_the_tensors_layout_and_do_not_overlap(pinned: set[int]) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    tensors = [torch.randn(3, 5, 7).to(kind) for kind in kinds]
    tensors += [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(0)]
    tensors += [torch.tensor(3.0), torch.randn(CHUNK_BYTES // 4 + 1), torch.randn(5)]
    copies, owners = pinned_like(tensors)
    for copy, t in zip(copies, tensors, strict=True):
        assert (copy.shape, copy.dtype, copy.stride()) == (t.shape, t.dtype, torch.empty_like(t).stride())
        copy.copy_(t)
    assert all(torch.equal(copy, t) for copy, t in zip(copies, tensors, strict=True))
    assert all(copy.data_ptr() % 256 == 0 for copy in copies if copy.numel())
    assert len(owners) == len(pinned) == 3, "a tensor larger than a chunk has its own allocation"


def test_memory_is_unpinned_with_its_owner(pinned: set[int]) -> None:
    copies, owners = pinned_like([torch.zeros(10)])
    assert len(pinned) == 1
    del owners
    gc.collect()
    assert not pinned
    assert copies[0].zero_().sum() == 0, "the memory lives as long as a tensor refers to it"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_copy_from_a_gpu_is_asynchronous() -> None:
    t = torch.randn(1 << 20, device="cuda")
    (copy,), owners = pinned_like([t])
    assert copy.is_pinned()
    copy.copy_(t, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(copy, t.cpu())
    del owners
    gc.collect()
    assert not copy.is_pinned()
