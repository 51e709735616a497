from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from child_processes import run
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.train.preflight.checklist import CheckOptions, check
from surefoot.train.preflight.report import CheckItem, CheckReport, CheckStatus
from surefoot.train.preflight.watchdog import user_line
from surefoot.train.recipe import Recipe


def _recipe(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "small",
        "run_dir": str(tmp_path / "runs" / "small"),
        "device": "cpu",
        "steps": 400,
        "model": {"factory": "checked_parts:Small"},
        "loss": "checked_parts:loss",
        "data": {
            "kind": "own",
            "dataset": {"factory": "checked_parts:Counting"},
            "held_out_dataset": {"factory": "checked_parts:Counting", "first": 1000, "many": 40},
        },
        "batch": {"size": 8},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 5},
        "protection": {"clip": 2.0},
        "speed": {"threads": 1},
    }
    return fields | changed


def _with_data(fault: str = "", **held_out_options: Any) -> dict[str, Any]:
    dataset = {"factory": "checked_parts:Counting"}
    return {
        "kind": "own",
        "dataset": dataset | {"fault": fault},
        "held_out_dataset": dataset | {"first": 1000} | held_out_options,
    }


def _checked(fields: dict[str, Any], steps: int = 40) -> tuple[CheckReport, dict[str, CheckItem]]:
    report = check(Recipe.model_validate(fields), CheckOptions(steps=steps))
    return report, {item.name: item for item in report.items}


def test_healthy_recipe_passes_every_item_and_leaves_no_files(tmp_path: Path) -> None:
    report, items = _checked(_recipe(tmp_path))
    problems = {item.name for item in report.items if item.status in (CheckStatus.FAILED, CheckStatus.WARNING)}
    assert problems <= {"speed", "host memory"}  # these depend on the load of the machine
    assert items["resume"].status is CheckStatus.OK
    assert "bit for bit" in items["resume"].message
    assert items["trial run"].values["updates"] == 40
    assert not list(tmp_path.iterdir())


def test_existing_run_is_unchanged(tmp_path: Path) -> None:
    user_file = tmp_path / "runs" / "small" / "mine.txt"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("precious")
    report, _ = _checked(_recipe(tmp_path), steps=4)
    assert not report.failed
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "small", "mine.txt"]


def test_lr_far_too_high_fails_and_is_named(tmp_path: Path) -> None:
    report, items = _checked(_recipe(tmp_path, optimizer={"name": "sgd", "lr": 300.0, "momentum": 0.0}))
    assert report.failed
    bad = [item for item in report.items if item.status is CheckStatus.FAILED]
    assert {item.name for item in bad} & {"loss decreases", "no interventions", "learning rate", "trial run"}
    assert any("optimizer.lr" in item.fix for item in bad)
    assert items["resume"].status is not CheckStatus.FAILED  # it is not the fault of what is saved
    assert items["data: ranges"].status is CheckStatus.OK


def test_vocabulary_too_small_is_found_in_the_samples(tmp_path: Path) -> None:
    _, items = _checked(_recipe(tmp_path, model={"factory": "checked_parts:Small", "vocab": 20}))
    assert items["trial run"].status is CheckStatus.FAILED
    assert items["data: ranges"].status is CheckStatus.FAILED
    assert "vocabulary is 20" in items["data: ranges"].message
    assert "inputs" in items["data: ranges"].message
    assert "checked_parts.py" in items["trial run"].message


def test_user_line_is_found_in_any_folder(tmp_path: Path) -> None:
    library_frames = [traceback.FrameSummary(inspect.getfile(kind), 1, "inner") for kind in (Recipe, Path, pytest.Item)]
    for folder in ("surefoot", "lib/python3.11/mine", "src"):
        user_frame = traceback.FrameSummary(str(tmp_path / folder / "loop.py"), 12, "step")
        assert (
            user_line([library_frames[0], user_frame, *library_frames]) == f"{tmp_path / folder / 'loop.py'}:12 in step"
        )
    assert user_line(library_frames).endswith("in inner")


