"""What is wrong with the data."""

from __future__ import annotations

from surefoot.records import Cause
from surefoot.zoo.run import Run
from surefoot.zoo.scenario import fault


@fault(Cause.BAD_BATCH, on={"plain": "!!!", "residual": "..!"}, strengths=(10.0, 100.0, 1e6))
def bad_batch(run: Run, at: int, strength: float) -> None:
    """One batch comes in multiplied, once."""
    run.on_batch(lambda step, batch: batch.with_(x=batch.x * strength) if step == at else batch)
