"""Saves behind the training's back: the run is copied in its own thread, everything else happens in another."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.background import BackgroundTask, BackgroundWorker
from surefoot.checkpoint.copies import Copy, Look
from surefoot.checkpoint.format.consistency import check
from surefoot.checkpoint.format.hashing import Hashing
from surefoot.checkpoint.format.json_state import Plain
from surefoot.checkpoint.format.mismatch import few
from surefoot.checkpoint.format.param_names import Names, names_of, with_alike
from surefoot.checkpoint.format.pieces import Pieces, add_probe, not_finite, take_apart
from surefoot.checkpoint.format.staging import Stage, prepare_stage
from surefoot.checkpoint.format.write_files import write_pieces
from surefoot.checkpoint.observed_file import Pulse, opener
from surefoot.checkpoint.pending_save import EarlierState, Outcome, PendingSave
from surefoot.checkpoint.rank_rendezvous import Meeting, RankGroup
from surefoot.checkpoint.replay_check import ReplayCheck
from surefoot.checkpoint.side_stream import aside
from surefoot.checkpoint.snapshot_memory import Home, free_bytes
from surefoot.checkpoint.store import Entry, Saved, SaveFailed, Store
from surefoot.checkpoint.train_state import TrainState

ROOM = 0.5
"""Share of the free memory of a device that a copy may take there."""
_POLL = 0.002


@dataclass(slots=True)
class AsyncSaver:
    """At most one save at a time."""

    whole: TrainState
    store: Store
    team: RankGroup = field(default_factory=RankGroup)
    pulse: Pulse = field(default_factory=Pulse)
    """Of the disk, while tensors are written to it; what else is done, the store watches itself."""
    probe: ReplayCheck | None = None
    _runner: BackgroundWorker = field(default_factory=lambda: BackgroundWorker("surefoot-save"))
    home: Home | None = None
    """Where copies are made; chosen by the room there is when it is not said."""
    _meetings: int = 0
    _errand: BackgroundTask[Outcome] | None = None
    _making: BackgroundTask[Copy] | None = None
    _spare: Copy | None = None
    _names: Names | None = None
    _arriving: Copy | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way, or the memory for one still being made."""
        if self._making is not None and self._making.done:
            self._spare, self._making = self._making.result(), None
        return self._errand is not None or self._making is not None

    # -- in the training's thread

    def prepare(self) -> None:
        """Have the memory for a first save made ready: on the host that takes seconds, and on the device it waits."""
        look = self.whole.look()
        if self._spare is not None or self._making is not None or not look.devices:
            return
        if self._where(look) == "host":
            self._making = self._runner.submit(lambda: Copy("host").make_room(look))
        else:
            copy = self._spare = self.whole.keep(look, home="device")
            names, team = self._named(look), self.team
            self._runner.submit(lambda: _rehearse(take_apart(copy, names, rank=team.rank, world_size=team.world)))

    def take(self, attempt: int, *, kind: str = "regular", earlier: EarlierState | None = None) -> PendingSave:
        """Copy the run as it is now: the only thing that training waits for.

        Of some things `earlier` knows how they were before the loop went on to its next batch.
        """
        look = self.whole.look()
        if earlier is not None:
            earlier.put_into(look)
        into, self._spare = self._spare, None
        copy = self.whole.keep(look, into, home=self._where(look, into))
        self._arriving = copy
        probed = None
        if self.probe is not None:
            probed = self.probe.take(None if earlier is None else {id(live): was for live, was in earlier.buffers})
        ready = tuple(torch.cuda.current_stream(d).record_event() for d in look.devices)
        self._meetings += 1
        ready = (*ready, *(e for _, e in copy.arrivals))
        told: dict[str, Any] = {"attempt": attempt, "kind": kind, "names": self._named(look), "probed": probed}
        return PendingSave(copy=copy, meeting=self._meetings, ready=ready, **told)

    def lend(self, copy: Copy, attempt: int) -> PendingSave:
        """A copy that somebody else has made, and keeps as it is until it is written."""
        self._meetings += 1
        devices = {t.device for t in copy.tensors if t.is_cuda}
        ready = tuple(torch.cuda.current_stream(d).record_event() for d in devices)
        told: dict[str, Any] = {"attempt": attempt, "kind": "emergency", "names": self._named(self.whole.look())}
        return PendingSave(copy=copy, meeting=self._meetings, ready=ready, lent=True, **told)

    def _named(self, look: Look) -> Names:
        """The names of what was found; made anew only when something is there that has none."""
        places = ((place.root, place.module, place.name) for place in look.frozen.places)
        held = (id(p) for o in self.whole.optimizers for group in o.param_groups for p in group["params"])
        known = self._names
        if known is None or any(p not in known.places for p in places) or any(i not in known.of for i in held):
            known = self._names = self.names()
        return known

    def settle(self) -> None:
        """To be called before an optimizer's step: a copy may still be on its way to the host."""
        if self._arriving is not None:
            self._arriving.settle()
            self._arriving = None

    def write(self, taken: PendingSave, step: int, about: Mapping[str, Any], guard: Any = None) -> None:
        """Have a copy written, as the state after so many updates; `guard` is what else is to be told in JSON."""
        if self._errand is not None:
            raise RuntimeError("a save is still under way")
        self._errand = self._runner.submit(lambda: self._save(taken, step, about, guard))

    def behind(self, work: Callable[[], None]) -> BackgroundTask[None]:
        """Have something small done on the disk, after the save that is under way."""
        return self._runner.submit(work)

    def forget(self, taken: PendingSave) -> None:
        """The copy will not be written after all; its memory serves the next one."""
        self._spare = taken.copy

    def absent(self, why: str) -> None:
        """Tell the others, behind the training's back, that this process takes no part in this save."""
        if self.team.world == 1:
            return
        self._meetings += 1
        meeting = Meeting(self.store.root, self.team, self._meetings)
        threading.Thread(target=meeting.failed, args=(why,), name="surefoot-absent", daemon=True).start()

    def outcome(self, *, wait: bool = False, patience: float = math.inf, until: float = math.inf) -> Outcome | None:
        """What came of the save, once, as soon as it is over.

        With `wait` it is waited for, until this moment, and unless the disk is silent for longer than `patience`.
        """
        errand = self._errand
        while wait and errand is not None and not errand.done:
            if self.pulse.silent > patience or time.monotonic() > until:
                return None
            time.sleep(_POLL)
        if errand is None or not errand.done:
            return None
        self._errand = None
        return errand.result()

    def _where(self, look: Look, into: Copy | None = None) -> Home:
        """Beside the model where there is room, or a copy already; else in the memory of the host."""
        if self.home is not None:
            return self.home
        if into is not None and into.kinds == look.kinds:
            return into.home
        room = all(size <= ROOM * free_bytes(device) for device, size in look.nbytes.items() if device.type == "cuda")
        return "device" if room else "host"

    # -- in the other thread

    def _save(self, taken: PendingSave, step: int, about: Mapping[str, Any], guard: Any) -> Outcome:
        began = time.monotonic()
        probe = None if taken.probed is None else taken.probed.seconds
        told: dict[str, Any] = {"step": step, "attempt": taken.attempt, "kind": taken.kind, "probe": probe}
        try:
            for event in taken.ready:
                event.synchronize()
            with aside(t.device for t in taken.copy.tensors):
                metrics = {name: float(value) for name, value in about.get("metrics", {}).items()}
                more = {"metrics": metrics, "kind": taken.kind, "world_size": self.team.world}
                told |= self._together(taken, step, guard, {**about, **more})
        except SaveFailed as failure:
            return Outcome(**told, error=failure.reason, seconds=time.monotonic() - began)
        except Exception as error:  # whatever it is, training must hear of it and go on
            return Outcome(**told, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
        finally:
            self._spare = self._spare if taken.lent else taken.copy
        return Outcome(**told, seconds=time.monotonic() - began)

    def _pieces(self, taken: PendingSave, guard: Any, meeting: Meeting) -> tuple[Pieces, Hashing]:
        which = {"rank": self.team.rank, "world_size": self.team.world}
        pieces = take_apart(taken.copy, taken.names, **which)
        hashing = Hashing(taken.copy, pieces, taken.names)
        extra = hashing.extra() if self.team.world > 1 else {}
        alike = meeting.compare(extra) if extra else frozenset()
        if alike:
            pieces = take_apart(taken.copy, with_alike(taken.names, alike), **which)
        plain = Plain(lambda path, value: None, Tensor)
        pieces.told["guard"] = plain.told(guard, "guard")
        pieces.left_out += plain.left_out
        if taken.probed is not None:
            add_probe(pieces, taken.probed.told(), self.team.rank)
        if taken.kind != "emergency" or taken.lent:
            _must_be_finite(pieces)
        return pieces, hashing

    def names(self) -> Names:
        """Names for the run as it is now."""
        return names_of(zip(self.whole.root_names, self.whole.roots, strict=True), self.whole.optimizers)

    def _together(self, taken: PendingSave, step: int, guard: Any, about: Mapping[str, Any]) -> dict[str, Any]:
        meeting = Meeting(self.store.root, self.team, taken.meeting)
        if self.team.rank > 0:
            try:
                pieces, hashing = self._pieces(taken, guard, meeting)
                entries = self._written(meeting.follow(), pieces, hashing)
            except Exception as error:
                meeting.failed(str(error))
                raise
            meeting.done(entries)
            return {"left_out": tuple(pieces.left_out)}
        error = "the first process has failed"
        try:
            pieces, hashing = self._pieces(taken, guard, meeting)
            saved = self._lead(meeting, pieces, hashing, about, step=step, attempt=taken.attempt)
            error = ""
        except SaveFailed as failure:
            error = failure.reason
            raise
        finally:
            if self.team.world > 1:
                meeting.over(error)
        left_out = tuple(pieces.left_out)
        return {"kept": saved.kept, "removed": saved.removed, "trouble": saved.trouble, "left_out": left_out}

    def _lead(
        self, meeting: Meeting, pieces: Pieces, hashing: Hashing, about: Mapping[str, Any], *, step: int, attempt: int
    ) -> Saved:
        needs = sum(s.tensor.numel() * s.tensor.element_size() for s in pieces.shards.values())
        try:
            draft = self.store.draft(step, attempt, needs=needs)
        except SaveFailed as failure:
            meeting.failed(failure.reason)
            raise
        with self.store.filling(draft):
            if self.team.world > 1:
                meeting.lead(draft.folder)
            entries = self._written(draft.folder, pieces, hashing) | meeting.gather()
            if self.team.world > 1:
                check(draft.folder)
            else:
                _must_be_whole(pieces)
            return self.store.commit(draft, entries, about)

    def _written(self, folder: Path, pieces: Pieces, hashing: Hashing) -> dict[str, Entry]:
        opened = opener(self.store.files, self.pulse)
        written = write_pieces(folder, pieces, rank=self.team.rank, opener=opened, hashing=hashing)
        return {w.name: Entry(w.size, w.digest) for w in written}


def _rehearse(pieces: Pieces) -> None:
    """Do once what a save does on a device: kernels are loaded and memory is asked for at their first use, and nobody
    can launch anything meanwhile. Which kernels, and how much, goes by what there is to save."""
    prepare_stage()
    with aside(shard.tensor.device for shard in pieces.shards.values()):
        not_finite(pieces)
        for _ in Stage().contents([shard.tensor for shard in pieces.shards.values() if shard.tensor.is_cuda]):
            pass


def _must_be_whole(pieces: Pieces) -> None:
    """What is told of is written, all of it; with one process that is known without a look at the files."""
    parts = {name for name, shard in pieces.shards.items() if tuple(shard.tensor.shape) != shard.shape}
    lacking = parts | (pieces.slots.keys() - pieces.shards.keys())
    if lacking:
        raise SaveFailed(
            f"only this process saves, and {few(sorted(lacking))} is spread over several;"
            " surefoot.attach(..., resume=True) in each of them saves all"
        )


def _must_be_finite(pieces: Pieces) -> None:
    """Weights that are not finite never take the place of good ones."""
    amiss = not_finite(pieces)
    if amiss:
        raise SaveFailed(f"values that are not finite, which must not replace good ones, in {few(amiss)}")
