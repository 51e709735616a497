"""A shadow of the model's buffers: a refused update must not leave its mark on running statistics."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from surefoot.launch import Launch

SMALL = 1 << 16
"""Bytes up to which a buffer is copied after every step without asking whether it changed."""


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
        after_load = _Retake(self)
        homes = {id(m): m for m in (model, *(m for m, _ in self._places))}
        self._hooks = [m.register_load_state_dict_post_hook(after_load) for m in homes.values()]
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._launch: Launch | None = None
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
            elif self._always[i] or b is not self._seen[i][0] or b._version != self._seen[i][1]:
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
                from surefoot.state.kernels import settle

                self._launch = Launch(settle, refused.device)
            key = tuple([t.data_ptr() for t in (*live, *kept)])
            if key not in self._tables:
                self._tables.clear()
                rows = [*key, *(t.nbytes for t in live)]
                self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=refused.device)
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


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
