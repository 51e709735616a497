from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import surefoot
from surefoot.logs.formats.detect import read_file
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable
from surefoot.records import Action, Decision, Note
from surefoot.sinks.progress import ProgressMetrics
from surefoot.sinks.sink import TENSORBOARD_DIR, SinkError, Sinks, check_installed, open_sinks, scalar_names
from surefoot.train.recipe.schema import LogSection

TENSORBOARD = LogSection(tensorboard=True)
OFFLINE = LogSection(wandb="offline")


@pytest.fixture(scope="module", autouse=True)
def _wandb_ends() -> Iterator[None]:
    """Stop wandb's service process, which would otherwise outlive the tests of this file."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def open_run_sinks(spec: LogSection, run: Path, *, first: bool = True, resumed_at: int | None = None) -> Sinks:
    return open_sinks(spec, run, is_first=first, name="short", config={"model": {"width": 8}}, resumed_at=resumed_at)


def write(sinks: Sinks, steps: range, attempts: int = 0) -> None:
    for step in steps:
        loss = 5.0 / (1 + step / 20)
        sinks.metrics(
            ProgressMetrics(step=step, attempt=step + attempts, loss=loss, lr=1e-3, grad_norm=1.0, tokens_per_s=99.0)
        )


def tensorboard_steps(run: Path, tag: str = "train/loss") -> list[int]:
    """The steps that TensorBoard shows for a tag."""
    accumulator = EventAccumulator(str(run / TENSORBOARD_DIR), purge_orphaned_data=True)
    accumulator.Reload()
    return [point.step for point in accumulator.Scalars(tag)]


def rewind_note(step: int, attempt: int) -> Note:
    return Note(step=step, attempt=attempt, name="rewound", values={"step": step, "attempt": step})


def test_tensorboard_metrics_can_be_diagnosed(tmp_path: Path) -> None:
    sinks = open_run_sinks(TENSORBOARD, tmp_path)
    write(sinks, range(1, 200))
    sinks.scalars(199, {"eval/loss": 0.6})
    sinks.close()
    assert tensorboard_steps(tmp_path) == list(range(1, 200))
    diagnosis = surefoot.diagnose(tmp_path / TENSORBOARD_DIR)
    assert (diagnosis.verdict, diagnosis.last_step) == ("healthy", 199)
    assert diagnosis.source["columns"]["loss"] == "train/loss"
    assert diagnosis.source["columns"]["eval_loss"] == "eval/loss"
    assert diagnosis.source["columns"]["norm"] == "train/grad_norm"


def test_nan_loss_in_tensorboard_is_diagnosed(tmp_path: Path) -> None:
    sinks = open_run_sinks(TENSORBOARD, tmp_path)
    write(sinks, range(1, 100))
    for step in range(100, 110):
        sinks.metrics(ProgressMetrics(step=step, attempt=step, loss=float("nan")))
    sinks.close()
    diagnosis = surefoot.diagnose(tmp_path / TENSORBOARD_DIR)
    assert (diagnosis.verdict, diagnosis.onset_step) == ("failed", 100)


def test_tensorboard_steps_after_the_checkpoint_are_purged_on_resume(tmp_path: Path) -> None:
    write(open_run_sinks(TENSORBOARD, tmp_path), range(1, 51))
    sinks = open_run_sinks(TENSORBOARD, tmp_path, resumed_at=30)
    write(sinks, range(31, 41), attempts=20)
    sinks.close()
    assert tensorboard_steps(tmp_path) == list(range(1, 41))


def test_rewound_steps_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of files of the same second TensorBoard reads number 10 before number 9; a test run opens that many.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    sinks = open_run_sinks(TENSORBOARD, tmp_path)
    write(sinks, range(1, 31))
    sinks.on_event(
        Decision(step=30, attempt=30, action=Action.REWIND, reason="the loss grows", remedy="with half the rate")
    )
    sinks.on_event(rewind_note(step=20, attempt=30))
    write(sinks, range(21, 26), attempts=10)
    sinks.close()
    assert tensorboard_steps(tmp_path) == list(range(1, 26))


def test_actions_are_written_to_tensorboard_as_text(tmp_path: Path) -> None:
    sinks = open_run_sinks(TENSORBOARD, tmp_path)
    sinks.on_event(Decision(step=5, attempt=5, action=Action.REFUSE, reason="the loss is nan"))
    sinks.close()
    accumulator = EventAccumulator(str(tmp_path / TENSORBOARD_DIR))
    accumulator.Reload()
    (text,) = accumulator.Tensors("surefoot/text_summary")
    assert text.step == 5
    assert b"action: refused the update" in text.tensor_proto.string_val[0]


def read_wandb_run(file: Path) -> LogTable:
    """Wait for W&B's process to finish a run's file, and read it."""
    for _ in range(600):
        with contextlib.suppress(UnreadableInput):
            (table,) = read_file(str(file))
            if "exit_code" in table.settings:
                return table
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def test_wandb_run_is_resumed_and_its_steps_may_go_back(tmp_path: Path) -> None:
    sinks = open_run_sinks(OFFLINE, tmp_path)
    write(sinks, range(1, 31))
    sinks.on_event(rewind_note(step=20, attempt=30))
    write(sinks, range(21, 26), attempts=10)
    sinks.text(25, "did: something")
    sinks.scalars(27, {"eval/loss": 2.0})
    sinks.close(75)
    first = (tmp_path / "wandb-id").read_text().strip()
    table = read_wandb_run(next(tmp_path.glob(f"wandb/offline-run-*/run-{first}.wandb")))
    assert table.columns["step"].values.tolist() == [*range(1, 31), *range(21, 26)]
    assert set(table.columns["_step"].values.tolist()) >= set(range(1, 36))
    assert table.columns["eval/step"].values.tolist() == [27]
    assert table.settings["exit_code"] == 75
    sinks = open_run_sinks(OFFLINE, tmp_path, resumed_at=25)
    write(sinks, range(26, 28), attempts=10)
    sinks.close()
    # W&B adds a number to the folder of a second run within the same second.
    assert {file.stem for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")} == {f"run-{first}"}


class BrokenSink:
    """A sink whose methods all fail."""

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        raise OSError("the disk is full")

    text = rewound = close = scalars


class RecordingSink(list[Any]):
    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        self.append(step)

    def text(self, step: int, message: str) -> None: ...

    def rewound(self, step: int) -> None: ...

    def close(self, code: int = 0) -> None: ...


def test_a_failing_sink_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    recording = RecordingSink()
    sinks = Sinks({"the broken one": BrokenSink(), "the other": recording})
    with caplog.at_level(logging.WARNING, "surefoot"):
        write(sinks, range(3))
        sinks.close()
        sinks.close()
    assert recording == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "surefoot: the broken one failed and is not used any more; training goes on: OSError('the disk is full')"
    ]


@pytest.mark.parametrize(("package", "spec"), [("tensorboard", TENSORBOARD), ("wandb", LogSection(wandb="online"))])
def test_missing_package_is_reported_before_training_starts(
    package: str, spec: LogSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    with pytest.raises(SinkError, match=rf"pip install 'surefoot\[{package}\]', or set log\.{package}="):
        check_installed(spec)
    check_installed(LogSection())


def test_wandb_without_a_key_is_refused_and_without_a_network_runs_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    real, error = wandb.init, wandb.errors.UsageError("api_key not configured (no-tty)")

    def init(*, mode: str, **known: Any) -> Any:
        if mode == "online":
            raise error
        return real(mode="offline", **known)

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(SinkError, match="wandb login"):
        open_run_sinks(LogSection(wandb="online"), tmp_path)
    error = wandb.errors.CommError("no route to host")
    with caplog.at_level(logging.WARNING, "surefoot"):
        open_run_sinks(LogSection(wandb="online"), tmp_path).close()
    assert "wandb sync" in caplog.text
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    sinks = open_run_sinks(LogSection(tensorboard=True, wandb="offline"), tmp_path, first=False)
    write(sinks, range(3))
    sinks.close()
    assert list(tmp_path.iterdir()) == []


def test_unknown_metrics_are_left_out() -> None:
    assert list(scalar_names(ProgressMetrics(step=1, lr=0.1))) == ["train/loss", "train/learning_rate"]


def test_packages_are_imported_only_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    open_run_sinks(LogSection(), tmp_path).close()
