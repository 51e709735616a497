"""`attach(sinks=...)`: what sinks get, from a real training; TensorBoard's files are read back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import surefoot
from surefoot.journal.writer import Journal
from surefoot.records import Action as ActionKind
from surefoot.records import CheckpointEvent, Decision, Note, StepMetrics
from surefoot.sinks.run_sink import UserSink
from surefoot.sinks.sink import SinkError
from surefoot.sinks.sink_choice import SinkChoice, sink_choices
from surefoot.sinks.sink_feed import SinkFeed

Attach = Callable[..., surefoot.Guard]


class MySink:
    """A user's own sink."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.texts: list[tuple[int, str]] = []
        self.threads: set[int] = set()
        self.closed = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))
        self.threads.add(threading.get_ident())

    def text(self, step: int, message: str) -> None:
        self.texts.append((step, message))

    def close(self) -> None:
        self.closed += 1


def train(attach: Attach, sinks: Any, *, steps: int = 30, nan_at: int = -1) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, sinks=sinks, alarms=False)
    for step in range(steps):
        x = torch.randn(8, 4)
        if step == nan_at:
            x[0, 0] = float("nan")
        guard.watch((model(x) - x.sum(1, keepdim=True)).square().mean(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 9:
            guard.report(eval_loss=0.5)
    guard.close()
    return model[0].weight.detach().clone()


def test_a_users_own_sink_gets_numbers_events_and_the_end(attach: Attach, read: Callable[[], surefoot.Run]) -> None:
    sink = MySink()
    train(attach, sink, nan_at=20)
    run = read()
    points = [(step, values["train/loss"]) for step, values in sink.points if "train/loss" in values]
    applied = run.scalars["verdict"] == 0
    assert [step for step, _ in points if step] == (run.scalars["step"] + applied).tolist()
    assert [loss for _, loss in points][:20] == run.scalars["loss"].tolist()[:20]
    assert {"train/learning_rate", "train/grad_norm", "speed/samples_per_second"} <= sink.points[-1][1].keys()
    assert [values for _, values in sink.points if "eval/loss" in values] == [{"eval/loss": 0.5}]
    assert any("refused the update" in text for _, text in sink.texts)
    assert sink.closed == 1
    assert threading.get_ident() not in sink.threads


def test_every_and_layers_choose_what_is_written(attach: Attach) -> None:
    sink = MySink()
    train(attach, {"to": sink, "every": 10, "layers": True})
    points = [(step, values) for step, values in sink.points if "train/loss" in values]
    assert [step for step, _ in points] == [10, 20, 30]
    norms = {name for name in points[0][1] if name.startswith("grad_norm/")}
    assert norms == {"grad_norm/0.weight", "grad_norm/0.bias", "grad_norm/1.weight", "grad_norm/1.bias"}
    total = sum(points[0][1][name] ** 2 for name in norms) ** 0.5
    assert total == pytest.approx(points[0][1]["train/grad_norm"], rel=1e-4)


def test_tensorboard_files_hold_the_run(attach: Attach, tmp_path: Path) -> None:
    train(attach, {"to": "tensorboard", "layers": True}, nan_at=20)
    accumulator = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    accumulator.Reload()
    assert [point.step for point in accumulator.Scalars("grad_norm/0.weight")][-1] == 29
    assert "train/loss" in accumulator.Tags()["scalars"]
    texts = [tensor.tensor_proto.string_val[0] for tensor in accumulator.Tensors("surefoot/text_summary")]
    assert any(b"refused the update" in text for text in texts)


class BrokenSink(MySink):
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step == 5:
            raise OSError("the disk is full")
        super().scalars(step, values)


def test_a_broken_sink_is_off_and_journaled_and_the_others_and_the_training_go_on(
    attach: Attach, read: Callable[[], surefoot.Run], caplog: pytest.LogCaptureFixture
) -> None:
    broken, fine = BrokenSink(), MySink()
    with caplog.at_level(logging.WARNING, "surefoot"):
        weights = train(attach, [broken, fine])
    sentence = "BrokenSink failed and is not used any more; training goes on: OSError('the disk is full')"
    assert [r.getMessage() for r in caplog.records if "BrokenSink" in r.getMessage()] == [f"surefoot: {sentence}"]
    assert len(broken.points) == 4
    assert broken.closed == 1
    assert fine.points[-1][0] == 30
    assert [event["detail"] for event in read().events if event.get("name") == "sink"] == [sentence]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        x = torch.randn(8, 4)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weights, model[0].weight)


class StuckSink(MySink):
    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.free.wait(60)
        super().scalars(step, values)


def test_a_sink_that_hangs_fills_only_its_own_bounded_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = StuckSink()
    journal = Journal(tmp_path, info={}, on_failure=lambda reason: None)
    journal.companions.append(SinkFeed(SinkChoice(own=sink), UserSink(sink), lambda sentence: None))
    for step in range(6000):
        journal.row(StepMetrics(step=step, attempt=step, time=0.0, loss=1.0))
        if step % 3000 == 2999:
            assert journal.flush(30), "the journal waited for the sink"
    sink.free.set()
    with caplog.at_level(logging.WARNING, "surefoot"):
        journal.close()
    assert 4096 <= len(sink.points) < 6000
    assert "rows or events were left out" in caplog.text
    assert len(surefoot.read(tmp_path).scalars["step"]) == 6000


def test_tensorboard_shows_each_step_once_after_a_rewind_and_a_resume(tmp_path: Path) -> None:
    choice = SinkChoice(to="tensorboard")

    def open_journal() -> Journal:
        journal = Journal(tmp_path, info={}, on_failure=lambda reason: None)
        journal.companions.append(SinkFeed(choice, choice.open(tmp_path), lambda sentence: None))
        return journal

    def rows(steps: range, attempts: int) -> None:
        for step in steps:
            journal.row(StepMetrics(step=step, attempt=step + attempts, time=0.0, loss=1.0))

    def shown() -> list[int]:
        accumulator = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
        accumulator.Reload()
        return [point.step for point in accumulator.Scalars("train/loss")]

    def next_second() -> None:
        """TensorBoard orders files by the second in their names."""
        time.sleep(1.1)

    journal = open_journal()
    rows(range(30), 0)
    next_second()
    journal.event(Decision(step=30, attempt=30, action=ActionKind.REWIND, reason="the loss grows", remedy="slower"))
    journal.event(Note(step=20, attempt=30, name="rewound", values={"step": 20, "attempt": 20}))
    rows(range(20, 26), 10)
    journal.close()
    assert shown() == list(range(1, 27))
    next_second()
    journal = open_journal()
    next_second()
    journal.event(CheckpointEvent(step=15, attempt=36, name="resumed", values={"step": 15}))
    rows(range(15, 18), 21)
    journal.close()
    assert shown() == list(range(1, 19))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensorbord", "attach: sinks: there is no sink 'tensorbord'. Did you mean tensorboard?"),
        ({"to": "tensorboard", "evry": 3}, "there is no option 'evry' of a sink. The options are to, every, layers"),
        ({"to": "tensorboard", "every": 0}, "every=0 of a sink is not understood. It is a whole number of updates"),
        (MySink, "MySink is a class. Pass an object of it: MySink()."),
        (5, 'an object of type int without scalars, text, close is no sink. Give "tensorboard"'),
    ],
)
def test_bad_sinks_are_refused_with_the_way_out(attach: Attach, given: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(SinkError) as error:
        train(attach, given)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.sinks.sink_choice.find_spec", lambda name: None)
    with pytest.raises(SinkError, match=r"MLflow is not installed: pip install 'surefoot\[mlflow\]'"):
        sink_choices("mlflow")


def test_mlflow_holds_the_run(attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    train(attach, {"to": "mlflow", "every": 10, "project": "p"}, nan_at=20)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")][:2] == [10, 20]
