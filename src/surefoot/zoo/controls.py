"""Healthy runs that look suspicious: nothing here is wrong, and nothing should be done about it."""

from __future__ import annotations

from surefoot.zoo.run import Run
from surefoot.zoo.scenario import control


@control("convolution", "residual")
def batch_size_change(run: Run, at: int) -> None:
    """The batch becomes a quarter as large, on purpose."""
    few = run.samples // 4
    run.on_batch(lambda step, batch: batch.head(few) if step >= at else batch)
