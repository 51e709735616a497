"""Tensors are staged as bytes, small ones batched."""

from __future__ import annotations

import pytest
import torch

from surefoot.checkpoint.format.shards import CHUNK, SMALL, HostStaging, as_bytes

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def _odd(device: str) -> list[torch.Tensor]:
    """Small and large tensors of many kinds, ordered so that not all small ones fit one batch."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 5),
        torch.randn(7),
        torch.tensor(4.0),
        torch.empty(0, 4),
        torch.randn(6, 4).T,
        torch.randn(11),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randint(0, 9, (5,)),
        torch.tensor([True, False, True]),
        torch.randn(9, dtype=torch.bfloat16),
        torch.randn(SMALL // 4 - 1),
        torch.randn(SMALL // 4),
        torch.randn(3),
        torch.randn(CHUNK // 4 + 3),
        torch.randn(2),
    ]
    return [t.to(device) for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
def test_every_byte_is_staged_once_in_order_with_its_tensor(device: str) -> None:
    tensors = _odd(device)
    all_bytes, bytes_by_tensor = bytearray(), [bytearray() for _ in tensors]
    for chunk, contents in HostStaging().contents(tensors):
        assert chunk.nbytes <= CHUNK
        assert chunk.nbytes == sum(size for _, size in contents)
        all_bytes += chunk
        begin = 0
        for i, size in contents:
            bytes_by_tensor[i] += chunk[begin : begin + size]
            begin += size
    expected = [as_bytes(t).cpu().numpy().tobytes() for t in tensors]
    assert [bytes(data) for data in bytes_by_tensor] == expected
    assert bytes(all_bytes) == b"".join(expected)


def test_hundreds_of_small_tensors_are_staged_as_one_chunk() -> None:
    assert len(list(HostStaging().contents([torch.full((8,), float(i)) for i in range(500)]))) == 1
