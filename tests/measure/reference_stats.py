"""Reference statistics in float64, and unusual tensors to test them on."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ABSENT = [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def reference(tensor: Tensor, scale: float = 1.0) -> list[float]:
    """One row of LAYER_STATS; complex numbers count as two values."""
    dense = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).detach().cpu()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    values = dense.double().reshape(-1) / scale
    finite = values[values.isfinite()]
    magnitudes, count, bad = finite.abs(), max(values.numel(), 1), values.numel() - finite.numel()
    return [
        math.nan if bad else float(torch.linalg.vector_norm(finite)),
        float(finite.mean()) if finite.numel() else 0.0,
        float(finite.std()) if finite.numel() > 1 else 0.0,
        float(magnitudes.max()) if finite.numel() else 0.0,
        float((magnitudes == 0).sum()) / count,
        float(bad),
        float(((magnitudes > 0) & (magnitudes < 6.1e-5)).sum()) / count,
        float(((magnitudes > 0) & (magnitudes < 5.96e-8)).sum()) / count,
    ]


def assert_row(row: Tensor, tensor: Tensor, scale: float = 1.0, where: object = "", close: float = 1e-5) -> None:
    """A measured row equals the reference within the accuracy of float32 sums."""
    expected = reference(tensor, scale)
    measured = row.double().tolist()
    largest = expected[3]
    slack = (0.0, 1e-6 * largest, 1e-6 * largest, 0.0, 0.0, 0.0, 0.0, 0.0)
    for name, a, b, extra in zip(
        ("norm", "mean", "std", "absmax", "zeros", "nonfinite", "tiny", "sub"),
        measured,
        expected,
        slack,
        strict=True,
    ):
        both_nan = math.isnan(a) and math.isnan(b)
        details = (name, a, b, where, tensor.dtype, tensor.shape)
        assert both_nan or math.isclose(a, b, rel_tol=close, abs_tol=extra + 1e-30), details


def _sparse(values: Callable[..., Tensor], *, twice: bool) -> Tensor:
    rows = [4, 0, 4, 7] if twice else [0, 4, 7, 8]
    tensor = torch.sparse_coo_tensor(torch.tensor([rows]), values(4, 3), (12, 3), check_invariants=True)
    return tensor if twice else tensor.coalesce()


LAYOUTS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "vector": lambda v: v(37),
    "one": lambda v: v(1),
    "scalar": lambda v: v().reshape(()),
    "empty": lambda v: v(0),
    "empty matrix": lambda v: v(3, 0),
    "matrix": lambda v: v(19, 23),
    "long": lambda v: v(9001),
    "transposed": lambda v: v(19, 23).t(),
    "permuted": lambda v: v(4, 5, 6).permute(2, 0, 1),
    "every other": lambda v: v(41)[::2],
    "misaligned": lambda v: v(40)[1:],
    "expanded": lambda v: v(5, 1).expand(5, 7),
    "channels last": lambda v: v(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda v: v(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    "sparse": lambda v: _sparse(v, twice=False),
    "sparse, not coalesced": lambda v: _sparse(v, twice=True),
    "complex": lambda v: torch.complex(*v(2, 11).float().unbind()),
    "complex conjugate": lambda v: torch.complex(*v(2, 11).double().unbind()).conj(),
}
PLANTED = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-6, 3e-8)


def odd_tensor(
    layout: str,
    dtype: torch.dtype,
    *,
    seed: int,
    size: float = 1.0,
    offset: float = 0.0,
    planted: tuple[float, ...] = (),
) -> Tensor:
    """A random tensor of a layout that starts with the planted values."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) + offset) * size
        for i, value in enumerate(planted[: tensor.numel()]):
            tensor.view(-1)[i] = value
        return tensor.to(dtype)

    return LAYOUTS[layout](values)
