"""A shadow of the model's buffers, to revert them after a refused update, and a check for non-finite values in them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._triton import has_triton

from surefoot.triton_launch import KernelLauncher

SMALL = 1 << 16
"""Bytes up to which a buffer is copied after every step without checking whether it changed."""
EXEMPT_AFTER = 3
"""Consecutive refusals for one buffer, with finite loss and gradients, after which its values count as intended."""
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_BITS = {
    torch.float16: (2, 0x7C00, -(1 << 10)),
    torch.bfloat16: (2, 0x7F80, -(1 << 7)),
    torch.float32: (4, 0x7F80_0000, -(1 << 23)),
    torch.float64: (8, 0x7FF0_0000_0000_0000, -(1 << 52)),
}
"""Bytes of a value, the exponent bits that are all set if it is infinite or NaN, and -inf as an integer."""


class FloatPair(NamedTuple):
    """A floating-point buffer that may have changed, and its shadow."""

    position: int
    """Its position in `BufferShadow.names`."""
    live: Tensor
    shadow: Tensor
    of_norm: bool
    """Whether it belongs to a normalisation layer."""


class BufferShadow:
    """Keeps every buffer as it was after the last applied update, and reverts it after a refused one.

    Live buffers are written through `.data`, invisible to autograd: a loop may have a forward pass whose backward pass
    is still to come while another optimizer steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        owned = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._places = [(m, name) for m, name, _ in owned]
        # Normalisation writes its statistics without a new version; for large buffers the version is worth checking.
        self._check_always = [isinstance(m, _NormBase) or _local(b).nbytes <= SMALL for m, _, b in owned]
        paths = {id(m): path for path, m in model.named_modules()}
        floats = [(m, name) for m, name, b in owned if _is_float(b)]
        self.names: tuple[str, ...] = tuple(f"{paths[id(m)]}.{name}".lstrip(".") for m, name in floats)
        """Names of the floating-point buffers; does not change, even when a buffer is removed."""
        self.of_norm: tuple[bool, ...] = tuple(isinstance(m, _NormBase) for m, _ in floats)
        """Whether each of these belongs to a normalisation layer."""
        self._indices = {(id(m), name): i for i, (m, name) in enumerate(floats)}
        after_load = _ResetOnLoad(self)
        owners = {id(m): m for m in (model, *(m for m, _ in self._places))}
        self._hooks = [m.register_load_state_dict_post_hook(after_load) for m in owners.values()]
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._launch: KernelLauncher | None = None
        self._shadows: list[Tensor] = []
        self._seen: list[tuple[Tensor | None, int]] = []
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Start over from the current buffers."""
        kept = [(place, b) for place, b in zip(self._places, self._now(), strict=True) if b is not None]
        self._check_always = [a for a, b in zip(self._check_always, self._now(), strict=True) if b is not None]
        self._places = [place for place, _ in kept]
        self._shadows = [_local(b).detach().clone() for _, b in kept]
        self._seen = [(b, b._version) for _, b in kept]
        self._tables.clear()

    def _now(self) -> list[Tensor | None]:
        return [m._buffers.get(name) for m, name in self._places]

    @property
    def empty(self) -> bool:
        """The model has no buffers, so there is nothing to revert."""
        return not self._places

    @property
    def tensors(self) -> list[Tensor]:
        return [b for b in self._now() if b is not None]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each buffer, with its value after the last applied update."""
        both = zip(self._now(), self._shadows, strict=True)
        return [(b, shadow) for b, shadow in both if b is not None and _same_layout(_local(b), shadow)]

    def float_pairs(self) -> list[FloatPair]:
        """Floating-point buffers that may have changed since the last applied update and still have their shape."""
        pairs: list[FloatPair] = []
        for i, ((m, name), b) in enumerate(zip(self._places, self._now(), strict=True)):
            index = self._indices.get((id(m), name))
            if index is None or b is None or not self._may_have_changed(i, b) or not _is_float(b):
                continue
            live, shadow = _local(b).data, self._shadows[i]
            if _same_layout(live, shadow):
                pairs.append(FloatPair(index, _reals(live), _reals(shadow), self.of_norm[index]))
        return pairs

    def _may_have_changed(self, i: int, buffer: Tensor) -> bool:
        return self._check_always[i] or buffer is not self._seen[i][0] or buffer._version != self._seen[i][1]

    @torch.no_grad()
    def commit_or_revert(self, refused: bool | Tensor, *, keep: bool = True) -> None:
        """Revert the buffers if `refused`, which may still be on the device; otherwise update the shadow if `keep`."""
        now = self._now()
        if keep and any(b is None for b in now) and not bool(refused):  # removed on purpose, in an applied update
            self.reset()
            return
        changed: list[int] = []
        for i, b in enumerate(now):
            if b is None or not _same_layout(_local(b), self._shadows[i]):
                self._commit_or_revert_resized(i, b, bool(refused), keep=keep)  # rare enough to synchronise
            elif self._may_have_changed(i, b):
                changed.append(i)
        live = [_local(b).data for i in changed if (b := now[i]) is not None]
        shadows = [self._shadows[i] for i in changed]
        if not changed:
            return
        if isinstance(refused, Tensor):
            self._select(live, shadows, refused, keep=keep)
        elif refused:
            torch._foreach_copy_(live, shadows)
        elif keep:
            torch._foreach_copy_(shadows, live)
        if keep:
            for i in changed:
                self._see(i, now[i])

    def _see(self, i: int, buffer: Tensor | None) -> None:
        self._seen[i] = (buffer, 0 if buffer is None else buffer._version)

    def _commit_or_revert_resized(self, i: int, buffer: Tensor | None, refused: bool, *, keep: bool) -> None:
        """A buffer that was removed or has another shape now, such as a cache that grew."""
        module, name = self._places[i]
        if refused and name in module._buffers:
            module._buffers[name] = self._shadows[i].clone()
        elif keep and buffer is not None and not refused:
            self._shadows[i] = _local(buffer).detach().clone()
        self._see(i, module._buffers.get(name))

    def _select(self, live: Sequence[Tensor], shadows: Sequence[Tensor], refused: Tensor, *, keep: bool) -> None:
        """Copy in the direction that the device decides."""
        if live and refused.is_cuda and all(t.is_cuda and t.is_contiguous() for t in (*live, *shadows)):
            if self._launch is None:
                from surefoot.checkpoint.buffer_kernels import commit_or_revert

                self._launch = KernelLauncher(commit_or_revert, refused.device)
            # With the sizes: a buffer that has grown may start at the address of the smaller one.
            key = (*[t.data_ptr() for t in (*live, *shadows)], *[t.nbytes for t in live])
            if key not in self._tables:
                self._tables.clear()
                self._tables[key] = torch.tensor(key, dtype=torch.int64, device=refused.device)
            self._launch((len(live), 16, 1), self._tables[key], refused, len(live), KEEP=keep, BLOCK=1024)
            return
        for buffer, shadow in zip(live, shadows, strict=True):
            chosen = torch.where(refused.to(buffer.device) > 0, shadow, buffer)
            buffer.copy_(chosen)
            if keep:
                shadow.copy_(chosen)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _ResetOnLoad:
    """Resets the shadow after `load_state_dict`; a saved or deep-copied model carries one without a shadow."""

    def __init__(self, shadow: BufferShadow | None = None) -> None:
        self._shadow = None if shadow is None else weakref.ref(shadow)

    def __call__(self, *_: Any) -> None:
        shadow = None if self._shadow is None else self._shadow()
        if shadow is not None:
            shadow.reset()

    def __reduce__(self) -> tuple[type[_ResetOnLoad], tuple[()]]:
        return _ResetOnLoad, ()


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _is_float(buffer: Tensor) -> bool:
    part = _local(buffer)
    plain = type(part) is Tensor and part.layout is torch.strided and not part.is_meta
    return plain and (part.dtype in _FLOATS or part.dtype in (torch.complex64, torch.complex128))


