"""Frozen parameters are copied once, and snapshots refer to that copy; a changed one is always noticed.

What bumps a version or moves a tensor is seen on the host when a snapshot is taken. What does not, such as
`p.data.mul_()`, is found by a checksum that every snapshot takes of the live parameters and that is read later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.checksums import Checksum, Checksums, PendingChecksums, leaves
from surefoot.checkpoint.copies import Copy, Look, bytes_of, local_storage, total_bytes
from surefoot.checkpoint.snapshot_memory import BaseBytes, Home

MAX_CHANGES = 3
"""Changes seen after which a parameter is not taken for frozen any more."""
_EARLY = (2, 10)
"""Updates after a base was copied before which it is checked once more: a teacher that follows the model through
`.data` is then known before a snapshot has to be dropped for it."""


@dataclass(slots=True, eq=False)
class FrozenParam:
    """What is known of one frozen parameter."""

    ref: weakref.ref[Tensor]
    name: str
    signature: tuple[Any, ...]
    stable: bool = True
    """Unchanged, as far as the host can see, since the look before."""
    changes: int = 0
    moved: bool = False
    """A checksum has shown that it changes without a new version: it is copied in full from then on."""
    base: BaseTensor | None = None

    @property
    def shareable(self) -> bool:
        return self.stable and not self.moved and self.changes < MAX_CHANGES


@dataclass(slots=True, eq=False)
class BaseCopy:
    """One copy of several frozen parameters, and the checksums they had then."""

    key: tuple[Any, ...]
    copy: Copy
    """Its memory; each tensor of it goes as soon as nothing refers to that one."""
    look: Look | None
    """The live parameters, until they are copied."""
    checksums: PendingChecksums | None = None

    @property
    def has_memory(self) -> bool:
        return self.look is None or self.copy.fits(self.look)

    def allocate(self) -> None:
        if self.look is not None:
            self.copy.make_room(self.look)

    def fill(self, checksums: Checksums) -> list[Tensor]:
        """Copy the parameters as they are now; the copies, which from now on are the caller's."""
        if self.look is None:
            return []
        self.copy.store(self.look)
        self.checksums = checksums.measure(self.look.parts)
        self.look = None
        tensors, self.copy.tensors, self.copy.kinds = self.copy.tensors, [], []
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
    """Whether the frozen parameters were those of the base when a snapshot was taken; read without haste."""

    tensors: Sequence[BaseTensor]
    checksums: PendingChecksums

    def changed(self, *, wait: bool) -> list[BaseTensor] | None:
        """Those that were not; None while that is not known, unless it is waited for."""
        if not wait and not all(c.ready for c in (self.checksums, *(t.base.checksums for t in self.tensors)) if c):
            return None
        return [t for t, now in zip(self.tensors, self.checksums.values(), strict=True) if not t.matches(now)]


