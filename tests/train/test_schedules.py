from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.train.recipe.schema import ScheduleSection
from surefoot.train.schedules import learning_rates, make_schedule, plot_schedule, sparkline

TOTAL, WARMUP = 200, 20


def _spec(name: Any, **fields: Any) -> ScheduleSection:
    return ScheduleSection(name=name, **({"warmup": WARMUP} | fields))


def test_warmup_is_linear_from_zero_to_the_peak_lr() -> None:
    lrs = learning_rates(_spec("constant"), 0.3, TOTAL)
    assert lrs == pytest.approx([0.3 * min(1, t / WARMUP) for t in range(TOTAL)])


def test_warmup_may_start_above_zero() -> None:
    lrs = learning_rates(_spec("constant", start=1e-5), 1e-3, TOTAL)
    assert lrs[0] == pytest.approx(1e-5)
    assert lrs[WARMUP // 2] == pytest.approx((1e-5 + 1e-3) / 2)
    assert lrs[WARMUP] == pytest.approx(1e-3)


def test_without_warmup_the_first_update_has_the_peak_lr() -> None:
    assert learning_rates(_spec("cosine", warmup=0), 0.3, TOTAL)[0] == pytest.approx(0.3)


def test_warmup_below_one_is_a_fraction_of_the_run() -> None:
    assert learning_rates(_spec("constant", warmup=0.25), 1.0, 200)[49:51] == pytest.approx([0.98, 1.0])


FORMULAS: list[tuple[dict[str, Any], Any]] = [
    ({"name": "constant"}, lambda s: 1.0),
    ({"name": "linear", "min_lr_ratio": 0.0}, lambda s: 1 - s),
    ({"name": "linear", "min_lr_ratio": 0.2}, lambda s: 0.2 + 0.8 * (1 - s)),
    ({"name": "cosine", "min_lr_ratio": 0.0}, lambda s: 0.5 * (1 + math.cos(math.pi * s))),
    ({"name": "cosine", "min_lr_ratio": 0.1}, lambda s: 0.1 + 0.45 * (1 + math.cos(math.pi * s))),
    ({"name": "restarts", "cycles": 3, "min_lr_ratio": 0.0}, lambda s: 0.5 * (1 + math.cos(math.pi * (3 * s % 1)))),
    ({"name": "polynomial", "power": 0.5, "min_lr_ratio": 0.0}, lambda s: (1 - s) ** 0.5),
    ({"name": "polynomial", "power": 2.0, "min_lr_ratio": 0.0}, lambda s: (1 - s) ** 2),
]


@pytest.mark.parametrize(("fields", "formula"), FORMULAS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_schedules_follow_their_formula_after_warmup(fields: dict[str, Any], formula: Any) -> None:
    lrs = learning_rates(ScheduleSection(warmup=20, **fields), 0.05, 276)
    assert lrs[20:] == pytest.approx([0.05 * formula(t / 256) for t in range(256)], abs=1e-12)


def test_step_schedule_multiplies_the_lr_at_milestones() -> None:
    lrs = learning_rates(ScheduleSection(name="step", warmup=0, every=30, factor=0.1), 0.1, 90)
    assert lrs == pytest.approx([0.1] * 30 + [0.01] * 30 + [0.001] * 30)


def test_each_restart_begins_with_the_peak_lr() -> None:
    lrs = learning_rates(ScheduleSection(name="restarts", warmup=0, cycles=100), 1.0, 1000)
    assert lrs[::10] == pytest.approx([1.0] * 100)


def test_lr_stays_constant_after_the_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, _spec("cosine", min_lr_ratio=0.1), 50)
    for _ in range(60):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.1])


def _optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.2, 0.02)]
    return torch.optim.SGD(groups, lr=0.1)


def _follow(optimizer: torch.optim.Optimizer, schedule: Any, number: int) -> list[list[float]]:
    lrs_by_step = []
    for _ in range(number):
        lrs_by_step.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return lrs_by_step


def test_every_param_group_scales_its_own_lr() -> None:
    optimizer = _optimizer()
    lrs_by_step = _follow(optimizer, make_schedule(optimizer, _spec("cosine"), TOTAL), TOTAL)
    assert [row[0] for row in lrs_by_step] == pytest.approx(learning_rates(_spec("cosine"), 0.2, TOTAL))
    assert [row[1] for row in lrs_by_step] == pytest.approx(learning_rates(_spec("cosine"), 0.02, TOTAL))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "restarts", "polynomial", "step"])
def test_saved_schedule_resumes(name: str) -> None:
    uninterrupted = _optimizer()
    expected = _follow(uninterrupted, make_schedule(uninterrupted, _spec(name), TOTAL), TOTAL)
    first = _optimizer()
    schedule = make_schedule(first, _spec(name), TOTAL)
    _follow(first, schedule, 70)
    second = _optimizer()
    resumed_schedule = make_schedule(second, _spec(name), TOTAL)
    second.load_state_dict(first.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    assert _follow(second, resumed_schedule, TOTAL - 70) == expected[70:]


def test_resumed_run_with_more_steps_follows_the_longer_schedule() -> None:
    optimizer = _optimizer()
    old = make_schedule(optimizer, _spec("linear", warmup=0, min_lr_ratio=0.0), 100)
    _follow(optimizer, old, 50)
    longer = _optimizer()
    schedule = make_schedule(longer, _spec("linear", warmup=0, min_lr_ratio=0.0), 200)
    schedule.load_state_dict(old.state_dict())
    _follow(longer, schedule, 50)
    assert schedule.get_last_lr()[0] == pytest.approx(0.2 * (1 - 100 / 200))


def test_warmup_longer_than_the_run_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"schedule.warmup: 2000 updates .* run of 500 .* 0.05, or raise steps"):
        learning_rates(_spec("cosine", warmup=2000), 1e-3, 500)


def test_decreasing_warmup_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule.start: .* 0.01, above .* 0.001"):
        learning_rates(_spec("cosine", start=0.01), 1e-3, 500)


def test_run_of_one_update_has_the_peak_lr() -> None:
    assert learning_rates(ScheduleSection(), 1e-3, 1) == pytest.approx([1e-3])


def test_sparkline_shows_warmup_and_decay() -> None:
    line = sparkline(_spec("linear", min_lr_ratio=0.0), 1e-3, TOTAL, width=40)
    assert len(line) == 40
    assert line[0] == "▁"
    assert line[4] == "█"
    assert line[-1] == "▁"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_schedule_is_plotted_to_a_file(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"schedule.{suffix}"
    assert plot_schedule(_spec("cosine"), 5e-4, TOTAL, path)
    assert path.stat().st_size > 2000
