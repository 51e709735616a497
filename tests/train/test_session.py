from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import same, saved, small

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes

Told = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained to its end; where it lies."""
    folder = tmp_path_factory.mktemp("whole")
    assert show(small(folder, sample={"prompt": "ab", "tokens": 8}), ()) == exit_codes.DONE
    return folder


def test_a_run_tells_what_it_is_how_it_goes_and_what_came_of_it(tmp_path: Path, capsys: Told) -> None:
    assert show(small(tmp_path, sample={"prompt": "ab", "tokens": 8}), ()) == exit_codes.DONE
    told, errors = capsys.readouterr()
    for words in ("small\n", "7,216 parameters", "26 samples", "step 4/12  loss", "step 12/12", "eval      loss"):
        assert words in told
    assert "sample" in told
    assert "\nab" in told
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert not errors


def test_the_run_directory_holds_what_was_run(whole: Path) -> None:
    info = surefoot.read(whole / "run").info
    assert info["recipe"]["source"] == str(whole / "recipe.yaml")
    assert "threads: 1" in info["recipe"]["text"]
    assert info["recipe"]["resolved"]["optimizer"]["betas"] == [0.9, 0.95]
    assert info["data"]["samples"] == 26
    assert info["data"]["hash"]
    assert info["seeds"]["recipe"] == 0
    assert info["environment"]["python"]


def test_a_finished_run_says_so_goes_on_when_it_is_made_longer_and_refuses_another_recipe(
    whole: Path, capsys: Told
) -> None:
    recipe, before = str(whole / "recipe.yaml"), saved(whole / "run")
    assert show(recipe, ()) == exit_codes.DONE
    assert "This run is finished: all 12 updates are made." in capsys.readouterr().out
    assert same(saved(whole / "run"), before)

    assert show(recipe, ("optimizer.lr=0.1",)) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert "holds a run of another recipe: optimizer.lr was 0.003 and is now 0.1" in told
    assert "run_dir=..." in told

    assert show(recipe, ("steps=15",)) == exit_codes.DONE
    assert "15, resuming from 12" in capsys.readouterr().out
    assert surefoot.read(whole / "run").scalars["step"].tolist() == list(range(15))


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    noisy = {"factory": "own_parts:Noisy"}
    loss = {"factory": "own_parts:noisy_loss"}
    data = {"kind": "own", "dataset": "own_parts:points"}
    recipe = small(tmp_path, model=noisy, loss=loss, data=data)
    assert show(recipe, ("evaluation.every=3", f"run_dir={tmp_path / 'with'}")) == exit_codes.DONE
    assert show(recipe, ("evaluation.every=0", f"run_dir={tmp_path / 'without'}")) == exit_codes.DONE
    assert same(saved(tmp_path / "with"), saved(tmp_path / "without"))


def test_what_loss_scaling_steps_over_is_told_as_refused_with_and_without_a_guard(tmp_path: Path, capsys: Told) -> None:
    recipe = small(tmp_path, steps=6, precision={"compute": "float16", "init_scale": 1e30})
    assert show(recipe, (), as_json=True) == exit_codes.DONE
    assert json.loads(capsys.readouterr().out)[0]["refused"] == 6
    # An optimizer that is not even called then: torch would warn of it, and warnings are errors here.
    other = ("optimizer.name=nadam", f"run_dir={tmp_path / 'other'}")
    assert show(recipe, (*other, "protection.mode=off")) == exit_codes.DONE


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_a_run_that_is_not_protected_tells_how_it_goes_all_the_same(tmp_path: Path, capsys: Told, mode: str) -> None:
    recipe = small(tmp_path, protection={"mode": mode}, batch={"size": 4, "accumulate": 2})
    assert show(recipe, ()) == exit_codes.DONE
    told = capsys.readouterr().out
    assert f"note: protection.mode is {mode}: nothing" in told
    assert "step 8/12  loss" in told
    assert "step 12/12  loss" in told
    assert "tokens/s" in told
    assert "nan" not in told
    assert "the mean of the last updates" in told
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_loss_at_the_end_is_the_mean_over_updates_that_were_applied(tmp_path: Path, capsys: Told) -> None:
    data = {"kind": "own", "dataset": "own_parts:points_with_one_nan"}
    parts = {"model": {"factory": "own_parts:classifier"}, "loss": {"factory": "own_parts:mean_loss"}, "data": data}
    assert show(small(tmp_path, **parts), ()) == exit_codes.DONE
    told = capsys.readouterr().out
    scalars = surefoot.read(tmp_path / "run").scalars
    applied = scalars["loss"][scalars["verdict"] == 0]
    assert len(applied) < scalars.rows  # the damaged batch was met and refused
    assert f"loss  {applied.mean():.4f}, the mean of the last updates" in told.replace("  loss       ", "  loss  ")
    assert "loss nan" not in told


def test_a_run_whose_last_losses_are_all_nan_says_so(tmp_path: Path, capsys: Told) -> None:
    loss = {"factory": "own_parts:nan_loss"}
    parts = {"model": {"factory": "own_parts:classifier"}, "data": {"kind": "own", "dataset": "own_parts:points"}}
    recipe = small(tmp_path, **parts, loss=loss, protection={"mode": "off"})
    assert show(recipe, ()) == exit_codes.DONE
    assert "not finite in any of the last updates" in capsys.readouterr().out


def test_a_sweep_trains_all_and_compares_them(tmp_path: Path, capsys: Told) -> None:
    recipe = small(tmp_path, steps=4)
    assert show(recipe, ("optimizer.lr=[0.001, 0.01]",)) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "1 of 2" in lines
    assert "2 of 2" in lines
    assert ["0.01" in line for line in lines[-2:]] == [True, False]  # the better one first
    assert show(recipe, ("optimizer.lr=[0.001, 0.01]",)) == exit_codes.DONE  # after a restart, say
    again = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in again[-2:]] == [line.split()[:4] for line in lines[-2:]]


def test_for_a_program_there_is_one_list_on_standard_output(tmp_path: Path, capsys: Told) -> None:
    assert show(small(tmp_path, steps=4), ("seed=[0, 1]",), as_json=True) == exit_codes.DONE
    out, words = capsys.readouterr()
    told = json.loads(out)
    assert [(each["code"], each["step"], each["ended"]) for each in told] == [(0, 4, "done")] * 2
    assert told[0]["loss"] != told[1]["loss"]
    assert told[0]["held_out"] > 0
    assert "step 4/4" in words
