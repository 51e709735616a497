"""`guard.batches`: what it yields, when it saves, and the warnings when a resume cannot be exact."""

from __future__ import annotations

import copy
import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.checkpoint.store import CheckpointStore
from surefoot.data import make_loader
from surefoot.guard import capture_point

BATCHES = 8
STEPS = 30


class Run:
    """A small net with dropout, saved every second step; each test brings its own loop."""

    def __init__(self, run: Path, *, loader: Any = None, resume: bool = True) -> None:
        torch.manual_seed(0)
        self.run = run
        self.loader = loader or make_loader(torch.randn(32, 6), 4, seed=3)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.guard = surefoot.attach(
            self.model,
            self.optimizer,
            run_dir=run,
            loader=self.loader,
            resume=resume,
            policy=surefoot.Policy(save_every=2),
        )
        self.start = self.guard.step
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        loss = self.guard.watch((self.model(x) - x).pow(2).mean(), x)
        self.losses.append(loss.item())
        return loss

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        manager: Any = getattr(self.guard._checkpointer, "_manager", None)  # type: ignore[attr-defined]
        if manager is not None:
            manager.poll(wait=True)

    def crash(self) -> None:
        self.guard.__exit__(RuntimeError, RuntimeError("planted crash"), None)

    def warnings(self) -> str:
        events = surefoot.read(self.run).events
        return "\n".join(e["detail"] for e in events if e.get("name") == "inexact")


Loop = Callable[[Run, int], None]


def by_epochs(run: Run, steps: int) -> None:
    """Derives its epoch from the step, and draws random numbers after each step and epoch."""
    step = run.start
    for _ in range(step // BATCHES, 10):
        for x in run.guard.batches(run.loader):
            run.step(run.forward(x + torch.rand(1)))
            step += 1
            torch.rand(2)
            if step == steps:
                return
        torch.rand(3)


def one_ahead(run: Run, steps: int) -> None:
    """Fetches the next batch before the update on the last one."""
    batches = endless(run)
    x = next(batches)
    for _ in range(run.start, steps):
        loss = run.forward(x)
        x = next(batches)
        run.step(loss)


def twice_a_batch(run: Run, steps: int) -> None:
    """Trains twice on each batch, and draws its own random numbers."""
    step = run.start
    for x in endless(run):
        for _ in range(2):
            run.step(run.forward(x + torch.rand(1)))
        step += 2
        torch.rand(2)
        if step >= steps:
            return


def endless(run: Run) -> Iterator[Tensor]:
    while True:
        yield from run.guard.batches(run.loader)


def resumed(tmp_path: Path, loop: Loop, kills: tuple[int, ...]) -> tuple[list[float], list[float], Run]:
    """Losses of an uninterrupted run from the resumed step on, losses of the resumed run, and that run."""
    straight = Run(tmp_path / "straight", resume=False)
    loop(straight, STEPS)
    straight.guard.close()
    for steps in kills:
        killed = Run(tmp_path / "killed")
        loop(killed, steps)
        killed.crash()
    again = Run(tmp_path / "killed")
    assert 0 < again.start < STEPS
    loop(again, STEPS)
    again.guard.close()
    return straight.losses[again.start :], again.losses, again


@pytest.mark.parametrize("kills", [(7, 9), (11, 16), (16, 17), (18, 24)])
def test_resume_is_exact_when_the_loop_counts_its_own_epochs(tmp_path: Path, kills: tuple[int, ...]) -> None:
    expected, losses, run = resumed(tmp_path, by_epochs, kills)
    assert losses == expected
    assert run.warnings() == ""


def test_loop_that_fetches_one_batch_ahead_is_exact_but_warned(tmp_path: Path) -> None:
    expected, losses, run = resumed(tmp_path, one_ahead, (11, 20))
    assert losses == expected
    assert "fetches its next batch before optimizer.step()" in run.warnings()


def test_save_waits_for_the_last_update_on_a_batch(tmp_path: Path) -> None:
    expected, losses, run = resumed(tmp_path, twice_a_batch, (9, 20))
    assert losses == expected
    assert run.start % 2 == 0
    assert run.warnings() == ""


def test_endless_updates_on_one_batch_are_saved_with_a_warning(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (x, *_) = run.guard.batches(run.loader)
    for _ in range(60):
        run.step(run.forward(x))
    assert CheckpointStore(tmp_path / "checkpoints").all()
    assert "between two updates on the same batch" in run.warnings()
    run.crash()


def test_batches_fetched_in_another_thread_are_warned_about(tmp_path: Path) -> None:
    run = Run(tmp_path)
    waiting: queue.Queue[Tensor] = queue.Queue(2)

    def fetch() -> None:
        for x in run.loader:
            waiting.put(x)

    thread = threading.Thread(target=fetch)
    thread.start()
    for _ in range(BATCHES):
        run.step(run.forward(waiting.get()))
    thread.join()
    run.crash()
    assert "in another thread" in run.warnings()


def test_save_during_an_evaluation_before_the_next_fetch_is_warned_about_after_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_point, "EVAL_WAIT", 0.0)  # as if the evaluation took long
    run = Run(tmp_path)
    with pytest.raises(SystemExit), run.guard:
        for x in run.guard.batches(run.loader):
            run.step(run.forward(x))
            run.model.eval()
            with torch.no_grad():
                for call in range(3):
                    if len(run.losses) == 5 and call == 1:
                        signal.raise_signal(signal.SIGTERM)
                    run.model(x + torch.rand(1))
            run.model.train()
    again = Run(tmp_path)
    assert again.start == 5
    assert "resumed, but the run was saved in the middle of an evaluation" in caplog.text
    again.crash()


def test_fetch_during_evaluation_does_not_count_as_training(tmp_path: Path) -> None:
    def evaluating(run: Run, steps: int) -> None:
        step = run.start
        for x in endless(run):
            run.step(run.forward(x + torch.rand(1)))
            step += 1
            run.model.eval()
            with torch.no_grad():
                for y in run.guard.batches([torch.rand(2, 6), torch.rand(2, 6)]):
                    run.model(y + torch.rand(1))
            run.model.train()
            if step == steps:
                return

    expected, losses, _ = resumed(tmp_path, evaluating, (11, 20))
    assert losses == expected


# -- iteration and length


def test_batches_have_a_length_and_can_be_iterated_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    batches = run.guard.batches([3, 4, 5])
    assert len(batches) == 3
    assert list(batches) == list(batches) == [3, 4, 5]
    assert len(run.guard.batches(run.loader)) == BATCHES
    assert [step for step, _ in zip(run.guard.batches(), "abc", strict=False)] == [0, 1, 2]
    with pytest.raises(TypeError, match="without a loader has no length"):
        len(run.guard.batches())
    run.guard.close()


def test_off_guard_yields_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT", "off")
    run = Run(tmp_path)
    assert list(run.guard.batches([1, 2])) == [1, 2]
    assert next(iter(run.guard.batches())) == 0


def test_loader_not_passed_to_attach_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), surefoot.attach(model, optimizer, run_dir=tmp_path, resume=True) as guard:
        guard.batches(range(guard.step, 10))
        assert caplog.text == ""
        guard.batches(make_loader(torch.randn(8, 2), 2, seed=0))
    assert "was given no loader, so the position in the data is not saved. Pass loader=" in caplog.text


def test_copied_loader_is_independent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    other = copy.deepcopy(run.loader)
    run.guard.close()
    assert len(list(run.loader)) == len(list(other)) == BATCHES
