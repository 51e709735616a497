"""The protector that attaches surefoot to a zoo run gives it what the run offers."""

from pathlib import Path

import numpy as np

import surefoot
from benchmarks.zoo.attached import SurefootProtector
from benchmarks.zoo.training import EVAL_EVERY, RunSettings, ZooRun, train


def test_eval_losses_reach_the_journal(tmp_path: Path) -> None:
    run = ZooRun(RunSettings(family="plain", seed=3, steps=2 * EVAL_EVERY + 5))
    train(run, SurefootProtector(tmp_path / "run", observe=True))

    eval_loss = surefoot.read(tmp_path / "run").scalars["eval_loss"]
    assert np.isfinite(eval_loss).sum() == 2