def test_duplicates_are_counted(tmp_path: Path) -> None:
    report, items = _checked(_recipe(tmp_path, data=_with_data("copies")))
    assert report.failed
    assert items["data: duplicates"].status is CheckStatus.FAILED
    assert items["data: duplicates"].values["share"] > 0.7


def test_samples_without_a_target_are_counted(tmp_path: Path) -> None:
    _, items = _checked(_recipe(tmp_path, data=_with_data("empty")))
    item = items["data: targets and lengths"]
    assert item.status is CheckStatus.WARNING
    assert item.values["shortest"] == 0
    assert 0.15 < item.values["empty"] / 320 < 0.35


def test_slow_samples_get_a_number_of_workers(tmp_path: Path) -> None:
    data = _with_data("slow") | {"workers": 0}
    _, items = _checked(_recipe(tmp_path, data=data), steps=8)
    assert items["speed"].status is CheckStatus.WARNING
    assert "with 0 workers" in items["speed"].fix
    assert "data.workers=" in items["speed"].fix


def test_held_out_samples_in_the_training_data_fail(tmp_path: Path) -> None:
    _, items = _checked(_recipe(tmp_path, data=_with_data(first=0)), steps=50)
    assert items["data: held out"].status is CheckStatus.FAILED


def test_layer_with_vanishing_gradients_is_named(tmp_path: Path) -> None:
    report, items = _checked(_recipe(tmp_path, model={"factory": "checked_parts:Small", "cut": True}))
    gradients = items["gradients by layer"]
    assert report.failed
    assert gradients.status is CheckStatus.FAILED
    assert "second.weight" in gradients.message
    assert "first.weight" not in gradients.message


def test_model_with_state_outside_state_dict_fails_the_resume_check(tmp_path: Path) -> None:
    report, items = _checked(_recipe(tmp_path, model={"factory": "checked_parts:Forgetful"}))
    assert report.failed
    assert items["resume"].status is CheckStatus.FAILED
    assert "state_dict" in items["resume"].fix


def test_clip_threshold_far_too_low_is_a_warning(tmp_path: Path) -> None:
    _, items = _checked(_recipe(tmp_path, protection={"clip": 0.001}))
    clip = items["clip threshold"]
    assert clip.status is CheckStatus.WARNING
    assert clip.values["clipped_share"] == 1.0
    assert 2 * clip.values["normal_maximum"] <= clip.values["suggested"] <= 3 * clip.values["normal_maximum"]


def test_missing_checkpoints_are_a_warning(tmp_path: Path) -> None:
    report, items = _checked(_recipe(tmp_path, protection={"mode": "off"}), steps=12)
    assert not report.failed
    assert items["checkpoints"].status is CheckStatus.WARNING
    assert "resume" not in items


@pytest.mark.parametrize(
    ("fault", "name", "status", "message"),
    [
        ("", "data: targets and lengths", CheckStatus.OK, "2 labels"),
        ("contradictions", "data: duplicates", CheckStatus.WARNING, "different targets"),
        ("one label", "data: targets and lengths", CheckStatus.FAILED, "have the label 1"),
        ("not finite", "data: ranges", CheckStatus.FAILED, "not finite"),
    ],
)
def test_labels_are_checked(tmp_path: Path, fault: str, name: str, status: CheckStatus, message: str) -> None:
    data = {"kind": "own", "dataset": {"factory": "checked_parts:Points", "fault": fault}, "held_out": 0.1}
    fields = _recipe(tmp_path, model="checked_parts:two_sides", loss="checked_parts:side_loss", data=data)
    _, items = _checked(fields, steps=30)
    assert items[name].status is status
    assert message in items[name].message


