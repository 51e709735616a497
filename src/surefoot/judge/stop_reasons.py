"""Why a run was stopped, in words: the number, and the way out."""

from __future__ import annotations

from surefoot.records import StepMetrics, Verdict


def refused_reason(row: StepMetrics, refused: int, last: str, *, waiting: bool) -> str:
    """Too many updates in a row were refused; `waiting` while harmful data was being waited out."""
    if waiting:
        way_out = "Training on such batches made the eval loss worse: check the data since then."
    elif row.nonfinite_params > 0:
        way_out = "The weights themselves are damaged: resume from an earlier checkpoint."
    elif row.verdict is Verdict.NORM_OUTLIER:
        way_out = (
            "Check the batches since then, lower the learning rate or clip. If such norms are expected, allow them "
            "with policy=surefoot.Policy(max_norm_ratio=...)."
        )
    else:
        way_out = "Check the batches since then; lower the learning rate, clip, or use bfloat16 or float32."
    return (
        f"{refused} updates in a row were refused, the last at step {row.step} (attempt {row.attempt}): {last}. "
        f"None of them changed weights or optimizer. {way_out}"
    )


def overflow_reason(row: StepMetrics, overflows: int) -> str:
    """Too many overflows of the loss scale in a row."""
    return (
        f"the loss scale overflowed {overflows} times in a row (it is now {row.loss_scale:.3g}), so no update was "
        "applied: the gradients themselves are not finite. Use bfloat16 or float32, or check the batches since then."
    )
