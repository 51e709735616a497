"""What the loop reports about itself: tokens, the loss on held-out data, its own values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.step_pipeline import StepPipeline


def take_reported(values: Mapping[str, float], pipeline: StepPipeline, reader: MetricsReader) -> dict[str, float]:
    """Hand reported values to whoever needs them; returns those that belong in the journal."""
    if "tokens" in values:
        pipeline.tokens = values["tokens"] if math.isnan(pipeline.tokens) else pipeline.tokens + values["tokens"]
    unwritten = {"tokens"} | ({"total_steps"} if values.get("total_steps") == reader.total_steps else set())
    reader.total_steps = float(values.get("total_steps", reader.total_steps))
    pipeline.eval_loss = float(values.get("eval_loss", pipeline.eval_loss))
    return {name: value for name, value in values.items() if name not in unwritten}
