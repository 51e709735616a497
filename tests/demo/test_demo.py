from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app
from surefoot.demo import present, runs
from surefoot.demo.faults import PoisonedLoader, fault_steps
from surefoot.demo.runs import DemoResult
from surefoot.train.recipe import differences, load

STEPS, SEED = 300, 0
MOMENTS, RATE, POISON = fault_steps(STEPS).values()
SMALL = (
    "model.width=48",
    "model.layers=2",
    "model.context=48",
    "data.context=48",
    "batch.size=24",
    "optimizer.lr=6e-3",
    "evaluation.batches=5",
)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "SIZE", SMALL)
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(out: Path, _small: None) -> tuple[str, list[DemoResult]]:
    """The output of one short demo and the results of its three runs."""
    results: list[DemoResult] = []

    def record_result(*given: Any) -> DemoResult:
        results.append(runs.run_demo(*given))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as stdout:
        patch.setattr(present, "run_demo", record_result)
        present.show(steps=STEPS, out=out, seed=SEED)
    return stdout.getvalue(), results


@pytest.fixture(scope="module")
def printed(shown: tuple[str, list[DemoResult]]) -> str:
    return shown[0]


def events(text: str) -> list[tuple[int, str, str]]:
    """Step, label and first line of each event printed for the third run."""
    third_run = text[text.index("\n3  ") :]
    return [(int(m[1]), m[2], m[3]) for m in re.finditer(r"^   step +(\d+)   (\w+) +(.*)$", third_run, re.MULTILINE)]


def test_prints_finding_cause_action_and_outcome_of_each_fault(printed: str) -> None:
    printed_events = events(printed)
    moments_events = [(label, text) for step, label, text in printed_events if MOMENTS <= step < RATE]
    assert {"fault", "finding", "cause", "action", "outcome"} <= {label for label, _ in moments_events}
    assert any(
        label == "cause" and text.startswith("The optimizer's state is damaged") for label, text in moments_events
    )
    helped = re.compile(r"rewound to step \d+, |trained the \d+ updates since step \d+ again, ")
    assert any(label == "action" and helped.match(text) for label, text in moments_events)
    assert any(label == "outcome" and text.startswith("it helped: the loss is") for label, text in moments_events)
    assert any(
        label == "cause" and text.startswith("The learning rate is too high")
        for step, label, text in printed_events
        if RATE <= step < POISON
    )
    assert (POISON, "action", "refused the update: weights and optimizer state are unchanged") in printed_events
    assert any(
        step >= POISON and label == "cause" and text.startswith("A batch was far")
        for step, label, text in printed_events
    )
    assert any(
        step > POISON and label == "outcome" and "updates are applied again" in text
        for step, label, text in printed_events
    )


def test_events_are_printed_in_order_and_not_too_many(printed: str) -> None:
    steps = [step for step, _, _ in events(printed)]
    assert all(after > before - 60 for before, after in itertools.pairwise(steps))
    assert len(steps) < 40
    assert len(set(events(printed))) == len(steps)


def test_bare_loop_dies_and_guarded_loop_ends_near_the_undisturbed_one(printed: str) -> None:
    guarded = re.search(r"^   faults and surefoot +[\d.]+ +x ([\d.]+)", printed, re.MULTILINE)
    bare = re.search(r"^   faults +NaN +dead; before that [\d.]+, x ([\d.]+)", printed, re.MULTILINE)
    assert guarded
    assert bare
    assert float(guarded[1]) < 1.05 < float(bare[1])


def test_runs_are_identical_until_the_first_fault(shown: tuple[str, list[DemoResult]]) -> None:
    undisturbed, _, guarded = (run.losses for run in shown[1])
    assert guarded[:MOMENTS] == undisturbed[:MOMENTS]


def test_every_run_makes_all_updates_or_dies(shown: tuple[str, list[DemoResult]]) -> None:
    undisturbed, bare, guarded = shown[1]
    assert undisturbed.updates == guarded.updates == STEPS
    assert len(guarded.losses) >= STEPS  # rewound updates are repeated
    assert bare.dead
    assert len(bare.losses) < STEPS


