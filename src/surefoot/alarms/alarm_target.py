"""Where alarms go, which of them, and how often: what a user gives as `alarms=`, checked."""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.parse
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

ALARMS_VARIABLE = "SUREFOOT_ALARMS"
"""Environment variable: one or more addresses, separated by spaces, or the same as `alarms=` in JSON."""


class AlarmError(ValueError):
    """Alarms cannot be sent as asked; the message says what to change, and shows no secret."""


class AlarmLevel(StrEnum):
    """What an alarm is about, the most serious first."""

    CRASH = "crash"
    """The process is gone, it ended with an exception, or surefoot's protection is off."""
    STOP = "stop"
    """surefoot stopped the run, or the run was saved and ended after a signal."""
    STALLED = "stalled"
    """No step for `no_step_minutes`."""
    ACTION = "action"
    """The run was changed, and whether that helped."""
    SEVERE = "severe"
    """The run is being damaged, or a checkpoint could not be written."""
    FINDING = "finding"
    """Anything else that was found, refused updates included."""
    END = "end"
    """The run ended as it should."""


DEFAULT_LEVELS = (AlarmLevel.CRASH, AlarmLevel.STOP, AlarmLevel.STALLED, AlarmLevel.ACTION, AlarmLevel.SEVERE)


class Channel(StrEnum):
    """How an alarm is sent."""

    WEBHOOK = "webhook"
    COMMAND = "command"
    APPRISE = "apprise"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmTarget:
    """One receiver of alarms."""

    channel: Channel
    url: str = field(default="", repr=False)
    """May hold a token: never to be shown, logged or passed on a command line."""
    given: str = field(default="", repr=False)
    """The address as the user wrote it."""
    command: tuple[str, ...] = field(default=(), repr=False)
    """A program with its arguments; it gets the alarm as JSON on standard input."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the request of a webhook, such as Authorization."""
    levels: tuple[AlarmLevel, ...] = DEFAULT_LEVELS
    per_hour: int = 20
    """Requests in any hour, repeated attempts included; what is above comes as one summary."""
    repeat_minutes: float = 60.0
    """The same alarm is sent again only after this time."""
    quiet: tuple[int, int] | None = None
    """Minutes of the day, local time, between which alarms are held back."""
    timeout: float = 10.0
    """Seconds for one attempt, all in all."""
    no_step_minutes: float = 10.0
    """Time without a step that counts as stalled; 0: never."""

    @property
    def name(self) -> str:
        """For messages, without secrets."""
        if self.channel is Channel.COMMAND:
            return f"command {self.command[0]}"
        return redacted_url(self.url)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must not be written anywhere."""
        paths = (urllib.parse.urlsplit(self.url)._replace(scheme="", netloc="").geturl(), *self.headers.values())
        return tuple(filter(None, (self.given, self.url, *(p for p in paths if len(p) >= _MIN_SECRET))))

    def as_plain(self) -> dict[str, Any]:
        """As `alarm_targets` reads it, secrets included: only for the pipe to the process that sends."""
        place = {"command": list(self.command)} if self.channel is Channel.COMMAND else {"to": self.url}
        quiet = None if self.quiet is None else "-".join(f"{m // 60:02d}:{m % 60:02d}" for m in self.quiet)
        return place | {
            "headers": dict(self.headers),
            "levels": [level.value for level in self.levels],
            "per_hour": self.per_hour,
            "repeat_minutes": self.repeat_minutes,
            "quiet": quiet,
            "timeout": self.timeout,
            "no_step_minutes": self.no_step_minutes,
        }


def alarm_targets(given: object) -> tuple[AlarmTarget, ...]:
    """The receivers that `alarms=` names: one or a list of addresses or mappings; raises AlarmError."""
    if given is None or given is False:
        return ()
    if isinstance(given, str | Mapping):
        return (_target(given),)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return tuple(_target(item) for item in given)
    raise AlarmError(f"expected an address such as https://example.com/hook, or a list of them, not {given!r}.")


def targets_from_environment() -> tuple[AlarmTarget, ...]:
    """The receivers in SUREFOOT_ALARMS."""
    text = os.environ.get(ALARMS_VARIABLE, "").strip()
    if not text:
        return ()
    try:
        return alarm_targets(json.loads(text) if text[0] in "[{" else text.split())
    except AlarmError as error:
        raise AlarmError(f"{ALARMS_VARIABLE} in the environment: {error}") from None
    except ValueError:
        raise AlarmError(
            f"{ALARMS_VARIABLE} in the environment begins like JSON and is none. Write addresses separated by spaces, "
            'or JSON such as [{"to": "https://example.com/hook", "levels": ["crash"]}].'
        ) from None


def redacted_url(url: str) -> str:
    """A URL without what may be a secret: for the web its host, else only its kind."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname if parts.scheme in ("http", "https") and _HOST.fullmatch(parts.hostname or "") else None
    return f"{parts.scheme or '?'}://{f'{host}/' if host else ''}***"


