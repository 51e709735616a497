from __future__ import annotations

import json

import pytest

from surefoot.alarms.alarm_target import (
    ALARMS_VARIABLE,
    AlarmError,
    AlarmLevel,
    Channel,
    alarm_targets,
    redacted,
    targets_from_environment,
)

HOOK = "https://example.com/hooks/s3cret-token"


def test_one_string_is_enough() -> None:
    (target,) = alarm_targets(HOOK)
    assert (target.channel, target.url) == (Channel.WEBHOOK, HOOK)
    assert AlarmLevel.CRASH in target.levels
    assert AlarmLevel.FINDING not in target.levels


def test_options_survive_the_pipe_to_the_sending_process() -> None:
    given = [
        {
            "to": HOOK,
            "levels": ["stop", "crash"],
            "quiet": "22:00-7:05",
            "headers": {"X-Token": "abcdefgh"},
        },
        {"command": ["./page.sh", "--now"], "per_hour": 3, "timeout": 2},
    ]
    targets = alarm_targets(given)
    assert targets[0].levels == (AlarmLevel.CRASH, AlarmLevel.STOP)
    assert targets[0].quiet == (22 * 60, 7 * 60 + 5)
    again = alarm_targets(json.loads(json.dumps([target.as_plain() for target in targets])))
    assert [target.as_plain() for target in again] == [target.as_plain() for target in targets]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("example.com/hook", r"'example.com/hook' is no address"),
        (5, r"expected an address such as https://example.com/hook, or a list of them, not 5"),
        ([5], "5 is no receiver"),
        ({"to": HOOK, "command": ["a"]}, "either `to`, an address, or `command`"),
        ({"to": HOOK, "level": "crash"}, "no option 'level'. The options of a receiver are to, command, levels"),
        ({"to": HOOK, "levels": "crahs"}, "levels='crahs' is not understood. Levels are all, or any of crash, stop"),
        ({"to": HOOK, "quiet": "22-7"}, "quiet='22-7' is not understood. It is a span of local time, such as \"22:00"),
        ({"to": HOOK, "per_hour": 0}, "per_hour=0 is not understood. It is a whole number from 1 to 3600"),
        ({"to": HOOK, "timeout": True}, "timeout=True is not understood. It is a number from 0.1 to 60"),
        ({"to": HOOK, "headers": {"A": "x\ny"}}, "headers maps names to texts"),
        ({"command": "./page.sh --now"}, r"Write it as a list: \['./page.sh', '--now'\]"),
        ({"command": []}, "no shell reads it"),
        ("https://", "is no address"),
        ("https://host:port/x", "is no address: its host or port cannot be read"),
    ],
)
def test_bad_values_say_what_to_change(given: object, message: str) -> None:
    with pytest.raises(AlarmError, match=message):
        alarm_targets(given)


def test_no_message_and_no_repr_shows_a_secret() -> None:
    for given in ("htps://host/s3cret-token", {"to": f"{HOOK} x"}, {"to": "slack://s3cret-token"}):
        with pytest.raises(AlarmError) as error:
            alarm_targets(given)
        assert "s3cret" not in str(error.value)
    (target,) = alarm_targets({"to": HOOK, "headers": {"Authorization": "Bearer s3cret"}})
    assert "s3cret" not in repr(target)
    assert target.name == "https://example.com/***"


def test_secrets_are_replaced_wherever_they_stand() -> None:
    targets = alarm_targets([{"to": HOOK, "headers": {"Authorization": "Bearer s3cret"}}])
    info = {"argv": ["train", f"alarms={HOOK}"], "recipe": {"text": f"alarms: {HOOK}\nx: Bearer s3cret"}, "steps": 5}
    assert redacted(info, targets) == {
        "argv": ["train", "alarms=https://example.com/***"],
        "recipe": {"text": "alarms: https://example.com/***\nx: ***"},
        "steps": 5,
    }


def test_environment_names_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALARMS_VARIABLE, f" {HOOK} http://localhost:99/b\n")
    assert [target.url for target in targets_from_environment()] == [HOOK, "http://localhost:99/b"]
    monkeypatch.setenv(ALARMS_VARIABLE, json.dumps([{"to": HOOK, "levels": "crash"}]))
    assert targets_from_environment()[0].levels == (AlarmLevel.CRASH,)
    monkeypatch.setenv(ALARMS_VARIABLE, "[nothing")
    with pytest.raises(AlarmError, match="begins like JSON and is none"):
        targets_from_environment()
    monkeypatch.delenv(ALARMS_VARIABLE)
    assert targets_from_environment() == ()


def test_without_apprise_its_addresses_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.alarms.alarm_target.find_spec", lambda name: None)
    with pytest.raises(AlarmError, match=r"mailto://\*\*\* is sent through apprise, .*'surefoot\[alarms\]'"):
        alarm_targets("mailto://user:password@example.com")
    assert alarm_targets(HOOK)


def test_services_with_a_format_of_their_own_go_through_apprise() -> None:
    pytest.importorskip("apprise")
    slack = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    feishu = "https://open.feishu.cn/open-apis/bot/v2/hook/ab12cd34ef56"
    targets = alarm_targets([slack, feishu, "mailto://user:password@example.com"])
    assert {target.channel for target in targets} == {Channel.APPRISE}
    assert targets[1].url == "feishu://ab12cd34ef56"
    assert redacted(f"to: {feishu}", targets) == "to: https://open.feishu.cn/***"
    with pytest.raises(AlarmError, match=r"apprise does not know how to send to nope://\*\*\*"):
        alarm_targets("nope://s3cret")