def test_each_of_the_first_two_faults_harms_the_bare_loop(shown: tuple[str, list[DemoResult]]) -> None:
    """Each fault alone against the undisturbed run on the same batches; the harm differs from run to run."""
    undisturbed, bare, _ = (run.losses for run in shown[1])
    one_fault = runs.run_demo(
        (*runs.overrides_of(STEPS, SEED), *runs.UNPROTECTED), {"rate": RATE}, lambda *_: None
    ).losses
    for harmed, at in ((bare, MOMENTS), (one_fault, RATE)):
        assert harmed[: at + 1] == undisturbed[: at + 1], "until the fault it is the same run"
        after = slice(at + 1, at + 20)
        ratios = [a / b for a, b in zip(harmed[after], undisturbed[after], strict=True)]
        assert sum(ratio > 1 for ratio in ratios) >= 15, f"of {len(ratios)} batches: {ratios}"
        assert max(ratios) > 1.1, ratios


def test_writes_the_loss_plot(printed: str, out: Path) -> None:
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "loss.png") in printed


def test_second_demo_keeps_the_first_one_and_works_without_matplotlib(
    printed: str, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = surefoot.read(out / "run-1").scalars["loss"].tolist()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(runs, "SIZE", ("model.width=16", "model.layers=1", "data.context=16", "batch.size=4"))
    present.show(steps=50, out=out, seed=1)
    assert "pip install matplotlib" in capsys.readouterr().out
    assert surefoot.read(out / "run-1").scalars["loss"].tolist() == pytest.approx(before, nan_ok=True)
    assert surefoot.read(out / "run-2").scalars.rows >= 50


def test_stopped_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (*runs.overrides_of(50, 0), "protection.policy.limit=1", f"run_dir={tmp_path / 'run'}")
    with present.without_warnings():
        result = runs.run_demo(overrides, {"poison": 30}, present.print_line)
    assert len(result.losses) < 35
    assert "stopped  surefoot stopped the run" in capsys.readouterr().out


def test_run_without_evaluation_has_nan_eval_loss() -> None:
    assert math.isnan(DemoResult().eval_loss)


def test_printed_command_gives_the_recipe_that_was_run(printed: str, out: Path) -> None:
    command = re.search(r"^   surefoot train (lm-tiny \S.*)$", printed, re.MULTILINE)
    assert command
    source, *overrides = shlex.split(command[1])
    resolved = json.loads((out / "run-1" / "run.json").read_text(encoding="utf-8"))["recipe"]["resolved"]
    assert [key for key, _, _ in differences(resolved, load(source, overrides)[0])] == ["run_dir"]


def test_suggested_commands_work(printed: str, out: Path) -> None:
    suggestions = printed[printed.index("What to try next") :]
    assert f"surefoot diagnose {out / 'run-1'}" in suggestions
    result = CliRunner().invoke(app, ["diagnose", str(out / "run-1"), "--json"])
    assert json.loads(result.stdout)["source"]["points"] > 0
    assert CliRunner().invoke(app, ["recipes"]).exit_code == 0


def test_prints_a_sample_of_the_model(printed: str) -> None:
    assert re.search(r"^   \| def __init__\(self.*\n   \| ", printed, re.MULTILINE)


def test_only_one_batch_is_poisoned_over_several_epochs() -> None:
    clean = [{"targets": torch.zeros(4, 2, dtype=torch.int64)} for _ in range(3)]
    loader = PoisonedLoader(clean, 4)
    seen = [int((batch["targets"] < 0).sum()) for _ in range(3) for batch in loader]
    assert seen == [0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert not any((batch["targets"] < 0).any() for batch in clean)


def test_folder_that_cannot_be_created_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already", encoding="utf-8")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file" / "demo")])
    assert result.exit_code == 2
    assert "Choose another folder with --out" in result.stderr
    assert "Traceback" not in result.output
