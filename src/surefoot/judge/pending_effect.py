"""What has to happen before the judge may decide again."""

from __future__ import annotations

from surefoot.judge.thresholds import UPDATES_IN_FLIGHT
from surefoot.records import Action


class PendingEffect:
    """The effect of the last decision, as long as it has not arrived.

    After a rewind was decided, rows do not count until it has happened. After any other decision, updates under way
    were still made without it.
    """

    def __init__(self) -> None:
        self.rewind = False
        self._blind_until = -1
        """The last attempt that was made before the decision took effect."""

    def __bool__(self) -> bool:
        return self.rewind or self._blind_until >= 0

    def decided(self, actions: set[Action], attempt: int) -> None:
        """Such decisions were made at this attempt."""
        if Action.REWIND in actions:
            self.rewind = True
        elif Action.CONSTRAIN in actions:
            self.in_force(attempt)

    def in_force(self, attempt: int) -> None:
        """A decision without a rewind was made at this attempt."""
        self.rewind, self._blind_until = False, attempt + UPDATES_IN_FLIGHT

    def arrived(self, attempt: int) -> bool:
        """This attempt is the first that was made with the last decision in force."""
        return not self.rewind and 0 <= self._blind_until < attempt

    def clear(self) -> None:
        self.rewind, self._blind_until = False, -1

    @property
    def blind_until(self) -> int:
        """The last attempt before a decision without a rewind took effect; -1 where none is pending."""
        return -1 if self.rewind else self._blind_until

    def load(self, *, rewind: bool, blind_until: int) -> None:
        self.rewind, self._blind_until = rewind, blind_until
