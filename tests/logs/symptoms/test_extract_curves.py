"""Which columns are used, which one counts the steps, and which runs a log contains."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.symptoms.extract_curves import extract_curves
from surefoot.logs.table import LogTable, TableBuilder


def table(*records: dict[str, float]) -> LogTable:
    gather = TableBuilder()
    for record in records:
        gather.add(record)
    return gather.build("jsonl", "a.jsonl")


def test_loss_eval_loss_norm_and_lr_are_found() -> None:
    log = table(
        *({"global_step": i, "train/loss": 3.0 - 0.1 * i, "grad_norm": 1.0, "lr": 1e-3} for i in range(10)),
        {"global_step": 10, "val/loss": 2.5, "val/acc": 0.5},
    )
    (curves,) = extract_curves(log)
    assert curves.columns_used() == {
        "loss": "train/loss",
        "eval_loss": "val/loss",
        "norm": "grad_norm",
        "rate": "lr",
        "eval_accuracy": "val/acc",
    }
    assert curves.unit == "step"
    assert curves.eval_loss.steps.tolist() == [10]


def test_summary_is_not_taken_for_the_loss() -> None:
    log = table(*({"step": i, "loss": 1.0} for i in range(30)), {"step": 30, "train_loss": 0.4})
    assert extract_curves(log)[0].loss.name == "loss"


def test_loss_terms_are_summed_if_the_total_was_not_logged() -> None:
    log = table(*({"epoch": i, "train/box_loss": 1.0, "train/cls_loss": 2.0} for i in range(5)))
    (curves,) = extract_curves(log)
    assert curves.loss.values.tolist() == [3.0] * 5
    assert curves.unit == "epoch"


def test_gan_losses_are_not_summed() -> None:
    log = table(*({"step": i, "G_loss": 1.0, "D_loss": 2.0} for i in range(5)))
    assert extract_curves(log)[0].loss.values.tolist() in ([1.0] * 5, [2.0] * 5)


def test_resume_from_an_earlier_step_is_one_run() -> None:
    steps = [*range(100), *range(60, 120)]
    log = table(*({"step": s, "loss": 100.0 if i < 100 and s >= 60 else 1.0} for i, s in enumerate(steps)))
    (curves,) = extract_curves(log)
    assert np.all(np.diff(curves.loss.steps) >= 0)
    assert curves.loss.values.max() == 100.0 or curves.loss.values.max() == 1.0
    assert (curves.loss.values == 100.0).sum() <= 1, "of repeated steps the second pass counts"
    assert any("goes back" in note for note in curves.notes)


def test_restart_from_zero_is_another_run() -> None:
    log = table(*({"step": s, "loss": 1.0} for s in [*range(50), *range(30)]))
    assert [len(curves.loss) for curves in extract_curves(log)] == [50, 30]


def test_batches_within_epochs_are_one_run() -> None:
    log = table(*({"epoch": e, "batch": b, "loss": 1.0} for e in range(5) for b in range(20)))
    (curves,) = extract_curves(log)
    assert len(curves.loss) == 100
    assert curves.loss.steps[-1] == 100


def test_fraction_of_an_epoch_is_no_step() -> None:
    log = table(*({"epoch": 0.01 * i, "loss": 1.0} for i in range(50)))
    (curves,) = extract_curves(log)
    assert curves.unit == "point"
    assert curves.loss.steps[-1] == 50


def test_perplexity_is_used_if_there_is_no_loss() -> None:
    log = table(*({"step": i, "train_ppl": math.e**2} for i in range(5)))
    assert extract_curves(log)[0].loss.values.tolist() == pytest.approx([2.0] * 5)


def test_columns_can_be_chosen() -> None:
    log = table(*({"tick": i, "loss": 1.0, "energy": 5.0} for i in range(5)))
    (curves,) = extract_curves(log, {"loss": "energy", "step": "tick"})
    assert curves.loss.values.tolist() == [5.0] * 5
    assert curves.loss.steps.tolist() == [0, 1, 2, 3, 4]


def test_missing_column_is_refused_with_the_closest_name() -> None:
    log = table({"step": 0, "train_loss": 1.0})
    with pytest.raises(UnreadableInput, match=r"no column 'trian_loss'\. Did you mean 'train_loss'\?"):
        extract_curves(log, {"loss": "trian_loss"})
