"""A shadow of the model's buffers: a refused update must not leave its mark on running statistics."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from surefoot.triton_launch import KernelLauncher

SMALL = 1 << 16
"""Bytes up to which a buffer is copied after every step without asking whether it changed."""
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class FloatPair(NamedTuple):
    """A buffer of real numbers that may have changed, and what it was after the last accepted update."""

    number: int
    """Its place in `BufferShadow.names`."""
    live: Tensor
    kept: Tensor
    of_norm: bool
    """Whether it belongs to a normalisation layer."""


class BufferShadow:
    """Keeps every buffer as it was after the last accepted update, and puts it back after a refused one.

    Live buffers are written past autograd's back (`.data`): a loop may hold a forward pass whose backward is still to
    come while another optimizer steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        held = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._places = [(m, name) for m, name, _ in held]
        # Normalisation writes its statistics without a new version; for large buffers the version is worth asking.
        self._always = [isinstance(m, _NormBase) or _plain(b).nbytes <= SMALL for m, _, b in held]
        paths = {id(m): path for path, m in model.named_modules()}
        floats = [(m, name) for m, name, b in held if _is_float(b)]
        self.names: tuple[str, ...] = tuple(f"{paths[id(m)]}.{name}".lstrip(".") for m, name in floats)
        """Of the buffers of real numbers; the list stays as it is, also when a buffer is given up."""
        self.of_norm: tuple[bool, ...] = tuple(isinstance(m, _NormBase) for m, _ in floats)
        """Whether each of these belongs to a normalisation layer."""
        self._numbers = {(id(m), name): i for i, (m, name) in enumerate(floats)}
        after_load = _Retake(self)
        homes = {id(m): m for m in (model, *(m for m, _ in self._places))}
        self._hooks = [m.register_load_state_dict_post_hook(after_load) for m in homes.values()]
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._launch: KernelLauncher | None = None
        self._shadows: list[Tensor] = []
        self._seen: list[tuple[Tensor | None, int]] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Start over from the buffers as they are now."""
        kept = [(place, b) for place, b in zip(self._places, self._now(), strict=True) if b is not None]
        self._always = [a for a, b in zip(self._always, self._now(), strict=True) if b is not None]
        self._places = [place for place, _ in kept]
        self._shadows = [_plain(b).detach().clone() for _, b in kept]
        self._seen = [(b, b._version) for _, b in kept]
        self._tables.clear()

    def _now(self) -> list[Tensor | None]:
        return [m._buffers.get(name) for m, name in self._places]

    @property
    def tensors(self) -> list[Tensor]:
        return [b for b in self._now() if b is not None]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each buffer, with what it was after the last accepted update."""
        both = zip(self._now(), self._shadows, strict=True)
        return [(b, kept) for b, kept in both if b is not None and _alike(_plain(b), kept)]

    def float_pairs(self) -> list[FloatPair]:
        """Buffers of real numbers that may have changed since the last accepted update and still have their shape."""
        found: list[FloatPair] = []
        for i, ((m, name), b) in enumerate(zip(self._places, self._now(), strict=True)):
            number = self._numbers.get((id(m), name))
            if number is None or b is None or not self._may_have_changed(i, b) or not _is_float(b):
                continue
            live, kept = _plain(b).data, self._shadows[i]
            if _alike(live, kept):
                found.append(FloatPair(number, _reals(live), _reals(kept), self.of_norm[number]))
        return found

    def _may_have_changed(self, i: int, buffer: Tensor) -> bool:
        return self._always[i] or buffer is not self._seen[i][0] or buffer._version != self._seen[i][1]

    def settle(self, refused: bool | Tensor, *, keep: bool = True) -> None:
        """Put the buffers back if `refused`, which may still be on the device; else take them over if `keep`."""
        if self._places:
            self._settle(refused, keep=keep)

    @torch.no_grad()
    def _settle(self, refused: bool | Tensor, *, keep: bool) -> None:
        now = self._now()
        if (
            keep and any(b is None for b in now) and not bool(refused)
        ):  # given up on purpose, in an update that was accepted
            self.take()
            return
        changed: list[int] = []
        for i, b in enumerate(now):
            if b is None or not _alike(_plain(b), self._shadows[i]):
                self._settle_other(i, b, bool(refused), keep=keep)  # rare enough to ask the device
            elif self._may_have_changed(i, b):
                changed.append(i)
        live = [_plain(b).data for i in changed if (b := now[i]) is not None]
        kept = [self._shadows[i] for i in changed]
        if not changed:
            return
        if isinstance(refused, Tensor):
            self._select(live, kept, refused, keep=keep)
        elif refused:
            torch._foreach_copy_(live, kept)
        elif keep:
            torch._foreach_copy_(kept, live)
        if keep:
            for i in changed:
                self._see(i, now[i])

    def _see(self, i: int, buffer: Tensor | None) -> None:
        self._seen[i] = (buffer, 0 if buffer is None else buffer._version)

    def _settle_other(self, i: int, buffer: Tensor | None, refused: bool, *, keep: bool) -> None:
        """A buffer that has gone, or has another shape now, such as a cache that grew."""
        module, name = self._places[i]
        if refused and name in module._buffers:
            module._buffers[name] = self._shadows[i].clone()
        elif keep and buffer is not None and not refused:
            self._shadows[i] = _plain(buffer).detach().clone()
        self._see(i, module._buffers.get(name))

    def _select(self, live: Sequence[Tensor], kept: Sequence[Tensor], refused: Tensor, *, keep: bool) -> None:
        """Either direction, chosen on the device."""
        if live and refused.is_cuda and all(t.is_cuda and t.is_contiguous() for t in (*live, *kept)):
            if self._launch is None:
                from surefoot.checkpoint.kernels import settle

                self._launch = KernelLauncher(settle, refused.device)
            # With the sizes: a buffer that has grown may lie where the smaller one lay.
            key = (*[t.data_ptr() for t in (*live, *kept)], *[t.nbytes for t in live])
            if key not in self._tables:
                self._tables.clear()
                self._tables[key] = torch.tensor(key, dtype=torch.int64, device=refused.device)
            self._launch((len(live), 16, 1), self._tables[key], refused, len(live), KEEP=keep, BLOCK=1024)
            return
        for a, b in zip(live, kept, strict=True):
            chosen = torch.where(refused.to(a.device) > 0, b, a)
            a.copy_(chosen)
            if keep:
                b.copy_(chosen)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Retake:
    """Starts the shadow over after a load; a copy of the model, saved or deep, carries an idle one."""

    def __init__(self, shadow: BufferShadow | None = None) -> None:
        self._shadow = None if shadow is None else weakref.ref(shadow)

    def __call__(self, *_: Any) -> None:
        shadow = None if self._shadow is None else self._shadow()
        if shadow is not None:
            shadow.take()

    def __reduce__(self) -> tuple[type[_Retake], tuple[()]]:
        return _Retake, ()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _is_float(buffer: Tensor) -> bool:
    part = _plain(buffer)
    plain = type(part) is Tensor and part.layout is torch.strided and not part.is_meta
    return plain and (part.dtype in _FLOATS or part.dtype in (torch.complex64, torch.complex128))


def _reals(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