def redacted(value: Any, targets: Iterable[AlarmTarget]) -> Any:
    """The same plain value with every secret of these targets replaced, wherever in a text it stands."""
    secrets = {s: redacted_url(s) if "://" in s else "***" for target in targets for s in target.secrets}
    return _replace(value, sorted(secrets.items(), key=lambda pair: -len(pair[0]))) if secrets else value


def _replace(value: Any, secrets: list[tuple[str, str]]) -> Any:
    if isinstance(value, str):
        for secret, shown in secrets:
            value = value.replace(secret, shown)
        return value
    if isinstance(value, Mapping):
        return {key: _replace(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, secrets) for item in value]
    return value


# -- one receiver

_MIN_SECRET = 8
"""Shorter parts of an address are no secrets, and stand in other texts too."""
_HOST = re.compile(r"[A-Za-z0-9.:-]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_EXAMPLE = 'such as {"to": "https://example.com/hook", "levels": ["crash", "stop"]}'
_APPRISE_FORMS: Mapping[str, str] = {
    "open.feishu.cn": r"https://open\.feishu\.cn/open-apis/bot/v2/hook/(?P<token>[^/?]+)|feishu",
    "open.larksuite.com": r"https://open\.larksuite\.com/open-apis/bot/v2/hook/(?P<token>[^/?]+)|lark",
    "oapi.dingtalk.com": r"https://oapi\.dingtalk\.com/robot/send\?access_token=(?P<token>[^&]+)|dingtalk",
}
"""Hosts with a message format of their own whose addresses apprise wants in its own form: pattern | scheme."""
_APPRISE_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", "qyapi.weixin.qq.com", "ntfy.sh")
"""Hosts with a message format of their own whose addresses apprise takes as they are."""


def _target(given: object) -> AlarmTarget:
    options: dict[str, Any] = {"to": given} if isinstance(given, str) else {}
    if isinstance(given, Mapping):
        options = {str(name): value for name, value in given.items()}
    if not options:
        raise AlarmError(f"{given!r} is no receiver. Give an address such as https://example.com/hook, or {_EXAMPLE}.")
    unknown = sorted(options.keys() - {"to", "command", *_CHECKS})
    if unknown:
        names = ", ".join(("to", "command", *_CHECKS))
        raise AlarmError(f"there is no option {unknown[0]!r}. The options of a receiver are {names}.")
    command, url = options.pop("command", None), options.pop("to", None)
    if (command is None) == (url is None):
        raise AlarmError(f"a receiver has either `to`, an address, or `command`, a program; {_EXAMPLE}.")
    checked = {name: _CHECKS[name](value) for name, value in options.items() if value is not None}
    if command is not None:
        return AlarmTarget(channel=Channel.COMMAND, command=_command(command), **checked)
    given_url, (channel, url) = url, _address(url)
    if checked.get("headers") and channel is not Channel.WEBHOOK:
        raise AlarmError(f"headers are for plain webhooks only, not for {redacted_url(url)}.")
    return AlarmTarget(channel=channel, url=url, given=str(given_url), **checked)


def _address(given: object) -> tuple[Channel, str]:
    if not isinstance(given, str) or not _SCHEME.fullmatch(given.strip()):
        shown = redacted_url(given) if isinstance(given, str) and "://" in given else repr(given)
        raise AlarmError(
            f"{shown} is no address. Give one such as https://example.com/hook or mailto://..., or a program as "
            '{"command": ["./page-me.sh"]}.'
        )
    url = given.strip()
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise AlarmError(f"{url.partition(':')[0]}://*** is no address: its host or port cannot be read.") from None
    if parts.scheme not in ("http", "https"):
        return Channel.APPRISE, _checked_by_apprise(url)
    if not host:
        raise AlarmError(f"{parts.scheme}://*** has no host. Give an address such as https://example.com/hook.")
    if host in _APPRISE_FORMS:
        pattern, _, scheme = _APPRISE_FORMS[host].rpartition("|")
        found = re.match(pattern, url)
        return Channel.APPRISE, _checked_by_apprise(f"{scheme}://{found['token']}" if found else url)
    return (Channel.APPRISE, _checked_by_apprise(url)) if host in _APPRISE_HOSTS else (Channel.WEBHOOK, url)


def _checked_by_apprise(url: str) -> str:
    shown = redacted_url(url)
    if find_spec("apprise") is None:
        raise AlarmError(
            f"{shown} is sent through apprise, which is not installed: pip install 'surefoot[alarms]'. Plain webhooks "
            "(https://...) and commands need nothing."
        )
    if apprise_service(url) is None:
        raise AlarmError(
            f"apprise does not know how to send to {shown}. The form of each service's address is on "
            "https://appriseit.com."
        )
    return url


def apprise_service(url: str) -> Any | None:
    """What apprise sends with to this address; None if it knows none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports, also at the first address
        import apprise

        logging.getLogger("apprise").disabled = True  # it would log the whole address
        return apprise.Apprise.instantiate(url, suppress_exceptions=True)


def _command(given: object) -> tuple[str, ...]:
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not words or not all(isinstance(w, str) and w for w in words):
        raise AlarmError(
            'command is a program with its arguments as a list, such as ["./page-me.sh", "--now"]; no shell reads it, '
            f"not {given!r}."
        )
    if len(words) == 1 and " " in words[0] and not os.path.exists(words[0]):
        raise AlarmError(f"command={given!r} is one word with spaces. Write it as a list: {words[0].split()!r}.")
    return tuple(words)


def _levels(given: object) -> tuple[AlarmLevel, ...]:
    names = given.replace(",", " ").split() if isinstance(given, str) else given
    if names == ["all"]:
        return tuple(AlarmLevel)
    if isinstance(names, list | tuple) and names and all(name in list(AlarmLevel) for name in names):
        return tuple(level for level in AlarmLevel if level in names)
    raise AlarmError(f"levels={given!r} is not understood. Levels are all, or any of {', '.join(AlarmLevel)}.")


def _headers(given: object) -> dict[str, str]:
    if isinstance(given, Mapping) and all(
        isinstance(text, str) and text.isprintable() and text.strip() for pair in given.items() for text in pair
    ):
        return dict(given)
    raise AlarmError('headers maps names to texts, such as {"Authorization": "Bearer ..."}.')


def _quiet(given: object) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)\s*", given) if isinstance(given, str) else None
    if found is not None:
        hour, minute, end_hour, end_minute = map(int, found.groups())
        if max(hour, end_hour) < 24 and max(minute, end_minute) < 60 and (hour, minute) != (end_hour, end_minute):
            return hour * 60 + minute, end_hour * 60 + end_minute
    raise AlarmError(f'quiet={given!r} is not understood. It is a span of local time, such as "22:00-07:00".')


def _number(name: str, low: float, high: float) -> Callable[[object], float]:
    def check(given: object) -> float:
        if isinstance(given, int | float) and not isinstance(given, bool) and low <= given <= high:
            return float(given)
        raise AlarmError(f"{name}={given!r} is not understood. It is a number from {low:g} to {high:g}.")

    return check


def _per_hour(given: object) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= 3600:
        return given
    raise AlarmError(f"per_hour={given!r} is not understood. It is a whole number from 1 to 3600.")


_CHECKS: Mapping[str, Callable[[object], Any]] = {
    "levels": _levels,
    "per_hour": _per_hour,
    "repeat_minutes": _number("repeat_minutes", 0, 10080),
    "quiet": _quiet,
    "timeout": _number("timeout", 0.1, 60),
    "no_step_minutes": _number("no_step_minutes", 0, 10080),
    "headers": _headers,
}
"""Each option of a receiver, and what checks it."""
