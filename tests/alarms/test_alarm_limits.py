from __future__ import annotations

import time
from typing import Any

from surefoot.alarms.alarm import Alarm
from surefoot.alarms.alarm_limits import HOUR, OUTAGE_SECONDS, AlarmLimits
from surefoot.alarms.alarm_target import AlarmLevel, alarm_targets

NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))


def limits(**options: Any) -> AlarmLimits:
    return AlarmLimits(alarm_targets({"to": "https://example.com/x", **options})[0])


def alarm(key: str, level: AlarmLevel = AlarmLevel.SEVERE) -> Alarm:
    return Alarm(level=level, key=key, title=f"title of {key}")


def offer(limited: AlarmLimits, offered: Alarm, now: float) -> bool:
    """Send it if it is admitted."""
    if not limited.admits(offered, now):
        return False
    limited.requested(now)
    limited.sent(offered, now)
    return True


def test_the_same_alarm_is_sent_once_until_its_time_has_passed() -> None:
    limited = limits(repeat_minutes=30)
    sent = [minute for minute in range(61) if offer(limited, alarm("same"), NOON + 60 * minute)]
    assert sent == [0, 30, 60]
    assert offer(limited, alarm("other"), NOON + 60)


def test_an_hour_has_its_limit_and_the_rest_comes_as_one_summary() -> None:
    limited = limits(per_hour=10, repeat_minutes=0)
    sent = [offer(limited, alarm(f"kind {k % 200}"), NOON + k / 10) for k in range(10_000)]
    assert 0 < sum(sent) <= 10
    assert not limited.summary_due(NOON + 1000)
    later = NOON + HOUR + 1001
    assert limited.summary_due(later)
    summary = limited.take_summary(later)
    assert f"{10_000 - sum(sent)} alarms held back since 12:00" in summary.title
    assert not limited.summary_due(later)


def test_room_is_kept_for_a_crash() -> None:
    limited = limits(per_hour=8)
    ordinary = sum(offer(limited, alarm(f"kind {k}"), NOON + k) for k in range(100))
    assert ordinary == 6
    assert offer(limited, alarm("crash", AlarmLevel.CRASH), NOON + 200)


def test_quiet_hours_hold_everything_back_and_end_with_a_summary() -> None:
    limited = limits(quiet="22:00-07:00")
    night = NOON + 12 * HOUR
    assert limited.is_quiet(night)
    assert not limited.is_quiet(NOON)
    assert not offer(limited, alarm("found"), night)
    assert not offer(limited, alarm("gone", AlarmLevel.CRASH), night + 60)
    assert not limited.summary_due(night + 2 * HOUR)
    morning = NOON + 19 * HOUR + 60
    assert limited.summary_due(morning)
    summary = limited.take_summary(morning)
    assert summary.level is AlarmLevel.CRASH
    assert "title of found" in summary.text


def test_what_is_held_back_is_sent_when_the_run_ends_even_in_quiet_hours() -> None:
    limited = limits(quiet="00:00-23:59")
    assert not offer(limited, alarm("gone", AlarmLevel.CRASH), NOON)
    assert limited.summary_due(NOON + 1, last=True)
    assert limited.take_summary(NOON + 1).title == "title of gone"


def test_a_receiver_that_does_not_answer_is_left_alone_for_longer_and_longer() -> None:
    limited = limits()
    now = NOON
    for seconds in (*OUTAGE_SECONDS, OUTAGE_SECONDS[-1]):
        assert limited.admits(alarm("found"), now)
        limited.not_sent(alarm("found"), now)
        assert not limited.admits(alarm("other"), now + seconds - 1)
        now += seconds
    assert limited.summary_due(now)