def test_truncated_texts_are_a_warning(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"{number} is followed by {number + 1}, " * (1 + number % 4))
    model = {"factory": "surefoot.models:decoder", "vocab": 256, "width": 16, "layers": 1, "heads": 2, "context": 32}
    data = {"kind": "text", "path": str(texts), "context": 32, "packing": False, "held_out": 0.2}
    _, items = _checked(_recipe(tmp_path, model=model, data=data, loss="surefoot.models:next_token"), steps=12)
    assert items["data: unreadable or cut"].status is CheckStatus.WARNING
    assert "truncated" in items["data: unreadable or cut"].message
    assert items["speed"].values["tokens_per_s"] > 0


def test_float32_fallback_is_tried_for_lower_precision(tmp_path: Path) -> None:
    _, items = _checked(_recipe(tmp_path, precision={"compute": "bfloat16"}), steps=12)
    assert items["float32 fallback"].status is CheckStatus.OK
    assert "one update in float32 works" in items["float32 fallback"].message


def _write_recipe(tmp_path: Path, **changed: Any) -> str:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(_recipe(tmp_path, **changed)))
    return str(path)


def test_json_output_is_one_object(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", _write_recipe(tmp_path), "--steps", "12", "--json"])
    report_json = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report_json["passed"]
    assert {"trial run", "resume", "clip threshold", "monitoring"} <= {item["name"] for item in report_json["items"]}


def test_text_output_names_failures_and_fixes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", _write_recipe(tmp_path, data=_with_data("copies")), "--steps", "12"])
    assert done.exit_code == 1
    assert "failed   data: duplicates" in done.stdout
    assert "-> Remove duplicates" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lm-tiny", "model.vocab=100"], "the tokenizer has 256 tokens"),
        (["lm-tiny", "optimizer.rate=1"], "optimizer.rate"),
        (["no-such-recipe"], "no-such-recipe"),
    ],
)
def test_recipe_that_cannot_be_built_gets_one_message(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["check", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("workers", "place"), [(0, "checked_parts.py"), (1, "data.workers=0")])
def test_hanging_trial_is_ended_and_the_line_is_named(tmp_path: Path, workers: int, place: str) -> None:
    path = _write_recipe(tmp_path, data=_with_data("stuck") | {"workers": workers})
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "surefoot", "check", path, "--patience", "5", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stderr
    hangs = [item for item in json.loads(done.stdout)["items"] if item["name"] == "no hang"]
    assert place in hangs[0]["found"]
    assert not (tmp_path / "runs").exists()


def test_two_ranks_are_checked_together_and_one_reports(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "surefoot", "check", _write_recipe(tmp_path), "--steps", "12", "--json"]
    folder, environment = Path(__file__).parent, os.environ | {"OMP_NUM_THREADS": "1"}
    done = run(command, cwd=folder, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    items = {item["name"]: item for item in json.loads(done.stdout)["items"]}
    assert items["trial run"]["figures"]["updates"] == 12
    assert items["resume"]["status"] == "ok"
    assert not (tmp_path / "runs").exists()


def test_schedule_is_plotted_without_a_trial(tmp_path: Path) -> None:
    picture = tmp_path / "lr.png"
    done = CliRunner().invoke(app, ["check", _write_recipe(tmp_path), "--schedule", str(picture)])
    assert done.exit_code == 0
    assert "cosine, 400 updates, peak 0.01" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(app, ["check", _write_recipe(tmp_path), "--schedule", str(picture)]).exit_code == 0
    picture.write_text("mine")
    refused = CliRunner().invoke(app, ["check", _write_recipe(tmp_path), "--schedule", str(picture)])
    assert refused.exit_code == 2
    assert "surefoot did not write it" in refused.output
    assert picture.read_text() == "mine"
    nowhere = CliRunner().invoke(
        app, ["check", _write_recipe(tmp_path), "--schedule", str(tmp_path / "none" / "lr.png")]
    )
    assert nowhere.exit_code == 2
    assert "Traceback" not in nowhere.output
