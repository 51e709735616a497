"""Letting old checkpoints go, once it is sure that enough whole ones stay."""

from __future__ import annotations

from surefoot.checkpoint.store.entry import StoredCheckpoint, fingerprint, verified
from surefoot.checkpoint.store.files import Files
from surefoot.checkpoint.store.retention import Retention, going
from surefoot.checkpoint.store.write import retire


class Pruning:
    """Remembers which checkpoints were read in full, so that each is read once and not at every save."""

    def __init__(self, keep: Retention) -> None:
        self._keep = keep
        self._known: dict[str, object] = {}

    def trust(self, kept: StoredCheckpoint) -> None:
        """Every byte of it was right just now."""
        self._known[kept.name] = fingerprint(kept)

    def prune(self, there: list[StoredCheckpoint], newest: StoredCheckpoint, files: Files) -> list[str]:
        """Remove what the rules let go, the newest first in `there`; tells what went."""
        gone = going(there, self._keep, protect={newest.name})
        spared = self._spared(there, gone, files) if gone else set[str]()
        removed: list[str] = []
        for kept in gone:
            if kept.name not in spared:
                retire(kept.folder, files)
                self._known.pop(kept.name, None)
                removed.append(kept.name)
        return removed

    def _spared(self, there: list[StoredCheckpoint], gone: list[StoredCheckpoint], files: Files) -> set[str]:
        """Of those that should go the ones that must stay, because too few of the others are whole."""
        leaving = {kept.name for kept in gone}
        whole = 0
        spared: set[str] = set()
        for kept in sorted(there, key=lambda kept: kept.name in leaving):
            if whole >= self._keep.least:
                break
            if self._whole(kept, files):
                whole += 1
                spared |= {kept.name} & leaving
        return spared

    def _whole(self, kept: StoredCheckpoint, files: Files) -> bool:
        """Whether every byte is right: read now, unless it was read before and no file has been touched since."""
        now = fingerprint(kept)
        if now is None or kept.wrong:
            return False
        if self._known.get(kept.name) != now:
            if verified(kept, files).wrong:
                return False
            self._known[kept.name] = now
        return True
