"""Bans the samples that broke an update, and keeps all bans of a run through rewinds and resumes."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from surefoot.guard.context import GuardContext
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.origin_control import KnowsSamples
from surefoot.journal.ban_list import BANS_JSON, BY_GUARD, BY_LOOP, Ban, BanList, InvalidBans, read_bans, write_bans
from surefoot.measure.cross_rank import Ranks
from surefoot.origin_record import SENTENCES, Origin, OriginKind
from surefoot.records import EVENT_MARK, StepMetrics
from surefoot.trials.rank_agreement import RankAgreement

log = logging.getLogger("surefoot")
MAX_AT_ONCE = 32
"""Samples of one batch that are banned at most."""
_SHOWN = 5
_KINDS = tuple(OriginKind)


@runtime_checkable
class BansSamples(KnowsSamples, Protocol):
    """A loader that leaves banned samples out, as the loaders of `surefoot.data` do."""

    bans_changed: Callable[[], None] | None

    @property
    def banned(self) -> Sequence[int]: ...

    @property
    def num_samples(self) -> int: ...

    def lift(self, samples: Any) -> None: ...

    def source_of(self, sample: int) -> str: ...


class SampleBans:
    """The bans of one run. Every rank bans the same samples at the same attempt; rank 0 writes them to `bans.json`."""

    def __init__(
        self, context: GuardContext, reader: MetricsReader, ranks: Ranks, all_ranks_guarded: Callable[[], bool]
    ) -> None:
        self._reader, self._ranks, self._all_ranks_guarded = reader, ranks, all_ranks_guarded
        loader = context.loader
        self._loader = loader if isinstance(loader, BansSamples) and not context.policy.observe else None
        self._max_fraction = context.policy.max_banned_fraction
        self._agreement = RankAgreement(ranks)
        self.automatic = False
        """Samples are banned without being asked."""
        self._list = BanList()
        self._applying = False
        """This object changes the loader's bans itself."""

    def start(self, *, finds_samples: bool) -> None:
        """Ban what was banned before in this run, after a resume; all ranks must call this.

        `finds_samples` says that this rank looks for the samples that broke an update.
        """
        found = self._ranks.broadcast(self._read() if self._ranks.rank == 0 else None)
        wanted = finds_samples and self._loader is not None and self._max_fraction > 0
        self.automatic = not self._agreement.any(not wanted)
        loader = self._loader
        if loader is None:
            return
        if found.num_samples not in (0, loader.num_samples):
            self._warn(
                f"the bans in {BANS_JSON} are ignored: they are of a data set with {found.num_samples:,} samples, and "
                f"this one has {loader.num_samples:,}"
            )
            found = BanList()
        if found != BanList() and found.num_samples == 0:
            found = replace(found, num_samples=loader.num_samples)
            self._list = found
            self._write()
        self._list = replace(found, num_samples=loader.num_samples)
        now = set(loader.banned)
        wanted_samples = {sample for sample in now | found.samples - set(found.lifted) if sample < loader.num_samples}
        wanted_samples -= set(found.lifted)
        loader.bans_changed = BanHook(self)
        try:
            self._change(lambda: _set_bans(loader, now, wanted_samples))
        except ValueError as error:  # too few samples would be left
            self._warn(f"the bans in {BANS_JSON} are not applied: {error}")
            return
        if wanted_samples or found.lifted:
            lifted = f", {_numbers(sorted(found.lifted))} lifted" if found.lifted else ""
            text = f"{len(wanted_samples)} samples are banned, as before{lifted}"
            values = {"samples": sorted(wanted_samples), "lifted": list(found.lifted)}
            self._note("bans", text, values=values)

    def release(self) -> None:
        if self._loader is not None:
            self._loader.bans_changed = None

    # -- the guard's own bans

    def ban_culprits(self, row: StepMetrics, origin: Origin | None) -> bool:
        """Ban the samples to blame for a refused update; returns whether any were banned, the same on all ranks.

        On several ranks all of them call this for the same row, with what each has found.
        """
        if not self.automatic or (not self._agreement.alone and not self._all_ranks_guarded()):
            return False
        samples, kind = self._agreed(origin)
        loader = self._loader
        if not samples or loader is None:
            return False
        known = set(loader.banned)
        new = [sample for sample in samples if sample not in known and sample < loader.num_samples]
        limit = max(1, int(self._max_fraction * loader.num_samples))
        count = sum(ban.by == BY_GUARD for ban in self._list.bans)
        if count + len(new) > limit:
            self.automatic = False
            self._warn(
                f"samples {_numbers(new)} are not banned, and no others will be: {count} of {loader.num_samples:,} are "
                f"banned already, and at most {limit} may be (Policy.max_banned_fraction={self._max_fraction:g}). So "
                "many bad samples point to the data as a whole, or to the model: see surefoot data and diagnose"
            )
            return False
        return bool(new) and self._ban(loader, row, new, SENTENCES[kind][1])

    def _agreed(self, origin: Origin | None) -> tuple[list[int], OriginKind]:
        """The samples that any rank has found, and why."""
        mine = list(origin.dataset_samples[:MAX_AT_ONCE]) if origin else []
        kind = origin.kind if origin else OriginKind.NONE
        if self._agreement.alone:
            return mine, kind
        rows = self._agreement.gather([_KINDS.index(kind), *mine, *[-1] * (MAX_AT_ONCE - len(mine))])
        found = sorted({int(sample) for row in rows for sample in row[1:] if sample >= 0})
        kinds = [_KINDS[int(row[0])] for row in rows if row[1] >= 0]
        return found, kinds[0] if kinds else OriginKind.NONE

    def _ban(self, loader: BansSamples, row: StepMetrics, samples: Sequence[int], reason: str) -> bool:
        try:
            self._change(lambda: loader.ban(samples))
        except ValueError as error:  # too few samples would be left
            self._warn(f"samples {_numbers(samples)} cannot be banned: {error}")
            return False
        bans = [self._ban_of(sample, reason, BY_GUARD, row) for sample in samples]
        self._list = self._list.with_bans(bans)
        self._write()
        sources = [ban.source for ban in bans]
        shown = ", ".join(_with_source(ban) for ban in bans[:_SHOWN])
        more = f" and {len(bans) - _SHOWN} more" if len(bans) > _SHOWN else ""
        text = (
            f"banned sample{'s' if len(bans) > 1 else ''} {shown}{more}, which broke the update at step {row.step}: "
            f"{reason}. To lift it: surefoot data {self._reader.journal.run_dir} --lift {samples[0]}"
        )
        values = {"samples": list(samples), "sources": sources, "reason": reason, "step": row.step}
        self._note("banned", text, row=row, values=values)
        if self._ranks.rank == 0:
            log.warning("surefoot: step %d: %s", row.step, text, extra={EVENT_MARK: True})
        return True

    # -- what the loop does itself

    def changed_by_loop(self) -> None:
        """The loop has called `ban` or `lift` of the loader."""
        loader = self._loader
        if loader is None or self._applying:
            return
        now = set(loader.banned)
        new, gone = sorted(now - self._list.samples), sorted(self._list.samples - now)
        bans = [self._ban_of(sample, "banned by the training loop", BY_LOOP, None) for sample in new]
        self._list = self._list.without(gone).with_bans(bans) if gone else self._list.with_bans(bans)
        self._write()
        if new:
            sources = [ban.source for ban in bans]
            self._note("banned", f"the loop banned {_numbers(new)}", values={"samples": new, "sources": sources})

    # -- helpers

    def _ban_of(self, sample: int, reason: str, by: str, row: StepMetrics | None) -> Ban:
        source = "" if self._loader is None else self._loader.source_of(sample)
        step = self._reader.step if row is None else row.step
        attempt = self._reader.last_attempt if row is None else row.attempt
        return Ban(sample=sample, source=source, reason=reason, by=by, time=time.time(), step=step, attempt=attempt)

    def _change(self, call: Callable[[], None]) -> None:
        self._applying = True
        try:
            call()
        finally:
            self._applying = False

    def _read(self) -> BanList:
        try:
            return read_bans(self._reader.journal.run_dir)
        except InvalidBans as error:
            self._warn(f"bans of earlier processes are not known: {error}")
            path = self._reader.journal.run_dir / BANS_JSON
            try:
                path.replace(path.with_name(f"{BANS_JSON}.damaged"))
            except OSError:
                log.debug("surefoot: %s cannot be renamed", path)
            return BanList()

    def _write(self) -> None:
        if self._ranks.rank:
            return
        try:
            write_bans(self._reader.journal.run_dir, self._list)
        except OSError as error:
            self._warn(f"{BANS_JSON} was not written, so a resumed run may forget bans: {error}")

    def _warn(self, message: str) -> None:
        self._note("bans", message)
        if self._ranks.rank == 0:
            log.warning("surefoot: %s", message)

    def _note(self, name: str, text: str, *, row: StepMetrics | None = None, values: Any = None) -> None:
        if self._ranks.rank == 0:
            self._reader.note(name, text, row=row, values=values, attempt=max(0, self._reader.last_attempt))


class BanHook:
    """Informs a guard of what the loop bans; nothing once the guard is gone, and in a copy of the loader."""

    def __init__(self, bans: SampleBans | None = None) -> None:
        self._bans = None if bans is None else weakref.ref(bans)

    def __call__(self) -> None:
        bans = None if self._bans is None else self._bans()
        if bans is not None:
            bans.changed_by_loop()

    def __reduce__(self) -> Any:
        return BanHook, ()


def _set_bans(loader: BansSamples, now: set[int], wanted: set[int]) -> None:
    if now - wanted:
        loader.lift(sorted(now - wanted))
    if wanted - now:
        loader.ban(sorted(wanted - now))


def _with_source(ban: Ban) -> str:
    return f"{ban.sample} ({ban.source})" if ban.source else str(ban.sample)


def _numbers(samples: Iterable[int]) -> str:
    listed = [*samples]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(str, listed[:_SHOWN])) + more
