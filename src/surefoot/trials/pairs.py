"""Whether a model has learnt anything about its inputs: its loss must rise when they are paired with other targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.trials.branches import gain
from surefoot.trials.kept_steps import KeptStep, roll_tensor, tensors_in
from surefoot.trials.sandbox import Sandbox

DEPENDENCE_MARGINS = 3.0
"""By how many margins mixed pairs must be worse: it is asked again and again while batches are refused."""


def depends_on_pairs(sandbox: Sandbox, steps: Sequence[KeptStep]) -> bool | None:
    """Whether the loss of these steps rises when their inputs are paired with other targets, beyond doubt; None where
    that is unknown."""
    margins = _margins(sandbox, steps)
    return None if margins is None else margins > DEPENDENCE_MARGINS


def ignores_pairs(sandbox: Sandbox, steps: Sequence[KeptStep]) -> bool:
    """Whether it makes no difference to their loss: nothing was learnt about inputs yet."""
    margins = _margins(sandbox, steps)
    return margins is not None and margins <= 1.0


def _margins(sandbox: Sandbox, steps: Sequence[KeptStep]) -> float | None:
    """By how many margins of noise mixed pairs are worse; None where batches cannot be mixed."""
    mixed = [mixed_batches(step.batches) for step in steps]
    if sandbox.agreement.any(not all(mixed)):
        return None
    plain = sandbox.losses(steps)
    # Which tensor holds the targets is not known: mixing at least one of them must do harm.
    count = int(min(row[0] for row in sandbox.agreement.gather([min(map(len, mixed))])))
    rolled = [sandbox.losses(steps, [ways[i] for ways in mixed]) for i in range(count)]
    return max((gain(plain, losses) for losses in rolled), default=None)


def mixed_batches(batches: Sequence[Any]) -> list[list[Any]]:
    """The batches with inputs paired with targets of other samples: for each of their tensors, it alone rolled by one
    sample; where there is only one tensor, its positions reversed."""
    count = len(list(tensors_in(batches[0])))
    return [[roll_tensor(batch, i, only=count == 1) for batch in batches] for i in range(count)]
