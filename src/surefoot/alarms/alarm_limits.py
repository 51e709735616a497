"""How often a receiver is written to: repeats, requests an hour, quiet hours, and a receiver that does not answer."""

from __future__ import annotations

import time
from collections import Counter, deque

from surefoot.alarms.alarm import Alarm
from surefoot.alarms.alarm_target import AlarmLevel, AlarmTarget

HOUR = 3600.0
BACKOFF_SECONDS = (2.0, 8.0)
"""Between the attempts of one alarm."""
OUTAGE_SECONDS = (30.0, 120.0, 600.0)
"""After an alarm could not be sent, how long its receiver is left alone; the last holds from the third on."""
_KEPT_KEYS = 50
_SHOWN = 8
_URGENT_SHARE = 4
"""One in so many of an hour's requests is kept for urgent alarms."""


class AlarmLimits:
    """Decides for one receiver, from times alone, what is sent, and counts what is held back.

    All times are seconds since the epoch; local time is asked for only in `is_quiet`.
    """

    def __init__(self, target: AlarmTarget) -> None:
        self._target = target
        self._requests: deque[float] = deque()
        self._sent_at: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self._held_alarms: dict[str, Alarm] = {}
        """The last alarm held back of each key."""
        self._held_since = 0.0
        self._unshown = 0
        """Held alarms of further keys, beyond what is kept."""
        self._outages = 0
        """Alarms in a row that could not be sent."""
        self._closed_until = 0.0

    def admits(self, alarm: Alarm, now: float) -> bool:
        """Whether this alarm is sent now; else it is counted for the next summary."""
        repeated = now - self._sent_at.get(alarm.key, -HOUR * 1e6) < 60 * self._target.repeat_minutes
        if repeated or self.is_quiet(now) or now < self._closed_until or not self.may_request(now, urgent=alarm.urgent):
            self.hold(alarm, now)
            return False
        return True

    def may_request(self, now: float, *, urgent: bool) -> bool:
        """Whether the limit leaves room for one more request."""
        while self._requests and now - self._requests[0] >= HOUR:
            self._requests.popleft()
        reserved = 0 if urgent else self._target.per_hour // _URGENT_SHARE
        return len(self._requests) < self._target.per_hour - reserved

    def requested(self, now: float) -> None:
        """One request is about to be made."""
        self._requests.append(now)

    def sent(self, alarm: Alarm, now: float) -> None:
        self._outages, self._closed_until = 0, 0.0
        if len(self._sent_at) > 10 * _KEPT_KEYS:
            self._sent_at.clear()
        self._sent_at[alarm.key] = now

    def not_sent(self, alarm: Alarm, now: float) -> None:
        """All attempts failed: leave the receiver alone for a while, and tell it later."""
        self._closed_until = now + OUTAGE_SECONDS[min(self._outages, len(OUTAGE_SECONDS) - 1)]
        self._outages += 1
        self.hold(alarm, now)

    def hold(self, alarm: Alarm, now: float) -> None:
        if not self._held and not self._unshown:
            self._held_since = now
        if alarm.key not in self._held and len(self._held) >= _KEPT_KEYS:
            self._unshown += 1
            return
        self._held[alarm.key] += 1
        self._held_alarms[alarm.key] = alarm

    def summary_due(self, now: float, *, last: bool = False) -> bool:
        """Whether what was held back is to be sent as one alarm now: after an hour, or at once after quiet hours or an
        outage, and when the run has ended."""
        if not self._held and not self._unshown:
            return False
        if last:
            return self.may_request(now, urgent=True)
        if self.is_quiet(now) or now < self._closed_until or not self.may_request(now, urgent=False):
            return False
        waited = now - self._held_since >= HOUR
        return waited or self._outages > 0 or self.is_quiet(self._held_since)

    def take_summary(self, now: float) -> Alarm:
        """What was held back, as one alarm; a single alarm is sent as it is."""
        held, alarms, unshown = self._held, self._held_alarms, self._unshown
        self._held, self._held_alarms, self._unshown = Counter(), {}, 0
        total = sum(held.values()) + unshown
        first = min(alarms.values(), key=lambda alarm: list(AlarmLevel).index(alarm.level))
        if total == 1:
            return first
        since = time.strftime("%H:%M", time.localtime(self._held_since))
        lines = [f"{count} x {alarms[key].title}" for key, count in held.most_common(_SHOWN)]
        if len(held) > _SHOWN or unshown:
            lines.append(f"and {max(0, len(held) - _SHOWN)} other kinds" + (f", {unshown} alarms more" * (unshown > 0)))
        return Alarm(
            level=first.level,
            key=f"summary {now}",
            title=f"{total} alarms held back since {since}, the most serious: {first.title}",
            text="\n".join([*lines, *([first.text] if first.text else [])]),
            step=first.step,
            rank=first.rank,
            time=now,
            events=first.events,
        )

    # -- quiet hours

    def is_quiet(self, now: float) -> bool:
        if self._target.quiet is None:
            return False
        local = time.localtime(now)
        minute, (start, end) = local.tm_hour * 60 + local.tm_min, self._target.quiet
        return start <= minute < end if start < end else minute >= start or minute < end