def _reals(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class BufferCheck:
    """Counts values that are finite in the shadow but not in the buffer, on the device, before an update is decided.

    Values that were non-finite before do not count, nor does a buffer whose shape changed. Outside of normalisation
    layers -inf is a normal value: masks are made of it.
    """

    def __init__(self, shadow: BufferShadow, counts: Tensor, total: Tensor) -> None:
        self._shadow = shadow
        self._counts, self._total = counts, total
        self._launch: KernelLauncher | None = None
        self._key: list[tuple[Any, ...]] = []
        self._table = counts
        self._begun = False
        self._repeats: dict[int, int] = {}
        self._attempt = -1
        self._exempt: set[int] = set()
        self._new_exempt: list[str] = []

    def begin(self) -> None:
        """The next count is the first of a new update."""
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the buffers were counted for the current update."""
        return self._begun

    @torch.no_grad()
    def count(self) -> None:
        """Add the current counts to those since `begin`; never synchronises with an accelerator."""
        if not self._begun:
            torch._foreach_zero_([self._counts, self._total])
            self._begun = True
        pairs = [pair for pair in self._shadow.float_pairs() if pair.position not in self._exempt]
        together = [pair for pair in pairs if self._kernel_can_read(pair)]
        if together:
            self._count_fused(together)
        for pair in pairs if not together else [pair for pair in pairs if not self._kernel_can_read(pair)]:
            self._count_one(pair)

    def any_nonfinite(self) -> bool:
        """Count once more, and return whether anything was counted since `begin`; waits for the device."""
        self.count()
        return bool(self._total > 0)

    def _kernel_can_read(self, pair: FloatPair) -> bool:
        device = self._counts.device
        return (
            pair.live.device == pair.shadow.device == device
            and device.type == "cuda"
            and has_triton()
            and pair.live.is_contiguous()
            and pair.shadow.is_contiguous()
        )

    def _count_fused(self, pairs: list[FloatPair]) -> None:
        """Count all buffers in one launch."""
        from surefoot.checkpoint.buffer_kernels import count_nonfinite

        if self._launch is None:
            self._launch = KernelLauncher(count_nonfinite, self._counts.device)
        key = [(p.position, p.live.data_ptr(), p.shadow.data_ptr(), p.live.numel(), p.live.dtype) for p in pairs]
        if key != self._key:
            self._key, self._table = key, kernel_table(pairs, self._counts.device)
        self._launch((len(pairs), 16, 1), self._table, self._counts, self._total, len(pairs), BLOCK=1024)

    def _count_one(self, pair: FloatPair) -> None:
        if pair.live.numel() == 0:
            return
        if pair.live.device.type == "cpu":  # nothing to wait for: mostly the norm alone is enough
            largest = torch.linalg.vector_norm(pair.live, math.inf).item()
            if math.isfinite(largest):
                return
        bad = ~pair.live.isfinite() & pair.shadow.isfinite()
        bad = (bad if pair.of_norm else bad & (pair.live != -math.inf)).sum()
        bad = bad.to(self._counts.device, self._counts.dtype, non_blocking=True)
        self._counts[pair.position] += bad
        self._total += bad

    # -- two steps later, on the host

    def learn_exempt(self, attempt: int, bad: list[int], *, alone: bool, applied: bool) -> None:
        """Learn which buffers are non-finite on purpose, such as a bound of inf that is set once the model runs.

        `bad` became non-finite in this attempt; `alone` says that nothing else was wrong. Statistics of normalisation
        layers are never exempt.
        """
        if attempt == self._attempt:
            return
        self._attempt = attempt
        if applied:
            self._repeats.clear()
        if not alone:
            return
        for index in bad:
            self._repeats[index] = self._repeats.get(index, 0) + 1
            if self._repeats[index] >= EXEMPT_AFTER and index not in self._exempt and not self._shadow.of_norm[index]:
                self._exempt.add(index)
                self._new_exempt.append(self._shadow.names[index])

    def take_exempted(self) -> list[str]:
        """Names of buffers that are no longer checked; each is returned once."""
        names, self._new_exempt = self._new_exempt, []
        return names


def kernel_table(pairs: list[FloatPair], device: torch.device) -> Tensor:
    """The kernel's input: addresses, sizes, widths, exponent bits, allowed value and index of each pair."""
    bits = [_BITS[pair.live.dtype] for pair in pairs]
    columns = (
        [pair.live.data_ptr() for pair in pairs],
        [pair.shadow.data_ptr() for pair in pairs],
        [pair.live.numel() for pair in pairs],
        [width for width, _, _ in bits],
        [exponent for _, exponent, _ in bits],
        [0 if pair.of_norm else minus_inf for pair, (_, _, minus_inf) in zip(pairs, bits, strict=True)],
        [pair.position for pair in pairs],
    )
    return torch.tensor([value for column in columns for value in column], dtype=torch.int64, device=device)
