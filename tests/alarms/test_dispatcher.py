from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import AlarmServer, SilentServer, all_servers, wait_for

from surefoot.alarms import dispatcher as dispatcher_module
from surefoot.alarms.alarm import Alarm, AlarmedRun
from surefoot.alarms.alarm_target import AlarmLevel, alarm_targets
from surefoot.alarms.dispatcher import AlarmDispatcher
from surefoot.alarms.send_alarm import NotSent, send

RUN = AlarmedRun(name="a", run_dir="/runs/a", host="here")


def found(number: int = 0, level: AlarmLevel = AlarmLevel.SEVERE) -> Alarm:
    return Alarm(level=level, key=f"{level} {number}", title=f"found {number}", text="why", step=number)


def dispatch(given: list[Any], alarms: list[Alarm], *, seconds: float = 20.0) -> list[str]:
    reports: list[str] = []
    dispatcher = AlarmDispatcher(alarm_targets(given), RUN, reports.append)
    for alarm in alarms:
        dispatcher.submit(alarm)
    dispatcher.close(seconds)
    return reports


def test_each_receiver_gets_its_levels_and_none_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "BACKOFF_SECONDS", (0.05, 0.05))
    with all_servers() as (fine, broken, silent):
        targets = [
            {"to": silent.url, "timeout": 0.5},
            {"to": broken.url},
            {"to": fine.url, "levels": "crash", "headers": {"Authorization": "Bearer abcdefgh"}},
        ]
        reports = dispatch(targets, [found(1), found(2, AlarmLevel.CRASH)])
    assert fine.levels == ["crash"]
    assert fine.received[0] | {"time": ""} == {
        "source": "surefoot",
        "version": fine.received[0]["version"],
        "level": "crash",
        "run": "a",
        "run_dir": "/runs/a",
        "host": "here",
        "step": 2,
        "rank": 0,
        "time": "",
        "title": "a: found 2",
        "text": "why",
        "events": [],
    }
    assert fine.headers[0]["Authorization"] == "Bearer abcdefgh"
    assert len(broken.received) >= 3
    assert len(reports) == 2
    assert "alarms do not reach http://127.0.0.1/***: HTTP 500" in reports
    assert sum("no answer" in report for report in reports) == 1


def test_a_server_that_comes_back_gets_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "BACKOFF_SECONDS", (0.05, 0.05))
    with AlarmServer(503, 429, 200) as server:
        assert dispatch([server.url], [found()]) == []
    assert [alarm["title"] for alarm in server.received] == ["a: found 0"] * 3


@pytest.mark.parametrize("status", [302, 403, 404])
def test_a_refusal_or_redirect_is_not_repeated(status: int) -> None:
    with AlarmServer(status) as server:
        with pytest.raises(NotSent) as error:
            send(alarm_targets(server.url)[0], found().payload(RUN))
        assert error.value.final
        assert len(server.received) == 1


def test_ten_thousand_alarms_to_a_server_that_never_answers_stay_within_the_limit() -> None:
    with SilentServer() as server:
        target = {"to": server.url, "timeout": 0.1, "per_hour": 12, "repeat_minutes": 0}
        reports: list[str] = []
        dispatcher = AlarmDispatcher(alarm_targets(target), RUN, reports.append)
        for number in range(10_000):
            dispatcher.submit(found(number % 300))
        assert dispatcher.close(30)
        assert 1 <= len(server.connections) <= 12
    assert len(reports) == 1


def test_a_command_gets_the_alarm_on_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    assert dispatch([{"command": [sys.executable, "-c", code]}], [found(7)]) == []
    assert json.loads(out.read_text())["title"] == "a: found 7"


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script = tmp_path / "hang.sh"
    script.write_text("#!/bin/sh\nsleep 600 &\necho $! > child\nsleep 600\n")
    script.chmod(0o755)
    (target,) = alarm_targets({"command": ["/bin/sh", "-c", f"cd {tmp_path}; ./hang.sh"], "timeout": 1})
    with pytest.raises(NotSent, match=r"did not end within 0\.9 s"):
        send(target, found().payload(RUN))
    child = int((tmp_path / "child").read_text())
    assert wait_for(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


def test_a_missing_command_is_reported_at_once() -> None:
    (report,) = dispatch([{"command": ["./no-such-program"]}], [found()])
    assert report == ("alarms do not reach command ./no-such-program: it cannot be started: No such file or directory")


def test_apprise_sends_to_its_own_services() -> None:
    pytest.importorskip("apprise")
    with AlarmServer() as server:
        url = server.url.replace("http://", "json://")
        assert dispatch([url], [found(3)]) == []
    assert server.received[0]["title"] == "a: found 3"
    assert server.received[0]["message"] == "why"
