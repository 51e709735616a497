"""Rows arrive in order, complete, and exactly `LAG` sends later."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.measure.block_layout import LAG, AsyncReadback


def test_rows_arrive_two_sends_later_and_in_order(device: torch.device) -> None:
    readback: AsyncReadback[int] = AsyncReadback(16, device)
    row = torch.zeros(16, dtype=torch.uint8, device=device)
    seen: list[int] = []
    for i in range(20):
        row.fill_(i)
        readback.send(row, i)
        row.fill_(255)  # the device overwrites the buffer
        arrived = list(readback.receive())
        assert [tag for _, tag in arrived] == ([i - LAG] if i >= LAG else [])
        for content, tag in arrived:
            assert (content == tag).all()
            seen.append(tag)
            content[:] = 99  # the returned array belongs to the reader
    assert [tag for _, tag in readback.receive(drain=True)] == [18, 19]
    assert list(readback.receive(drain=True)) == []
    assert seen == list(range(18))
    assert LAG == 2


def test_drain_waits_for_the_device(cuda: torch.device) -> None:
    readback: AsyncReadback[str] = AsyncReadback(8, cuda)
    row = torch.zeros(8, dtype=torch.uint8, device=cuda)
    torch.cuda._sleep(50_000_000)
    row.fill_(7)
    readback.send(row, "late")
    ((content, tag),) = readback.receive(drain=True)
    assert tag == "late"
    assert np.array_equal(content, np.full(8, 7, dtype=np.uint8))


def test_sending_before_receiving_raises() -> None:
    readback: AsyncReadback[int] = AsyncReadback(4, torch.device("cpu"))
    row = torch.zeros(4, dtype=torch.uint8)
    for i in range(LAG + 1):
        readback.send(row, i)
    with pytest.raises(AssertionError, match="not received"):
        readback.send(row, LAG + 1)
