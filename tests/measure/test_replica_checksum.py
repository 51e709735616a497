"""Checksum of the weights: equal for equal bits, different after any small change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.measure.cross_rank import ReplicaChecksum

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def measured(params: list[Tensor], replicated: list[bool] | None = None) -> float:
    out = torch.zeros(2, dtype=torch.float64)
    ReplicaChecksum(params, replicated or [True] * len(params), CPU).measure(out)
    return float(out[0])


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 7, dtype=dtype), torch.randn(11, dtype=dtype), torch.randn(2, 3, 4, 4, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_weights_have_equal_checksums(dtype: torch.dtype) -> None:
    assert measured(weights(dtype)) == measured(weights(dtype))
    assert measured(weights(dtype)).is_integer(), "so that it is exact in float64"


@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize("factor", [-1.0, 2.0, 1.01])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_value_changes_the_checksum(dtype: torch.dtype, factor: float, tensor: int) -> None:
    changed = weights(dtype)
    changed[tensor].view(-1)[3] *= factor
    assert measured(changed) != measured(weights(dtype))


def test_the_last_bit_changes_the_checksum() -> None:
    changed = weights()
    changed[0][1, 1] = torch.nextafter(changed[0][1, 1], torch.tensor(torch.inf))
    assert measured(changed) != measured(weights())


def test_nonfinite_values_change_the_checksum() -> None:
    changed = weights()
    changed[1][2] = torch.nan
    assert measured(changed) == measured([t.clone() for t in changed])
    assert measured(changed) != measured(weights())


def test_swapped_tensors_change_the_checksum() -> None:
    a, b = torch.randn(6), torch.randn(6)
    assert measured([a, b]) != measured([b, a])


def test_the_memory_format_does_not_matter() -> None:
    first, second, third = weights()
    assert measured([first, second, third.to(memory_format=torch.channels_last)]) == measured(weights())


def test_only_replicated_params_count() -> None:
    changed = weights()
    changed[1] += 1.0
    assert measured(changed, [True, False, True]) == measured(weights(), [True, False, True])
