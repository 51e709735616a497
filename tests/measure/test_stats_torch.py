"""Per-tensor statistics in plain torch operations, against a float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_stats import ABSENT, DTYPES, LAYOUTS, PLANTED, assert_row, odd_tensor, reference

from surefoot.measure.stats_torch import _PIECE, TorchStats, _row_on_device
from surefoot.records import LAYER_STATS

CPU = torch.device("cpu")
SCALES = (None, 1.0, 1024.0, 65536.0, 0.25)


def measured(tensor: torch.Tensor | None, *, numel: int | None = None, scale: float | None = None) -> torch.Tensor:
    """The measured row, on the tensor's device."""
    device = CPU if tensor is None else tensor.device
    numel = numel if tensor is None or numel is not None else tensor.numel()
    assert numel is not None
    out = torch.full((1, len(LAYER_STATS)), 7.7, device=device)
    factor = None if scale is None else torch.tensor(scale, device=device)
    TorchStats([numel], device).measure([tensor], out=out, scale=factor)
    return out[0].cpu()


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-6, 3),
    offset=st.sampled_from((0.0, 1.0, -10.0)),
    planted=st.lists(st.sampled_from(PLANTED), max_size=4).map(tuple),
    scale=st.sampled_from(SCALES),
)
def test_host_and_device_forms_agree_with_float64(
    layout: str,
    dtype: torch.dtype,
    seed: int,
    exponent: int,
    offset: float,
    planted: tuple[float, ...],
    scale: float | None,
) -> None:
    tensor = odd_tensor(layout, dtype, seed=seed, size=10.0**exponent, offset=offset, planted=planted)
    factor = None if scale is None else torch.tensor(scale)
    assert_row(measured(tensor, scale=scale), tensor, scale or 1.0, where=("host", layout))
    assert_row(_row_on_device(tensor, tensor.numel(), factor), tensor, scale or 1.0, where=("device form", layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_agrees_with_float64(dtype: torch.dtype, cuda: torch.device) -> None:
    for layout in sorted(LAYOUTS):
        for seed, scale in enumerate(SCALES):
            for planted in ((), PLANTED):
                tensor = odd_tensor(layout, dtype, seed=seed, planted=planted)
                assert_row(measured(tensor.to(cuda), scale=scale), tensor, scale or 1.0, where=layout)


@pytest.mark.parametrize("bad", [(), (5,), (_PIECE + 5,), (3, 2 * _PIECE + 1), tuple(range(_PIECE, 2 * _PIECE))])
def test_tensors_longer_than_a_chunk(bad: tuple[int, ...]) -> None:
    tensor = torch.randn(2 * _PIECE + 1234, generator=torch.Generator().manual_seed(3)) * 1e-5 + 3e-5
    tensor[: _PIECE // 2] += 1.0  # pieces with means far apart
    if bad:
        tensor[list(bad)] = math.nan
    # torch's own sums of squares of long float32 tensors on the CPU are no more accurate
    assert_row(measured(tensor), tensor, close=1e-4)
    assert_row(_row_on_device(tensor, tensor.numel(), None), tensor, close=1e-4)


def test_a_tensor_without_gradient_is_marked_absent() -> None:
    assert measured(None, numel=11).tolist() == ABSENT


def test_only_nonfinite_values() -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf])
    for row in (measured(tensor), _row_on_device(tensor, 3, None)):
        assert math.isnan(row[0])
        assert row[1:].tolist() == [0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]


def test_implicit_zeros_of_a_sparse_tensor_count() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([4.0]), (8,), check_invariants=True)
    for row in (measured(tensor), _row_on_device(tensor, 8, None)):
        assert row[4] == 7 / 8
        assert row[1] == 0.5
        assert math.isclose(float(row[2]), math.sqrt(2.0), rel_tol=1e-6)


def test_an_empty_sparse_tensor_is_all_zeros() -> None:
    tensor = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (8,), check_invariants=True)
    for row in (measured(tensor), _row_on_device(tensor, 8, None)):
        assert row.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("form", ["host", "device"])
def test_values_too_large_to_square_in_float32_have_an_infinite_norm(form: str) -> None:
    tensor = torch.tensor([3e38, -3e38, 1.0])
    row = measured(tensor) if form == "host" else _row_on_device(tensor, 3, None)
    assert row[0] == math.inf
    assert row[5] == 0
    assert row[3] == tensor.max()


@pytest.mark.parametrize("value", [1e200, 1e-200])
@pytest.mark.parametrize("form", ["host", "device"])
def test_float64_values_beyond_float32_count_as_finite(form: str, value: float) -> None:
    tensor = torch.tensor([value, 1.0], dtype=torch.float64)
    row = measured(tensor) if form == "host" else _row_on_device(tensor, 2, None)
    assert row[5] == 0
    assert row[4] == 0, "a value that float32 rounds to zero does not count as zero"
    assert row[7] == (0.5 if value < 1 else 0.0)


def test_measuring_writes_only_its_row() -> None:
    tensors = [odd_tensor(layout, torch.float32, seed=1) for layout in sorted(LAYOUTS)]
    copies = [t.clone() for t in tensors]
    out = torch.zeros(len(tensors), len(LAYER_STATS))
    TorchStats([t.numel() for t in tensors], CPU).measure(tensors, out=out, scale=torch.tensor(8.0))
    for t, original, row in zip(tensors, copies, out, strict=True):
        assert torch.equal(t.to_dense(), original.to_dense())
        assert_row(row, t, 8.0)


def test_the_reference_itself() -> None:
    assert reference(torch.tensor([3.0, -4.0])) == [5.0, -0.5, math.sqrt(24.5), 4.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38])
def test_a_tiny_loss_scale_is_no_error(scale: float) -> None:
    tensors = [torch.ones(3), torch.full((2,), 1e-30)]
    out = torch.zeros(2, 8)
    TorchStats([3, 2], torch.device("cpu")).measure(tensors, out=out, scale=torch.tensor(scale))
    assert out.shape == (2, 8)
    assert not out[:, 5].isnan().any()
