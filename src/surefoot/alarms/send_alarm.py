"""One attempt to send one alarm: a JSON webhook, a command, or a service that apprise knows."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from surefoot import __version__
from surefoot.alarms.alarm_target import ALARMS_VARIABLE, AlarmLevel, AlarmTarget, Channel, apprise_service
from surefoot.journal.strict_json import dumps

_URGENT = (AlarmLevel.CRASH, AlarmLevel.STOP, AlarmLevel.STALLED)
"""Levels that services show as a failure, others as a warning."""
_RETRY_STATUS = (408, 425, 429)
"""Answers of a client error after which another attempt may succeed."""


class NotSent(Exception):
    """An attempt failed; the message holds no secret. `final` means that another attempt will fail too."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


def send(target: AlarmTarget, payload: Mapping[str, Any]) -> None:
    """Send, within the target's timeout all in all; raises NotSent."""
    channels: Mapping[Channel, Callable[[AlarmTarget, Mapping[str, Any]], None]] = {
        Channel.WEBHOOK: _post,
        Channel.COMMAND: _run,
        Channel.APPRISE: _notify,
    }
    _within(target.timeout, lambda: channels[target.channel](target, payload))


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Run `call` in a thread and leave it behind when time is up: a server that sends a byte now and then, or a name
    that is not resolved, would hold us for as long as it likes."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="surefoot-alarm-attempt", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise NotSent(f"no answer within {seconds:g} s")
    for error in errors:
        raise error if isinstance(error, NotSent) else NotSent(type(error).__name__)


# -- webhook


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET, and carry its headers elsewhere."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _post(target: AlarmTarget, payload: Mapping[str, Any]) -> None:
    body = dumps(payload).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"surefoot/{__version__}", **target.headers}
    request = urllib.request.Request(target.url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect()).open(request, timeout=target.timeout):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            raise NotSent(f"it was redirected (HTTP {error.code}); give the final address", final=True) from None
        final = 400 <= error.code < 500 and error.code not in _RETRY_STATUS
        raise NotSent(f"HTTP {error.code}", final=final) from None
    except urllib.error.URLError as error:
        raise NotSent(_reason(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise NotSent(_reason(error)) from None


def _reason(error: object) -> str:
    """The system's words only: those of a library may hold the address."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


# -- command


def _run(target: AlarmTarget, payload: Mapping[str, Any]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != ALARMS_VARIABLE}
    try:
        process = subprocess.Popen(
            target.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=sys.platform != "win32",
        )
    except OSError as error:
        raise NotSent(f"it cannot be started: {error.strerror}", final=True) from None
    try:
        process.communicate(dumps(payload).encode() + b"\n", timeout=0.9 * target.timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise NotSent(f"it did not end within {0.9 * target.timeout:g} s") from None
    if process.returncode:
        raise NotSent(f"exit code {process.returncode}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command, and what it has started."""
    if sys.platform == "win32":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# -- apprise


def _notify(target: AlarmTarget, payload: Mapping[str, Any]) -> None:
    service = apprise_service(target.url)
    if service is None:
        raise NotSent("apprise does not know this address", final=True)
    urgent = payload["level"] in _URGENT
    import apprise

    kind = apprise.NotifyType.FAILURE if urgent else apprise.NotifyType.WARNING
    body = payload["text"] or payload["title"]
    sender = apprise.Apprise()
    sender.add(service)
    if not sender.notify(title=payload["title"], body=body, notify_type=kind):
        raise NotSent("the service did not take it")
