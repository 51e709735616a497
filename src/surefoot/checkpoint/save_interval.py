"""How often a run is saved, by its own count of updates and by a clock that nobody sets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class SaveInterval:
    """How often a run is saved."""

    steps: int = 1000
    seconds: float = 3600.0
    """The longest between two saves, by a clock that nobody sets."""
    _step: int = -1
    _when: float = field(default_factory=time.monotonic)
    _hurry: bool = False

    def due(self, step: int) -> bool:
        if self._step < 0:
            self._step = step
        return self._hurry or step - self._step >= self.steps or time.monotonic() - self._when >= self.seconds

    def overdue(self, step: int) -> bool:
        """A second interval has passed; by the count of steps alone, which all processes share."""
        return self._step >= 0 and step - self._step >= 2 * self.steps

    def hurry(self) -> None:
        """What was done did not count."""
        self._hurry = True

    def done(self, step: int) -> None:
        self._step, self._when, self._hurry = step, time.monotonic(), False
