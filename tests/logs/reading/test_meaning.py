"""What a column holds is told from its name, whoever named it."""

from __future__ import annotations

import pytest

from surefoot.logs.reading.meaning import Role, meaning


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
def test_the_whole_training_loss(name: str) -> None:
    told = meaning(name)
    assert (told.role, told.held_out, told.part) == (Role.LOSS, False, "")


@pytest.mark.parametrize(
    "name", ["val_loss", "eval/loss", "Valid Loss", "validation_loss", "test_loss", "验证损失", "dev loss"]
)
def test_the_loss_on_held_out_data(name: str) -> None:
    told = meaning(name)
    assert (told.role, told.held_out, told.part) == (Role.LOSS, True, "")


@pytest.mark.parametrize(("name", "part"), [("train/box_loss", "box"), ("Gen Loss", "gen"), ("value_loss", "value")])
def test_one_term_of_a_loss(name: str, part: str) -> None:
    assert meaning(name).part == part


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("loss_scale", Role.SCALE),
        ("loss scale", Role.SCALE),
        ("policy_loss_weight", Role.OTHER),
        ("run 3 - train/loss__MAX", Role.OTHER),
        ("grad_norm", Role.NORM),
        ("gnorm", Role.NORM),
        ("norm", Role.NORM),
        ("train/total_norm", Role.NORM),
        ("weight_norm", Role.OTHER),
        ("training's l2", Role.ERROR),
        ("l2_penalty", Role.OTHER),
        ("valid_0's binary_logloss", Role.LOSS),
        ("learning_rate", Role.RATE),
        ("lr/pg0", Role.RATE),
        ("lr-AdamW", Role.RATE),
        ("number of skipped iterations", Role.SKIPPED),
        ("trainer/global_step", Role.STEP),
        ("iteration", Role.STEP),
        ("time/total_timesteps", Role.STEP),
        ("epoch", Role.EPOCH),
        ("epoch_time", Role.OTHER),
        ("progress_percent", Role.INNER),
        ("val_acc", Role.ACCURACY),
        ("rollout/ep_rew_mean", Role.REWARD),
        ("eval_samples_per_second", Role.SPEED),
        ("elapsed time per iteration (ms)", Role.SECONDS),
        ("GPU Mem (GB)", Role.MEMORY),
        ("train_perplexity", Role.PERPLEXITY),
        ("total_flos", Role.OTHER),
    ],
)
def test_everything_else(name: str, role: Role) -> None:
    assert meaning(name).role is role
