from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import newest_tensors, same, small_recipe

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert show(small_recipe(folder, sample={"prompt": "ab", "tokens": 8}), ()) == exit_codes.DONE
    return folder


def test_console_shows_the_run_its_progress_and_its_result(tmp_path: Path, capsys: Captured) -> None:
    assert show(small_recipe(tmp_path, sample={"prompt": "ab", "tokens": 8}), ()) == exit_codes.DONE
    output, errors = capsys.readouterr()
    for text in ("small\n", "7,216 parameters", "26 samples", "step 4/12  loss", "step 12/12", "eval      loss"):
        assert text in output
    assert "sample" in output
    assert "\nab" in output
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert not errors


def test_run_json_records_the_recipe_data_and_environment(finished_run: Path) -> None:
    info = surefoot.read(finished_run / "run").info
    assert info["recipe"]["source"] == str(finished_run / "recipe.yaml")
    assert "threads: 1" in info["recipe"]["text"]
    assert info["recipe"]["resolved"]["optimizer"]["betas"] == [0.9, 0.95]
    assert info["data"]["samples"] == 26
    assert info["data"]["hash"]
    assert info["seeds"]["recipe"] == 0
    assert info["environment"]["python"]


def test_finished_run_can_be_extended_but_not_changed(finished_run: Path, capsys: Captured) -> None:
    recipe, before = str(finished_run / "recipe.yaml"), newest_tensors(finished_run / "run")
    assert show(recipe, ()) == exit_codes.DONE
    assert "This run is finished: all 12 updates are made." in capsys.readouterr().out
    assert same(newest_tensors(finished_run / "run"), before)

    assert show(recipe, ("optimizer.lr=0.1",)) == exit_codes.USAGE
    output = capsys.readouterr().err
    assert "holds a run of another recipe: optimizer.lr was 0.003 and is now 0.1" in output
    assert "run_dir=..." in output

    assert show(recipe, ("steps=15",)) == exit_codes.DONE
    assert "15, resuming from 12" in capsys.readouterr().out
    assert surefoot.read(finished_run / "run").scalars["step"].tolist() == list(range(15))


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    noisy = {"factory": "custom_parts:Noisy"}
    loss = {"factory": "custom_parts:noisy_loss"}
    data = {"kind": "own", "dataset": "custom_parts:points"}
    recipe = small_recipe(tmp_path, model=noisy, loss=loss, data=data)
    assert show(recipe, ("evaluation.every=3", f"run_dir={tmp_path / 'with'}")) == exit_codes.DONE
    assert show(recipe, ("evaluation.every=0", f"run_dir={tmp_path / 'without'}")) == exit_codes.DONE
    assert same(newest_tensors(tmp_path / "with"), newest_tensors(tmp_path / "without"))


def test_overflow_skips_are_counted_as_refused(tmp_path: Path, capsys: Captured) -> None:
    recipe = small_recipe(tmp_path, steps=6, precision={"compute": "float16", "init_scale": 1e30})
    assert show(recipe, (), as_json=True) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out)[0]["refused"] == 6
    # The optimizer is never called here; torch would warn about it, and warnings are errors in tests.
    other = ("optimizer.name=nadam", f"run_dir={tmp_path / 'other'}")
    assert show(recipe, (*other, "protection.mode=off")) == exit_codes.DONE


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_unprotected_run_shows_its_progress(tmp_path: Path, capsys: Captured, mode: str) -> None:
    recipe = small_recipe(tmp_path, protection={"mode": mode}, batch={"size": 4, "accumulate": 2})
    assert show(recipe, ()) == exit_codes.DONE
    output = capsys.readouterr().out
    assert f"note: protection.mode is {mode}: nothing" in output
    assert "step 8/12  loss" in output
    assert "step 12/12  loss" in output
    assert "tokens/s" in output
    assert "nan" not in output
    assert "the mean of the last updates" in output
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_final_loss_is_the_mean_over_applied_updates(tmp_path: Path, capsys: Captured) -> None:
    data = {"kind": "own", "dataset": "custom_parts:points_with_one_nan"}
    parts = {
        "model": {"factory": "custom_parts:classifier"},
        "loss": {"factory": "custom_parts:mean_loss"},
        "data": data,
    }
    assert show(small_recipe(tmp_path, **parts), ()) == exit_codes.DONE
    output = capsys.readouterr().out
    scalars = surefoot.read(tmp_path / "run").scalars
    applied = scalars["loss"][scalars["verdict"] == 0]
    assert len(applied) < scalars.rows  # the damaged batch was refused
    assert f"loss  {applied.mean():.4f}, the mean of the last updates" in output.replace("  loss       ", "  loss  ")
    assert "loss nan" not in output


def test_run_whose_last_losses_are_all_nan_is_reported(tmp_path: Path, capsys: Captured) -> None:
    loss = {"factory": "custom_parts:nan_loss"}
    parts = {"model": {"factory": "custom_parts:classifier"}, "data": {"kind": "own", "dataset": "custom_parts:points"}}
    recipe = small_recipe(tmp_path, **parts, loss=loss, protection={"mode": "off"})
    assert show(recipe, ()) == exit_codes.DONE
    assert "not finite in any of the last updates" in capsys.readouterr().out


def test_sweep_trains_all_runs_and_compares_them(tmp_path: Path, capsys: Captured) -> None:
    recipe = small_recipe(tmp_path, steps=4)
    assert show(recipe, ("optimizer.lr=[0.001, 0.01]",)) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "1 of 2" in lines
    assert "2 of 2" in lines
    assert ["0.01" in line for line in lines[-2:]] == [True, False]  # best first
    assert show(recipe, ("optimizer.lr=[0.001, 0.01]",)) == exit_codes.DONE  # as after a restart
    lines_again = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines_again[-2:]] == [line.split()[:4] for line in lines[-2:]]


def test_json_output_is_one_list_on_stdout(tmp_path: Path, capsys: Captured) -> None:
    assert show(small_recipe(tmp_path, steps=4), ("seed=[0, 1]",), as_json=True) == exit_codes.DONE
    out, stderr = capsys.readouterr()
    runs = json.loads(out)
    assert [(run["code"], run["step"], run["ended"]) for run in runs] == [(0, 4, "done")] * 2
    assert runs[0]["loss"] != runs[1]["loss"]
    assert runs[0]["held_out"] > 0
    assert "step 4/4" in stderr