class SharedBase:
    """Decides which frozen parameters of a run snapshots share, copies those, and checks that they stay as they are."""

    def __init__(self) -> None:
        self._params: dict[int, FrozenParam] = {}
        self._pending: BaseCopy | None = None
        self._checksums = Checksums()
        self._works = True
        self._updates = 0
        self._early: list[BaseCheck] = []

    # -- what is shared

    def observe(self, look: Look) -> None:
        """See what has changed since the last look, as far as the host can tell; once for each look."""
        known, self._params = self._params, {}
        for slot, (p, name) in look.frozen_params.items():
            signature = _signature(p, look.parts[slot])
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

    def assign(self, look: Look, home: Home) -> None:
        """Let the look refer to the base wherever it may; of what has none in this home, one is to be copied."""
        look.shared.clear()
        lacking: list[tuple[int, FrozenParam]] = []
        for slot, (p, _) in look.frozen_params.items():
            param = self._params.get(id(p))
            if param is None or not param.shareable or not self._works:
                # What changes though it is frozen, such as a teacher, changes at the loop's hand, after the step.
                look.kinds[slot] = (*look.kinds[slot][:-1], False)
                continue
            if param.base is not None and param.base.base.copy.home == home:
                look.shared[slot] = param.base
            else:
                lacking.append((slot, param))
        key = (home, *[(id(param), param.signature) for _, param in lacking])
        if not lacking:
            self._pending = None
        elif self._pending is None or self._pending.key != key:
            live = Look()
            for slot, _ in lacking:
                live.slot(look.frozen_params[slot][0])
            self._pending = BaseCopy(key, Copy(home), live)
        for number, (slot, param) in enumerate(lacking):
            assert self._pending is not None
            look.shared[slot] = BaseTensor(self._pending, number, param)

    @property
    def pending(self) -> BaseCopy | None:
        """A base that the last look refers to and that is still to be copied."""
        return self._pending

    def forget_pending(self) -> None:
        """Somebody may still be getting memory for it: the next look gets another."""
        self._pending = None

    def give_up(self) -> None:
        """Share nothing from now on."""
        self._works = False
        self.clear()

    def clear(self) -> None:
        self._params.clear()
        self._early.clear()
        self._pending = None

    # -- copying and checking

    def check(self, look: Look) -> BaseCheck | None:
        """Copy the base that the look lacks, and take checksums of everything else that it shares."""
        pending, self._pending = self._pending, None
        tensors = [] if pending is None else pending.fill(self._checksums)
        self._updates = 0 if tensors else self._updates
        checked: list[tuple[int, BaseTensor]] = []
        for slot, shared in look.shared.items():
            assert isinstance(shared, BaseTensor)
            if shared.base is pending:
                shared.copied, shared.param.base = tensors[shared.number], shared
            else:
                checked.append((slot, shared))
        if not checked:
            return None
        return BaseCheck([t for _, t in checked], self._checksums.measure([look.parts[slot] for slot, _ in checked]))

    def before_update(self) -> None:
        """The optimizer is about to step."""
        self._updates += 1
        if self._updates not in _EARLY:
            return
        bases: list[BaseTensor] = []
        parts: list[Tensor] = []
        for param in self._params.values():
            p = param.ref()
            if p is not None and param.base is not None and _signature(p, part := local_storage(p)) == param.signature:
                bases.append(param.base)
                parts.append(part)
        if bases:
            self._early.append(BaseCheck(bases, self._checksums.measure(parts)))

    def moved_early(self) -> list[str]:
        """Names of parameters that are known to have moved, though no snapshot was taken since."""
        results = [(check, check.changed(wait=False)) for check in self._early]
        self._early = [check for check, changed in results if changed is None]
        return self.moved([tensor for _, changed in results for tensor in changed or ()])

    def moved(self, changed: Sequence[BaseTensor]) -> list[str]:
        """From now on these are copied in full; the names of those of which that was not known yet."""
        new = [t.param for t in changed if not t.param.moved]
        for param in new:
            param.moved, param.base = True, None
        return [param.name for param in new]

    # -- memory

    def nbytes(self, copies: Iterable[Copy]) -> int:
        """Bytes of all shared tensors that are in use, by the run or by these copies."""
        used = [p.base for p in self._params.values()]
        used += [t for copy in copies for t in copy.shared.values() if isinstance(t, BaseTensor)]
        return sum({id(t): bytes_of(t.tensor) for t in used if t is not None}.values())

    def bytes_for(self, look: Look) -> BaseBytes:
        """What the base of this look takes, and for how much of it memory is still to be found."""
        params = {slot: self._params[id(p)] for slot, (p, _) in look.frozen_params.items() if slot in look.shared}
        homes = {slot: p.base.base.copy.home if p.base is not None else None for slot, p in params.items()}
        there, host = ([look.parts[s] for s, held in homes.items() if held != home] for home in ("device", "host"))
        total = sum(total_bytes(look.parts[slot] for slot in params).values())
        return BaseBytes(total, total_bytes(there), sum(total_bytes(host).values()))


def _signature(param: Tensor, part: Tensor) -> tuple[Any, ...] | None:
    """What the host sees change when a parameter is changed or replaced; None where its bits cannot be read."""
    plain = leaves(part)
    if not plain:
        return None
    inner = [param._local_tensor] if isinstance(param, DTensor) else []
    versions = [-1 if t.is_inference() else t._version for t in (param, *inner)]
    return (*versions, *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in plain])


def describe_moved(names: Sequence[str], dropped: int | None = None) -> str:
    """What is said when a frozen parameter was changed past autograd, and a snapshot was dropped for it."""
    few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    drop = "" if dropped is None else f"the snapshot of attempt {dropped} is dropped, and "
    return (
        f"frozen parameters changed without a new tensor version (written through .data, or damaged): {few}; "
        f"{drop}snapshots copy these parameters in full from now on"
    )
