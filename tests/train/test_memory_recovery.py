"""Runs that run out of memory: the same updates in smaller micro-batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_parts
import numpy as np
import pytest
import torch
from small_runs import newest_tensors, same, small_recipe

import surefoot
from benchmarks.planted_memory import PLANT, VARIABLE, Limit
from surefoot.cli.train import show
from surefoot.train import exit_codes, memory_recovery

Captured = pytest.CaptureFixture[str]
ADAMW = {"name": "benchmarks.planted_memory:AdamW", "lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}
LANGUAGE = {"loss": {"factory": "benchmarks.planted_memory:sum_loss"}, "optimizer": ADAMW}
"""Padded texts: batches differ in their number of targets."""
POINTS = {
    "model": {"factory": "custom_parts:classifier"},
    "data": {"kind": "own", "dataset": "custom_parts:points"},
    "loss": {"factory": "benchmarks.planted_memory:mean_loss"},
    "optimizer": ADAMW,
    "steps": 26,
}
"""Batches without a count; an epoch of 90 samples ends with an update of 2."""
NOISE = 1e-5
"""Relative tolerance of losses whose sums are in another order."""


@pytest.fixture(autouse=True)
def plant() -> Iterator[None]:
    yield
    PLANT.limits, PLANT.hits, PLANT.updates = [], [], 0


def train(folder: Path, *limits: Limit, code: int = exit_codes.DONE, **sections: Any) -> surefoot.Run:
    PLANT.limits, PLANT.hits, PLANT.updates = list(limits), [], 0
    assert show(small_recipe(folder, **sections), ()) == code
    return surefoot.read(folder / "run")


def reduced(run: surefoot.Run) -> list[str]:
    return [e["reason"] for e in run.events if e["kind"] == "decision" and e["action"] == "reduce_memory"]


def weights_and_moments(folder: Path) -> dict[str, torch.Tensor]:
    """All but the norms that the gate compares with: it has seen that of a failed step twice."""
    tensors = newest_tensors(folder / "run")
    assert len(tensors) > 8
    return {name: value for name, value in tensors.items() if "surefoot.gates" not in name}


def assert_same_course(run: surefoot.Run, undisturbed: surefoot.Run) -> None:
    """The same updates of the same samples, with losses within the noise of sums in another order."""
    assert run.scalars["step"].tolist() == undisturbed.scalars["step"].tolist()
    assert run.scalars["samples"].tolist() == undisturbed.scalars["samples"].tolist()
    np.testing.assert_allclose(run.scalars["loss"], undisturbed.scalars["loss"], rtol=NOISE)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("batch", [{"size": 8}, {"size": 4, "accumulate": 2}], ids=["one batch", "accumulated"])
def test_updates_stay_the_same_when_memory_runs_out(tmp_path: Path, where: str, batch: dict[str, int]) -> None:
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE, batch=batch)
    run = train(tmp_path / "disturbed", Limit(where, 3, first=5), **LANGUAGE, batch=batch)
    assert PLANT.hits
    assert_same_course(run, undisturbed)
    assert f"out of memory in {where} (planted" in reduced(run)[0]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_run_equals_one_with_that_micro_batch_bit_for_bit(tmp_path: Path, where: str) -> None:
    train(tmp_path / "small", **POINTS, batch={"size": 2, "accumulate": 4})
    run = train(tmp_path / "split", Limit(where, 2), **POINTS)
    assert same(weights_and_moments(tmp_path / "split"), weights_and_moments(tmp_path / "small"))
    assert len(reduced(run)) == 2  # 8 -> 4 -> 2


NOISY = {"model": {"factory": "custom_parts:Noisy"}, "batch": {"size": 8, "accumulate": 2}}
"""Dropout, batch norm and a buffer that counts."""


@pytest.mark.parametrize(("where", "first"), [("step", 4), ("half step", 0)])
@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_failed_step_of_an_optimizer_changes_nothing(tmp_path: Path, where: str, first: int, compute: str) -> None:
    parts = POINTS | NOISY | {"precision": {"compute": compute, "init_scale": 1024.0}}
    train(tmp_path / "undisturbed", **parts)
    PLANT.limits = []
    run = train(tmp_path / "disturbed", Limit(where, 0, first=first, times=1), **parts)
    assert len(PLANT.hits) == 1
    assert same(weights_and_moments(tmp_path / "disturbed"), weights_and_moments(tmp_path / "undisturbed"))
    assert "caches are freed" in reduced(run)[0]


def test_step_that_ends_half_way_goes_back_to_a_snapshot(tmp_path: Path) -> None:
    run = train(tmp_path, Limit("half step", 0, first=7, times=1), **POINTS)
    assert "the step had changed a part of the weights" in reduced(run)[0]
    assert run.scalars["step"][-1] == 25
    assert np.isfinite(run.scalars["loss"]).all()


def test_batch_norm_keeps_two_samples_and_the_user_is_told_once(tmp_path: Path) -> None:
    run = train(tmp_path, Limit("backward", 2), **POINTS | NOISY)
    assert [reason.count("Batch norm now sees 4 samples at a time, not 8") for reason in reduced(run)] == [1, 0]
    assert "micro-batch 4 -> 2 samples" in reduced(run)[1]


def test_failed_attempt_leaves_nothing_in_memory(tmp_path: Path) -> None:
    memory_parts.ACTIVATIONS.clear()
    parts = LANGUAGE | {"loss": {"factory": "memory_parts:watched"}, "evaluation": {"every": 0}}
    train(tmp_path, Limit("backward", 4, first=5), **parts, checkpoints={"every": 100})
    assert len(memory_parts.ACTIVATIONS) > 12
    assert not any(kept() is not None for kept in memory_parts.ACTIVATIONS)


def test_larger_micro_batches_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_recovery, "PATIENCE", 3)
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE, steps=30)
    run = train(tmp_path / "disturbed", Limit("forward", 2, first=5, end=12), **LANGUAGE, steps=30)
    assert_same_course(run, undisturbed)
    grown = [e["reason"] for e in run.events if e["kind"] == "decision" and e["action"] == "relax"]
    assert [reason.split()[0] for reason in grown] == ["3", "6", "6"]  # the first try came too early
    notes = [e["values"]["rows"] for e in run.events if e.get("name") == "memory"]
    assert notes == [4, 2, 4, 2, 4, 8]


def test_evaluation_is_made_of_smaller_batches(tmp_path: Path, capsys: Captured) -> None:
    def eval_losses(run: surefoot.Run) -> list[float]:
        return [e["values"]["eval_loss"] for e in run.events if "eval_loss" in e.get("values", {})]

    expected = eval_losses(train(tmp_path / "undisturbed", **LANGUAGE))
    run = train(tmp_path / "disturbed", Limit("evaluation", 2, first=5), **LANGUAGE)
    assert eval_losses(run) == pytest.approx(expected, rel=NOISE)
    assert len(expected) == 3
    assert "in an evaluation" in reduced(run)[0]
    run = train(tmp_path / "none", Limit("evaluation", 0, end=6), **LANGUAGE)
    assert eval_losses(run) == pytest.approx(expected[1:], rel=NOISE)
    assert "the evaluation is left out, since one sample alone is too much" in capsys.readouterr().out


def test_run_that_cannot_fit_is_saved_and_explained(tmp_path: Path, capsys: Captured) -> None:
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE)
    layers = {"factory": "surefoot.models:decoder", "vocab": 256, "width": 16, "layers": 2, "heads": 2, "context": 24}
    run = train(tmp_path, Limit("forward", 0, first=6), code=exit_codes.DO_NOT_RESTART, **LANGUAGE, model=layers)
    message = capsys.readouterr().err
    for text in (
        "Tried: micro-batches of 8 (accumulation 1), micro-batches of 4 (accumulation 2), ",
        "micro-batches of 1 (accumulation 8), micro-batches of 1 (accumulation 8), activation checkpointing.",
        "The run is saved at step 6",
        "Weights, gradients and moments take 0.00 GB",
        "protection.snapshot_memory=false",
        "data.context below 24",
        "A restart would end the same way",
    ):
        assert text in message
    assert "activation checkpointing is switched on for 2 blocks" in reduced(run)[-1]
    assert exit_codes.why_stopped(tmp_path / "run") is not None

    run = train(tmp_path, **LANGUAGE, model=layers)  # on a machine with more memory
    output = capsys.readouterr().out
    assert "resuming from 6" in output
    assert "continues with micro-batches of 1 (accumulation 8), activation checkpointing" in output
    assert run.scalars["step"].tolist() == list(range(12))
    assert run.scalars["samples"].tolist() == undisturbed.scalars["samples"].tolist()


def test_stopped_run_continues_with_the_same_samples(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE)
    train(tmp_path, Limit("backward", 0, first=6), code=exit_codes.DO_NOT_RESTART, **LANGUAGE)
    assert_same_course(train(tmp_path, **LANGUAGE), undisturbed)


def test_observed_run_ends_with_advice(tmp_path: Path, capsys: Captured) -> None:
    train(tmp_path, Limit("forward", 4, first=3), code=exit_codes.FAILED, **LANGUAGE, protection={"mode": "observe"})
    message = capsys.readouterr().err
    assert "Lower batch.size" in message
    assert "Traceback" not in message


def test_micro_batch_may_change_by_hand_where_the_update_stays_the_same(tmp_path: Path, capsys: Captured) -> None:
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE)
    train(tmp_path, Limit("backward", 0, first=6), code=exit_codes.DO_NOT_RESTART, **LANGUAGE)
    train(tmp_path, code=exit_codes.USAGE, **LANGUAGE, batch={"size": 2})
    assert "batch.size was 8 and is now 2" in capsys.readouterr().err
    assert_same_course(train(tmp_path, **LANGUAGE, batch={"size": 2, "accumulate": 4}), undisturbed)


def test_summary_and_json_tell_how_the_run_was_fitted(tmp_path: Path, capsys: Captured) -> None:
    PLANT.limits = [Limit("forward", 4, first=5)]
    assert show(small_recipe(tmp_path, **LANGUAGE), (), as_json=True) == exit_codes.DONE
    output = capsys.readouterr()
    line = "ran out 1 time; at the end micro-batches of 4 (accumulation 2), the same samples per update"
    assert json.loads(output.out)[0]["memory"] == line
    assert f"memory     {line}" in output.err
    assert output.err.count("out of memory in forward") == 1


def process(recipe: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train in a subprocess that finds the recipe's modules."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root), str(Path(__file__).parent)])
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "train", recipe],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_run_killed_in_its_recovery_resumes_with_the_smaller_micro_batch(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE)
    parts = LANGUAGE | {"loss": {"factory": "memory_parts:killed_in_recovery", "folder": str(tmp_path)}}
    recipe = small_recipe(tmp_path, **parts)
    killed = process(recipe, **{VARIABLE: "backward:4:6:1000"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = process(recipe, **{VARIABLE: "backward:4:6:1000"})
    assert resumed.returncode == exit_codes.DONE, resumed.stderr
    assert "continues with micro-batches of 4 (accumulation 2)" in resumed.stdout
    assert "out of memory in backward" not in resumed.stdout
    run = surefoot.read(tmp_path / "run")
    losses = dict(zip(run.scalars["step"].tolist(), run.scalars["loss"].tolist(), strict=True))  # the last of each step
    np.testing.assert_allclose([losses[step] for step in range(12)], undisturbed.scalars["loss"], rtol=NOISE)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_real_limit_of_a_process(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", **LANGUAGE)
    parts = LANGUAGE | {"loss": {"factory": "memory_parts:limited"}, "protection": {"snapshot_memory": False}}
    done = process(small_recipe(tmp_path, **parts, evaluation={"every": 0}, checkpoints={"every": 100}))
    assert done.returncode == exit_codes.DONE, done.stderr
    assert "can't allocate memory" in done.stdout
    assert "micro-batch 8 -> 4 samples" in done.stdout
    assert_same_course(surefoot.read(tmp_path / "run"), undisturbed)


def test_batches_that_cannot_be_split_are_told(tmp_path: Path, capsys: Captured) -> None:
    parts = POINTS | {"data": POINTS["data"] | {"collate": "memory_parts:collate_without_samples"}}
    parts["loss"] = {"factory": "memory_parts:table_loss"}
    train(tmp_path, Limit("forward", 4, first=3), code=exit_codes.DO_NOT_RESTART, **parts)
    message = capsys.readouterr().err
    assert "Batches cannot be split: a batch of 8 samples holds a tensor of shape 3." in message
    assert "The run is saved at step 3" in message


def test_nothing_changes_where_memory_suffices(tmp_path: Path) -> None:
    run = train(tmp_path, **LANGUAGE)
    assert not reduced(run)
    assert not any(e.get("name") == "memory" for e in run.events)
    assert torch.is_grad_enabled()
