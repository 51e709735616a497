"""What the statistics must be, worked out in float64 the plain way, and odd tensors to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ABSENT = [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def reference(tensor: Tensor, scale: float = 1.0) -> list[float]:
    """One row of LAYER_STATS; a complex number counts as its two parts."""
    dense = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).detach().cpu()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    values = dense.double().reshape(-1) / scale
    kept = values[values.isfinite()]
    size, whole, bad = kept.abs(), max(values.numel(), 1), values.numel() - kept.numel()
    return [
        math.nan if bad else float(torch.linalg.vector_norm(kept)),
        float(kept.mean()) if kept.numel() else 0.0,
        float(kept.std()) if kept.numel() > 1 else 0.0,
        float(size.max()) if kept.numel() else 0.0,
        float((size == 0).sum()) / whole,
        float(bad),
        float(((size > 0) & (size < 6.1e-5)).sum()) / whole,
        float(((size > 0) & (size < 5.96e-8)).sum()) / whole,
    ]


def assert_row(row: Tensor, tensor: Tensor, scale: float = 1.0, where: object = "", close: float = 1e-5) -> None:
    """A measured row is the reference, as closely as float32 sums can be."""
    wanted = reference(tensor, scale)
    got = row.double().tolist()
    largest = wanted[3]
    slack = (0.0, 1e-6 * largest, 1e-6 * largest, 0.0, 0.0, 0.0, 0.0, 0.0)
    for name, a, b, extra in zip(
        ("norm", "mean", "std", "absmax", "zeros", "nonfinite", "tiny", "sub"), got, wanted, slack, strict=True
    ):
        same = math.isnan(a) and math.isnan(b)
        about = (name, a, b, where, tensor.dtype, tensor.shape)
        assert same or math.isclose(a, b, rel_tol=close, abs_tol=extra + 1e-30), about


def _sparse(values: Callable[..., Tensor], *, twice: bool) -> Tensor:
    rows = [4, 0, 4, 7] if twice else [0, 4, 7, 8]
    made = torch.sparse_coo_tensor(torch.tensor([rows]), values(4, 3), (12, 3), check_invariants=True)
    return made if twice else made.coalesce()


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
    """A random tensor of a layout; the planted values stand at its start."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        made = (torch.randn(shape, generator=generator, dtype=torch.float64) + offset) * size
        for i, value in enumerate(planted[: made.numel()]):
            made.view(-1)[i] = value
        return made.to(dtype)

    return LAYOUTS[layout](values)
