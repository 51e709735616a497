"""Frozen parameters are copied once, and snapshots share that copy; every change to one is noticed.

Changes that bump a tensor's version or move it are seen on the host when a snapshot is taken. Others, such as
`p.data.mul_()`, are found by a checksum that every snapshot takes of the live parameters and that is read later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.checksums import Checksum, Checksummer, PendingChecksums, leaves
from surefoot.checkpoint.copies import LiveState, StateCopy, local_part, tensor_bytes, total_bytes
from surefoot.checkpoint.snapshot_memory import BaseBytes, Location

MAX_CHANGES = 3
"""Changes after which a parameter is no longer treated as frozen."""
_EARLY_CHECKS = (2, 10)
"""Updates after the base was copied at which it is checked once more: a teacher that follows the model through `.data`
is then known before a snapshot has to be dropped for it."""


@dataclass(slots=True, eq=False)
class FrozenParam:
    """What is known about one frozen parameter."""

    ref: weakref.ref[Tensor]
    name: str
    signature: tuple[Any, ...]
    stable: bool = True
    """Unchanged since the previous collection, as far as the host can see."""
    changes: int = 0
    untracked_changes: bool = False
    """A checksum showed that it changes without a new version: it is copied in full from then on."""
    base: BaseTensor | None = None

    @property
    def shareable(self) -> bool:
        return self.stable and not self.untracked_changes and self.changes < MAX_CHANGES


@dataclass(slots=True, eq=False)
class BaseCopy:
    """One copy of several frozen parameters, and their checksums at that time."""

    key: tuple[Any, ...]
    copy: StateCopy
    """Its memory; each tensor is freed as soon as nothing refers to it."""
    live: LiveState | None
    """The live parameters, until they are copied."""
    checksums: PendingChecksums | None = None

    @property
    def has_memory(self) -> bool:
        return self.live is None or self.copy.fits(self.live)

    def allocate(self) -> None:
        if self.live is not None:
            self.copy.allocate_for(self.live)

    def fill(self, checksummer: Checksummer) -> list[Tensor]:
        """Copy the parameters as they are now, and hand the copies over to the caller."""
        if self.live is None:
            return []
        self.copy.copy_from(self.live)
        self.checksums = checksummer.measure(self.live.local_tensors)
        self.live = None
        tensors, self.copy.tensors, self.copy.layouts = self.copy.tensors, [], []
        return tensors


@dataclass(slots=True, eq=False)
class BaseTensor:
    """One frozen parameter in a base."""

    base: BaseCopy
    number: int
    param: FrozenParam
    copied: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        assert self.copied is not None, "the base is copied before anything refers to it"
        return self.copied

    def matches(self, checksum: Checksum) -> bool:
        return self.base.checksums is not None and self.base.checksums.values()[self.number] == checksum


@dataclass(frozen=True, slots=True, eq=False)
class BaseCheck:
    """Whether the frozen parameters matched the base when a snapshot was taken; can be read later."""

    tensors: Sequence[BaseTensor]
    checksums: PendingChecksums

    def changed(self, *, wait: bool) -> list[BaseTensor] | None:
        """Those that did not match; None if that is not known yet and `wait` is false."""
        if not wait and not all(c.ready for c in (self.checksums, *(t.base.checksums for t in self.tensors)) if c):
            return None
        return [t for t, now in zip(self.tensors, self.checksums.values(), strict=True) if not t.matches(now)]


class SharedBase:
    """Decides which frozen parameters snapshots share, copies those, and checks that they do not change."""

    def __init__(self) -> None:
        self._params: dict[int, FrozenParam] = {}
        self._pending: BaseCopy | None = None
        self._checksummer = Checksummer()
        self._enabled = True
        self._updates = 0
        self._early: list[BaseCheck] = []

    # -- what is shared

    def observe(self, live: LiveState) -> None:
        """Note what has changed since the previous collection, as far as the host can see; call once for each."""
        known, self._params = self._params, {}
        for slot, (p, name) in live.frozen_params.items():
            signature = _signature(p, live.local_tensors[slot])
            if signature is None:
                continue
            param = known.get(id(p))
            if param is None or param.ref() is not p:
                param = FrozenParam(weakref.ref(p), name, signature)
            elif param.signature != signature:
                param.signature, param.stable, param.base = signature, False, None
                param.changes += 1
            else:
                param.stable = True
            self._params[id(p)] = param

    def assign(self, live: LiveState, location: Location) -> None:
        """Let the live state refer to the base where possible; plan a base for what has none in this location."""
        live.shared.clear()
        missing: list[tuple[int, FrozenParam]] = []
        for slot, (p, _) in live.frozen_params.items():
            param = self._params.get(id(p))
            if param is None or not param.shareable or not self._enabled:
                # What changes although it is frozen, such as a teacher, is changed by the loop, after the step.
                live.layouts[slot] = (*live.layouts[slot][:-1], False)
                continue
            if param.base is not None and param.base.base.copy.location == location:
                live.shared[slot] = param.base
            else:
                missing.append((slot, param))
        key = (location, *[(id(param), param.signature) for _, param in missing])
        if not missing:
            self._pending = None
        elif self._pending is None or self._pending.key != key:
            base_live = LiveState()
            for slot, _ in missing:
                base_live.slot(live.frozen_params[slot][0])
            self._pending = BaseCopy(key, StateCopy(location), base_live)
        for number, (slot, param) in enumerate(missing):
            assert self._pending is not None
            live.shared[slot] = BaseTensor(self._pending, number, param)

    @property
    def pending(self) -> BaseCopy | None:
        """A base that the last collected state refers to and that is still to be copied."""
        return self._pending

    @property
    def in_use(self) -> bool:
        """Whether there are parameters that are, or may be, shared."""
        return bool(self._params)

    def forget_pending(self) -> None:
        """Plan another base next time: memory for this one may still be being allocated."""
        self._pending = None

    def disable(self) -> None:
        """Share nothing from now on."""
        self._enabled = False
        self.clear()

    def clear(self) -> None:
        self._params.clear()
        self._early.clear()
        self._pending = None

    # -- copying and checking

    def check(self, live: LiveState) -> BaseCheck | None:
        """Copy the pending base, and take checksums of all other shared parameters."""
        pending, self._pending = self._pending, None
        tensors = [] if pending is None else pending.fill(self._checksummer)
        self._updates = 0 if tensors else self._updates
        checked: list[tuple[int, BaseTensor]] = []
        for slot, shared in live.shared.items():
            assert isinstance(shared, BaseTensor)
            if shared.base is pending:
                shared.copied, shared.param.base = tensors[shared.number], shared
            else:
                checked.append((slot, shared))
        if not checked:
            return None
        checksums = self._checksummer.measure([live.local_tensors[slot] for slot, _ in checked])
        return BaseCheck([t for _, t in checked], checksums)

    def before_update(self) -> None:
        """To be called before each optimizer step."""
        self._updates += 1
        if self._updates not in _EARLY_CHECKS:
            return
        bases: list[BaseTensor] = []
        parts: list[Tensor] = []
        for param in self._params.values():
            p = param.ref()
            if p is not None and param.base is not None and _signature(p, part := local_part(p)) == param.signature:
                bases.append(param.base)
                parts.append(part)
        if bases:
            self._early.append(BaseCheck(bases, self._checksummer.measure(parts)))

    def take_early_changes(self) -> list[str]:
        """Names of parameters found to have changed although no snapshot was taken since; each is returned once."""
        results = [(check, check.changed(wait=False)) for check in self._early]
        self._early = [check for check, changed in results if changed is None]
        return self.mark_changed([tensor for _, changed in results for tensor in changed or ()])

    def mark_changed(self, changed: Sequence[BaseTensor]) -> list[str]:
        """Copy these in full from now on; returns the names of those for which this is new."""
        new = [t.param for t in changed if not t.param.untracked_changes]
        for param in new:
            param.untracked_changes, param.base = True, None
        return [param.name for param in new]

    # -- memory

    def nbytes(self, copies: Iterable[StateCopy]) -> int:
        """Bytes of all shared tensors in use, by the run or by these copies."""
        used = [p.base for p in self._params.values()]
        used += [t for copy in copies for t in copy.shared.values() if isinstance(t, BaseTensor)]
        return sum({id(t): tensor_bytes(t.tensor) for t in used if t is not None}.values())

    def bytes_for(self, live: LiveState) -> BaseBytes:
        """The size of the base of this state, and how much of it is still to be allocated."""
        params = {slot: self._params[id(p)] for slot, (p, _) in live.frozen_params.items() if slot in live.shared}
        locations = {slot: p.base.base.copy.location if p.base is not None else None for slot, p in params.items()}
        device, host = (
            [live.local_tensors[slot] for slot, current in locations.items() if current != location]
            for location in ("device", "host")
        )
        total = sum(total_bytes(live.local_tensors[slot] for slot in params).values())
        return BaseBytes(total, total_bytes(device), sum(total_bytes(host).values()))


def _signature(param: Tensor, part: Tensor) -> tuple[Any, ...] | None:
    """What the host sees change when a parameter is changed or replaced; None if its bits cannot be read."""
    plain = leaves(part)
    if not plain:
        return None
    inner = [param._local_tensor] if isinstance(param, DTensor) else []
    versions = [-1 if t.is_inference() else t._version for t in (param, *inner)]
    return (*versions, *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in plain])


def describe_changed(names: Sequence[str], dropped: int | None = None) -> str:
    """The message for frozen parameters that changed; `dropped` is the attempt of the snapshot dropped for it."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    drop = "" if dropped is None else f"the snapshot of attempt {dropped} is dropped, and "
    return (
        f"frozen parameters changed without a new tensor version (written through .data, or damaged): {listed}; "
        f"{drop}snapshots copy these parameters in full from now on"
    )
