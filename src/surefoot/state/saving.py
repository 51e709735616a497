"""Saves behind the training's back: the run is copied in its own thread, everything else happens in another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.errand import Errand, Runner
from surefoot.state.capture import Whole
from surefoot.state.copies import Copy, Look
from surefoot.state.disk.files import write_pieces
from surefoot.state.disk.names import Names, names_of
from surefoot.state.disk.pieces import Pieces, take_apart
from surefoot.state.disk.plain import Plain
from surefoot.state.home import Home, free_bytes
from surefoot.state.rendezvous import Meeting, Team
from surefoot.state.store import Entry, Kept, SaveFailed, Store
from surefoot.state.tree import freeze

ROOM = 0.5
"""Share of the free memory of a device that a copy may take there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A run as it was after an attempt, on its way to the disk."""

    attempt: int
    kind: str
    copy: Copy
    ready: tuple[Any, ...] = ()
    """Events on the devices after which the copy is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a save."""

    step: int
    attempt: int
    kind: str
    kept: Kept | None = None
    """The checkpoint; only the first process has it."""
    error: str = ""
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    """What of the run cannot be saved."""
    removed: tuple[str, ...] = ()
    trouble: str = ""
    """Why older checkpoints could not go."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What moves on when a loop fetches its next batch, as it was before that."""

    extra: Mapping[str, Any]
    """States by the name of what they are of."""
    chance: list[tuple[Any, Any]] | None = None
    """Random numbers; None where nothing drew any since."""

    def put_into(self, look: Look) -> None:
        states = {name: freeze(state, look.slot) for name, state in self.extra.items()}
        chance = look.frozen.chance if self.chance is None else self.chance
        look.frozen = replace(look.frozen, extra={**look.frozen.extra, **states}, chance=chance)


@dataclass(slots=True)
class Saving:
    """At most one save at a time."""

    whole: Whole
    store: Store
    team: Team = field(default_factory=Team)
    _runner: Runner = field(default_factory=lambda: Runner("surefoot-save"))
    _errand: Errand[Outcome] | None = None
    _spare: Copy | None = None
    _arriving: Copy | None = None

    @property
    def busy(self) -> bool:
        return self._errand is not None

    # -- in the training's thread

    def take(self, attempt: int, *, kind: str = "regular", earlier: Earlier | None = None) -> Taken:
        """Copy the run as it is now: the only thing that training waits for.

        Of some things `earlier` knows how they were before the loop went on to its next batch.
        """
        look = self.whole.look()
        if earlier is not None:
            earlier.put_into(look)
        into, self._spare = self._spare, None
        copy = self.whole.keep(look, into, home=_home(look, into))
        self._arriving = copy
        ready = tuple(torch.cuda.current_stream(d).record_event() for d in look.nbytes if d.type == "cuda")
        return Taken(attempt=attempt, kind=kind, copy=copy, ready=(*ready, *(e for _, e in copy.arrivals)))

    def settle(self) -> None:
        """To be called before an optimizer's step: a copy may still be on its way to the host."""
        if self._arriving is not None:
            self._arriving.settle()
            self._arriving = None

    def write(self, taken: Taken, step: int, about: Mapping[str, Any], guard: Any = None) -> None:
        """Have a copy written, as the state after so many updates; `guard` is what else is to be told in JSON."""
        if self._errand is not None:
            raise RuntimeError("a save is still under way")
        self._errand = self._runner.send(lambda: self._save(taken, step, about, guard))

    def forget(self, taken: Taken) -> None:
        """The copy will not be written after all; its memory serves the next one."""
        self._spare = taken.copy

    def outcome(self, *, wait: bool = False) -> Outcome | None:
        """What came of the save, once, as soon as it is over."""
        if self._errand is None or not (wait or self._errand.over):
            return None
        errand, self._errand = self._errand, None
        return errand.result()

    # -- in the other thread

    def _save(self, taken: Taken, step: int, about: Mapping[str, Any], guard: Any) -> Outcome:
        began = time.monotonic()
        told = {"step": step, "attempt": taken.attempt, "kind": taken.kind}
        try:
            for event in taken.ready:
                event.synchronize()
            pieces = self._pieces(taken, guard)
            saved = self._together(taken, step, pieces, {**about, "kind": taken.kind, "world_size": self.team.world})
        except SaveFailed as failure:
            return Outcome(**told, error=failure.reason, seconds=time.monotonic() - began)
        except Exception as error:  # whatever it is, training must hear of it and go on
            return Outcome(**told, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
        finally:
            self._spare = taken.copy
        return Outcome(**told, **saved, left_out=tuple(pieces.left_out), seconds=time.monotonic() - began)

    def _pieces(self, taken: Taken, guard: Any) -> Pieces:
        names = self.names()
        pieces = take_apart(taken.copy, names, rank=self.team.rank, world_size=self.team.world)
        plain = Plain(lambda path, value: None, lambda value: isinstance(value, Tensor))
        pieces.told["guard"] = plain.told(guard, "guard")
        pieces.left_out += plain.left_out
        if taken.kind != "emergency":
            _must_be_finite(pieces, names)
        return pieces

    def names(self) -> Names:
        return names_of(zip(self.whole.root_names, self.whole.roots, strict=True), self.whole.optimizers)

    def _together(self, taken: Taken, step: int, pieces: Pieces, about: Mapping[str, Any]) -> dict[str, Any]:
        meeting = Meeting(self.store.root, self.team, step, taken.attempt)
        if self.team.rank > 0:
            try:
                meeting.done(self._written(meeting, pieces))
            except (SaveFailed, OSError) as error:
                meeting.failed(str(error))
                raise
            return {}
        needs = sum(s.tensor.numel() * s.tensor.element_size() for s in pieces.shards.values())
        try:
            with self.store.writing(step, taken.attempt, needs=needs) as draft:
                if self.team.world > 1:
                    meeting.lead(draft.folder)
                entries = {w.name: Entry(w.size, w.digest) for w in write_pieces(draft.folder, pieces, rank=0)}
                saved = self.store.commit(draft, entries | meeting.gather(), about)
        finally:
            if self.team.world > 1:
                meeting.over()
        return {"kept": saved.kept, "removed": saved.removed, "trouble": saved.trouble}

    def _written(self, meeting: Meeting, pieces: Pieces) -> dict[str, Entry]:
        folder = meeting.follow()
        written = write_pieces(folder, pieces, rank=self.team.rank)
        return {w.name: Entry(w.size, w.digest) for w in written}


def _home(look: Look, into: Copy | None) -> Home:
    """Beside the model where there is room, or a copy already; else in the memory of the host."""
    if into is not None and into.kinds == look.kinds:
        return into.home
    room = all(size <= ROOM * free_bytes(device) for device, size in look.nbytes.items() if device.type == "cuda")
    return "device" if room else "host"


def _must_be_finite(pieces: Pieces, names: Names) -> None:
    """Weights that are not finite never take the place of good ones."""
    for name, shard in pieces.shards.items():
        weight = name in names.tensors and name not in names.buffers and shard.tensor.is_floating_point()
        if weight and not bool(torch.isfinite(shard.tensor).all()):
            raise SaveFailed(f"{name} holds values that are not finite, which must not replace good ones")
