"""What integrations of other trainers need of a guard: state that travels, rewinds announced, stops without an
exception, losses per token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batch, loss_of, net, train

import surefoot
from surefoot.guard.validate import Misuse

Attach = Callable[..., surefoot.Guard]


def damage(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50.0)


def test_state_travels_in_another_checkpoint(attach: Attach, tmp_path: Path) -> None:
    """Saved as JSON and loaded, the guard has the same history, gates and step as before."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = attach(model, optimizer)
    for i in range(60):
        train(model, optimizer, guard.watch, i)
    state = json.loads(json.dumps(guard.state_dict()))
    history, step = guard.history, guard.step
    assert step == 60  # all steps were read
    guard.close()

    resumed = attach(model, optimizer, run_dir=tmp_path / "again", step=7)
    assert (resumed.step, resumed.history) == (7, ([], []))
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.history) == (step, history)
    assert json.dumps(resumed.state_dict()) == json.dumps(state)
    train(model, optimizer, resumed.watch, 60)
    resumed.close()
    assert surefoot.read(tmp_path / "again").scalars["attempt"].tolist() == [60]


def test_state_of_another_version_is_left_out_with_a_warning(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    guard = attach(model, torch.optim.AdamW(model.parameters()))
    guard.load_state_dict({"step": 3, "attempt": 2, "judge": "nonsense"})
    assert "gates start over" in caplog.text
    assert "judge starts over" in caplog.text
    assert guard.step == 3


def test_state_taken_during_the_run_does_not_change_it(attach: Attach, tmp_path: Path) -> None:
    models = net(), net()
    for model, often in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with attach(model, optimizer, run_dir=tmp_path / f"often-{often}") as guard:
            for i in range(40):
                train(model, optimizer, guard.watch, i)
                if often:
                    guard.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


def test_rewind_is_announced_and_a_failing_listener_is_removed(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = attach(model, optimizer)
    rewinds: list[tuple[int, int]] = []

    def fail(step: int, attempt: int) -> None:
        raise RuntimeError("listener")

    guard.on_rewind(fail)
    guard.on_rewind(lambda step, attempt: rewinds.append((step, attempt)))
    healthy = []
    for i in range(100):
        if i == 60:
            damage(model)
        train(model, optimizer, guard.watch, i)
        healthy.append(guard.healthy)
    assert rewinds
    assert all(0 <= step <= 60 and attempt < 60 for step, attempt in rewinds)
    assert "listener of on_rewind failed" in caplog.text
    assert all(healthy[:60])
    assert not all(healthy[60:])
    guard.close()
    assert not guard.healthy


def test_stop_calls_on_stop_and_refuses_every_further_update(attach: Attach) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stops: list[surefoot.TrainingStopped] = []
    guard = attach(model, optimizer, policy=surefoot.Policy(max_consecutive_vetoes=2), on_stop=stops.append)
    before = [p.clone() for p in model.parameters()]
    for i in range(8):
        train(model, optimizer, guard.watch, i, "nan")
    for i in range(8):
        train(model, optimizer, guard.watch, i)
    assert len(stops) == 1
    assert "2 updates in a row were refused" in str(stops[0])
    assert all(map(torch.equal, before, model.parameters()))
    guard.close()
    train(model, optimizer, lambda loss, x: loss, 0)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_loss_that_is_a_sum_over_tokens_is_recorded_per_token(
    attach: Attach, read: Callable[[], Any], microbatches: int, on_device: bool
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    guard = attach(model, optimizer)
    means = []
    for i in range(12):
        total, count = 0.0, 0
        for k in range(microbatches):
            x = batch(3 * i + k, 8 + 4 * ((i + k) % 3))
            loss = loss_of(model, x) * len(x)
            guard.watch(loss, x, tokens=torch.tensor(len(x)) if on_device else len(x)).backward()
            total, count = total + loss.item(), count + len(x)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        means.append(total / count)
    guard.close()
    assert read().scalars["loss"].tolist() == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": "many"}, "number of tokens"),
        ({"tokens": 0}, "number of tokens"),
        ({"tokens": 5, "progress": 1.0}, "Pass one of them"),
    ],
)
def test_wrong_tokens_are_named(attach: Attach, arguments: dict[str, Any], message: str) -> None:
    model = net()
    guard = attach(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(Misuse, match=message):
        guard.watch(loss_of(model, batch(0)), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "no step count"),
        ({"step": 5, "resume": True}, "contradict each other"),
        ({"on_stop": "stop"}, "cannot be called"),
    ],
)
def test_wrong_options_are_named(attach: Attach, options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(Misuse, match=message):
        attach(model, torch.optim.AdamW(model.parameters()), **options)
