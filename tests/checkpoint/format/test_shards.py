"""The content of tensors as bytes, small ones batched."""

from __future__ import annotations

import pytest
import torch

from surefoot.checkpoint.format.shards import CHUNK, SMALL, HostStaging, as_bytes

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def _odd(device: str) -> list[torch.Tensor]:
    """Small and large, of all sorts, in an order that keeps them from going together all the time."""
    torch.manual_seed(0)
    made = [
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
    return [t.to(device) for t in made]


@pytest.mark.parametrize("device", DEVICES)
def test_every_byte_comes_once_in_order_and_is_told_whose_it_is(device: str) -> None:
    tensors = _odd(device)
    whole, own = bytearray(), [bytearray() for _ in tensors]
    for part, contents in HostStaging().contents(tensors):
        assert part.nbytes <= CHUNK
        assert part.nbytes == sum(size for _, size in contents)
        whole += part
        begin = 0
        for i, size in contents:
            own[i] += part[begin : begin + size]
            begin += size
    expected = [as_bytes(t).cpu().numpy().tobytes() for t in tensors]
    assert [bytes(found) for found in own] == expected
    assert bytes(whole) == b"".join(expected)


def test_hundreds_of_small_tensors_come_as_one_piece() -> None:
    assert len(list(HostStaging().contents([torch.full((8,), float(i)) for i in range(500)]))) == 1
