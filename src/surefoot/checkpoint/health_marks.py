"""Which checkpoints proved good by what followed them, and which may hold the trouble: marked so on the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from surefoot.background import BackgroundTask
from surefoot.checkpoint.store import SaveFailed, Store


class HealthMarks:
    """Follows the checkpoints of a live run; marks are put behind the training's back, the disk may take its time."""

    def __init__(
        self, store: Store, behind: Callable[[Callable[[], None]], BackgroundTask[None]], *, first: bool
    ) -> None:
        self._store, self._behind, self._first = store, behind, first
        self._unproven: dict[str, tuple[int, int]] = {}
        """Checkpoints by name, with the attempt after which they were taken, and their step."""
        self._proven = -1
        self.sound = -1
        """The step of the newest that proved healthy."""
        self._last: BackgroundTask[None] | None = None
        self.troubles: list[str] = []
        """What could not be marked."""

    @property
    def busy(self) -> bool:
        """Whether a mark is on its way."""
        return self._last is not None and not self._last.done

    def saved(self, name: str, attempt: int, step: int) -> None:
        self._unproven[name] = attempt, step

    def prove(self, attempt: int) -> None:
        """States of this attempt and before proved good by what followed."""
        if attempt > self._proven:
            self._proven = attempt
            self.mark()

    def doubt(self, attempt: int, why: str) -> None:
        """What was taken after this attempt may hold the trouble."""
        for name, (taken, _) in list(self._unproven.items()):
            if taken > attempt:
                self._put(name, "suspect", why)

    def mark(self) -> None:
        """Mark those that are proven by now."""
        for name, (taken, step) in list(self._unproven.items()):
            if taken <= self._proven:
                self.sound = max(self.sound, step)
                self._put(name, "healthy", f"nothing was wrong up to attempt {self._proven}")

    def _put(self, name: str, health: Literal["healthy", "suspect"], why: str) -> None:
        del self._unproven[name]
        if not self._first:
            return

        def mark() -> None:
            try:
                self._store.mark(name, health, why)
            except LookupError:
                pass  # it has gone since
            except SaveFailed as failure:
                self.troubles.append(f"{name} could not be marked {health}: {failure}")

        self._last = self._behind(mark)
