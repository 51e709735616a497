"""The predicted size of an optimizer's first updates, which the judge must not take for damage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from surefoot.guard.run_info import first_update
from surefoot.judge.thresholds import SMALL_FRACTION


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0.1}),
        ("NAdam", {}),
        ("Adamax", {}),
        ("Adagrad", {}),
        ("RMSprop", {}),
        ("RMSprop", {"alpha": 0.9}),
        ("RMSprop", {"momentum": 0.9}),
        ("RMSprop", {"alpha": 0.9, "momentum": 0.5}),
    ],
)
def test_predicted_size_of_the_first_update(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(64, 64))
    optimizer = getattr(torch.optim, name)([weights], lr=1e-3, **options)
    weights.grad = 0.01 * torch.randn(64, 64)
    rates = []
    for _ in range(60 if options.get("momentum") else 1):
        before = weights.detach().clone()
        optimizer.step()
        rates.append(float((weights.detach() - before).norm()) / 64 / 1e-3)
    assert max(rates) / (1 + SMALL_FRACTION) < first_update(optimizer) < max(rates) * (1 + SMALL_FRACTION)
