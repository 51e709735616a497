"""A shadow of the model's buffers: a refused update must not leave its mark on running statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

SMALL = 1 << 16
"""Bytes up to which a buffer is copied after every step without asking whether it changed."""


class BufferShadow:
    """Keeps every buffer as it was after the last accepted update, and puts it back after a refused one."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [(m, name) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._handle = model.register_load_state_dict_post_hook(lambda *_: self.take())
        self._always = [
            isinstance(m, _NormBase) or _plain(b).nbytes <= SMALL
            for (m, _), b in zip(self._places, self._now(), strict=True)
        ]
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._shadows: list[Tensor] = []
        self._seen: list[tuple[int, int]] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Start over from the buffers as they are now."""
        self._shadows = [_plain(b).detach().clone() for b in self._now()]
        self._seen = [(id(b), b._version) for b in self._now()]
        self._tables.clear()

    def _now(self) -> list[Tensor]:
        return [m._buffers[name] for m, name in self._places]  # pyright: ignore[reportReturnType]

    @property
    def tensors(self) -> list[Tensor]:
        return self._now()

    @torch.no_grad()
    def settle(self, refused: bool | Tensor, *, keep: bool = True) -> None:
        """Put the buffers back if `refused`, which may still be on the device; else take them over if `keep`."""
        now = self._now()
        # Normalisation writes its statistics without a new version; for large buffers the version is worth asking.
        changed = [i for i, b in enumerate(now) if self._always[i] or (id(b), b._version) != self._seen[i]]
        if not changed:
            return
        live = [_plain(now[i]) for i in changed]
        kept = [self._shadows[i] for i in changed]
        if any(
            a.shape != b.shape or a.dtype != b.dtype or a.device != b.device for a, b in zip(live, kept, strict=True)
        ):
            self.take()  # replaced by something else on purpose
            return
        if isinstance(refused, Tensor):
            self._select(live, kept, refused, keep=keep)
        elif refused:
            torch._foreach_copy_(live, kept)
        elif keep:
            torch._foreach_copy_(kept, live)
        if not keep:
            return
        for i in changed:
            self._seen[i] = (id(now[i]), now[i]._version)

    def _select(self, live: Sequence[Tensor], kept: Sequence[Tensor], refused: Tensor, *, keep: bool) -> None:
        """Either direction, chosen on the device."""
        if refused.is_cuda and all(t.is_cuda and t.is_contiguous() for t in (*live, *kept)):
            from surefoot.state.kernels import settle

            key = tuple([t.data_ptr() for t in (*live, *kept)])
            if key not in self._tables:
                self._tables.clear()
                sizes = [t.numel() * t.element_size() for t in live]
                rows = [*key, *sizes]
                self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=refused.device)
            settle[(len(live), 16)](self._tables[key], refused, len(live), KEEP=keep, BLOCK=1024)
            torch.autograd.graph.increment_version(live)
            return
        for a, b in zip(live, kept, strict=True):
            chosen = torch.where(refused.to(a.device) > 0, b, a)
            a.copy_(chosen)
            if keep:
                b.copy_(chosen)

    def close(self) -> None:
        self._handle.remove()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
