"""The role of a column is recognised by its name, for many trainers."""

from __future__ import annotations

import pytest

from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "train/loss",
        "Train Loss",
        "lm loss",
        "lm-loss",
        "mean_loss",
        "train_loss_step",
        "total_loss",
        "trainLoss",
        "current_loss",
        "损失",
        "proud-sun-7 - train/loss",
        "Loss/train",
        "epoch_loss",
        "Average loss",
        "losses/total_loss",
    ],
)
def test_training_loss_names(name: str) -> None:
    parsed = parse_metric_name(name)
    assert (parsed.role, parsed.is_eval, parsed.term) == (MetricRole.LOSS, False, "")


@pytest.mark.parametrize(
    "name", ["val_loss", "eval/loss", "Valid Loss", "validation_loss", "test_loss", "验证损失", "dev loss"]
)
def test_eval_loss_names(name: str) -> None:
    parsed = parse_metric_name(name)
    assert (parsed.role, parsed.is_eval, parsed.term) == (MetricRole.LOSS, True, "")


@pytest.mark.parametrize(("name", "part"), [("train/box_loss", "box"), ("Gen Loss", "gen"), ("value_loss", "value")])
def test_loss_term_names(name: str, part: str) -> None:
    assert parse_metric_name(name).term == part


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("loss_scale", MetricRole.LOSS_SCALE),
        ("loss scale", MetricRole.LOSS_SCALE),
        ("policy_loss_weight", MetricRole.OTHER),
        ("run 3 - train/loss__MAX", MetricRole.OTHER),
        ("grad_norm", MetricRole.GRAD_NORM),
        ("gnorm", MetricRole.GRAD_NORM),
        ("norm", MetricRole.GRAD_NORM),
        ("train/total_norm", MetricRole.GRAD_NORM),
        ("weight_norm", MetricRole.OTHER),
        ("training's l2", MetricRole.ERROR),
        ("l2_penalty", MetricRole.OTHER),
        ("valid_0's binary_logloss", MetricRole.LOSS),
        ("learning_rate", MetricRole.LR),
        ("lr/pg0", MetricRole.LR),
        ("lr-AdamW", MetricRole.LR),
        ("number of skipped iterations", MetricRole.SKIPPED),
        ("trainer/global_step", MetricRole.STEP),
        ("iteration", MetricRole.STEP),
        ("time/total_timesteps", MetricRole.STEP),
        ("epoch", MetricRole.EPOCH),
        ("epoch_time", MetricRole.OTHER),
        ("progress_percent", MetricRole.EPOCH_STEP),
        ("val_acc", MetricRole.ACCURACY),
        ("rollout/ep_rew_mean", MetricRole.REWARD),
        ("eval_samples_per_second", MetricRole.SPEED),
        ("elapsed time per iteration (ms)", MetricRole.SECONDS),
        ("GPU Mem (GB)", MetricRole.MEMORY),
        ("train_perplexity", MetricRole.PERPLEXITY),
        ("total_flos", MetricRole.OTHER),
    ],
)
def test_other_metric_names(name: str, role: MetricRole) -> None:
    assert parse_metric_name(name).role is role
