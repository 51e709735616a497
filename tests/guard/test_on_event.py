"""What a loop can read from its guard while it runs: `latest` and `on_event`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import net, train

import surefoot
from surefoot.guard.attach import OffGuard
from surefoot.records import Decision, Event, StepMetrics

Attach = Callable[..., surefoot.Guard]


def test_latest_row_is_the_last_one_in_the_journal(attach: Attach, read: Callable[[], surefoot.Run]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    assert guard.latest is None
    seen: list[StepMetrics] = []
    for i in range(6):
        train(model, optimizer, guard.watch, i)
        if guard.latest and guard.latest not in seen:
            seen.append(guard.latest)
    guard.close()
    losses = read().scalars["loss"].tolist()
    assert [row.loss for row in seen] == losses[: len(seen)]
    assert [row.step for row in seen] == list(range(len(seen)))
    assert len(seen) >= 4
    assert guard.latest is not None
    assert guard.latest.loss == losses[-1]


def test_listener_gets_every_event_of_the_journal(attach: Attach, read: Callable[[], surefoot.Run]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    events: list[Event] = []
    guard.on_event(events.append)
    for i in range(6):
        train(model, optimizer, guard.watch, i, "nan" if i == 2 else None)
    assert any(isinstance(event, Decision) and event.action == "refuse" for event in events)
    guard.close()
    written = [(e["kind"], e["attempt"]) for e in read().events if e.get("name") != "attached"]
    assert sorted((e.kind, e.attempt) for e in events) == sorted(written)


def test_total_steps_is_written_only_when_it_changes(attach: Attach, read: Callable[[], surefoot.Run]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(6):
        guard.report(total_steps=10 if i < 4 else 20, tokens=5)
        train(model, optimizer, guard.watch, i)
    guard.close()
    reports = [event["values"] for event in read().events if event.get("name") == "report"]
    assert reports == [{"total_steps": 10}, {"total_steps": 20}]


def test_listener_that_raises_is_removed_and_training_continues(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    calls: list[Any] = []

    def failing_listener(event: Event) -> None:
        calls.append(event)
        raise KeyError("planted")

    guard.on_event(failing_listener)
    others: list[Event] = []
    guard.on_event(others.append)
    with caplog.at_level(logging.ERROR, "surefoot"):
        for i in range(8):
            train(model, optimizer, guard.watch, i, "nan" if i in (2, 4) else None)
    assert len(calls) == 1
    assert len(others) > 2
    assert guard.step >= 4
    assert "failed and was removed; training continues" in caplog.text


def test_off_guard_has_no_history_and_no_events() -> None:
    guard = OffGuard()
    guard.on_event(print)
    assert guard.latest is None
