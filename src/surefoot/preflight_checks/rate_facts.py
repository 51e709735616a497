"""Facts about the learning rate: what some updates at it, and at lower and higher ones, do to the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, sure
from surefoot.preflight_checks.loop_probe import PreflightContext
from surefoot.preflight_checks.short_training import ShortTraining, median

FEW_STEPS, MANY_STEPS = 4, 8
"""Updates that show what is clear, and what is not."""
HIGH_RATIO, EXTREME_RATIO = 0.1, 0.5
"""Relative weight change per update that seldom goes well, and never does; 0.001 is usual."""
LOW_RATIO = 1e-6
RISE, FEW_STEPS_RISE = 1.3, 10.0
"""Factor of the probe loss that counts as a rise, after many updates and after few."""
LOST = 0.5
"""Share of the weights that keep their value in an update, though they have a gradient."""
SMALL_CLIP = 0.01
"""Clip threshold over norm that leaves next to nothing."""


def learning_rate(c: PreflightContext) -> Iterator[PreflightFinding]:
    run, lr = c.training, c.trainer.lr
    if lr == 0:
        make = doubtful if c.has_warmup or c.settings.scheduler is not None else sure
        yield make(Cause.LEARNING_RATE, "the learning rate is 0", "of every parameter group", "Set the learning rate.")
        return
    ratio, before = run.update_ratio, run.probe_before
    if run.losses and not math.isfinite(run.losses[0]):
        return  # not a matter of the rate
    if not (run.diverged or _rises(run) or _spikes(run) or ratio > HIGH_RATIO or ratio < LOW_RATIO or not falls(run)):
        return
    test = c.range_test
    lower = {f: loss for f, loss in test.after.items() if f < 1}
    helped = [f for f, loss in lower.items() if is_below(loss, before)]
    values = {"lr": lr, "update_ratio": ratio, "before": before, "after": run.probe_after, "tried": _tried(test.after)}
    how = _range_text(c) + (f"; an update changes the weights by a fraction of {ratio:.2g}" if ratio == ratio else "")
    fix = f"Try lr {lr * max(helped):.2g}" if helped else f"Try a lower lr than {lr:.3g}"
    if (run.diverged or _rises(run)) and helped:
        make = doubtful if c.has_warmup else sure  # a warmup may carry the run over this
        yield make(Cause.LEARNING_RATE, f"lr {lr:.3g} is too high: the loss rises", how, fix + ".", **values)
    elif ratio > EXTREME_RATIO and (run.diverged or (not falls(run) and len(run.losses) >= MANY_STEPS)):
        yield sure(Cause.LEARNING_RATE, f"lr {lr:.3g} is too high for the weights", how, fix + ".", **values)
    elif lower and len(run.losses) >= MANY_STEPS and _is_high(run, min(lower.values())):
        yield doubtful(Cause.LEARNING_RATE, f"lr {lr:.3g} is high", how, fix + ", or use a warmup.", **values)
    elif len(run.losses) >= MANY_STEPS and _is_low(c):
        yield doubtful(Cause.LEARNING_RATE, f"lr {lr:.3g} is low", how, f"Try lr {10 * lr:.2g}.", **values)


def _is_high(run: ShortTraining, lower: float) -> bool:
    """`lower` is the best loss at a lower rate."""
    if run.update_ratio > HIGH_RATIO and (not falls(run) or is_below(lower, run.probe_after)):
        return True
    gained, possible = run.probe_before - run.probe_after, run.probe_before - lower
    if _spikes(run) and gained < possible / 4:
        return True
    return not falls(run) and possible > 0.03 * abs(run.probe_before)


def _spikes(run: ShortTraining) -> bool:
    """The loss rises far above its start in between."""
    return len(run.losses) >= FEW_STEPS and max(run.losses) - run.losses[0] > 0.5 * abs(run.losses[0])


def _is_low(c: PreflightContext) -> bool:
    """The rate itself is what keeps the weights."""
    ratio, faster = c.training.update_ratio, c.range_test.after.get(10.0, math.inf)
    if not ratio > 0 or clipped_away(c) or lost_share(c):
        return False
    return ratio < LOW_RATIO or (faster < c.training.probe_before and _hardly_moves(c))


def _rises(run: ShortTraining) -> bool:
    before, after = run.probe_before, run.probe_after
    steps = len(run.losses)
    factor = RISE if steps >= MANY_STEPS else FEW_STEPS_RISE
    return after - before > (factor - 1) * abs(before) and steps >= FEW_STEPS


def falls(run: ShortTraining) -> bool:
    return not run.diverged and is_below(run.probe_after, run.probe_before)


def is_below(loss: float, before: float) -> bool:
    return before - loss > 0.005 * abs(before)


def _hardly_moves(c: PreflightContext) -> bool:
    """The rate asked for gains less than a fiftieth of what ten times as much does, and next to nothing."""
    run, test = c.training, c.range_test
    gained, possible = run.probe_before - run.probe_after, run.probe_before - test.after.get(10.0, math.inf)
    return run.update_ratio < 1e-4 and abs(gained) < 0.002 * abs(run.probe_before) and gained < possible / 8


def _tried(after: Mapping[float, float]) -> list[list[float]]:
    return [[factor, loss] for factor, loss in sorted(after.items())]


def _range_text(c: PreflightContext) -> str:
    test, steps = c.range_test, len(c.training.losses)
    tried = ", ".join(f"{loss:.4g} with {test.lr * factor:.2g}" for factor, loss in sorted(test.after.items()))
    return f"{steps} updates take the loss of the same batches from {test.before:.4g} to {tried}"


def proposed_lr(c: PreflightContext) -> float | None:
    """The best of the rates tried, where they were tried and another was better."""
    if "range_test" not in c.__dict__:
        return None
    test = c.range_test
    best = test.best
    better = test.after[best] < test.after[1.0] - 0.02 * abs(test.before) or test.after[1.0] == math.inf
    return test.lr * best if best != 1.0 and better and math.isfinite(test.after[best]) else None


def lost_share(c: PreflightContext) -> dict[str, float]:
    """The share of updates that are rounded away, by matrix of low precision; empty where most are not."""
    low = [h for h in c.training.params if dtype_of(c, h.name) in (torch.bfloat16, torch.float16)]
    lost = {h.name: median(h.lost) for h in low if h.ndim >= 2}
    return lost if sum(share > LOST for share in lost.values()) >= max(1, len(lost) / 2) else {}


def clipped_away(c: PreflightContext) -> bool:
    clip, norm = c.settings.clip, median(c.training.norms)
    return clip is not None and norm > 0 and clip < SMALL_CLIP * norm


def dtype_of(c: PreflightContext, name: str) -> torch.dtype | None:
    param = dict(c.model.named_parameters()).get(name)
    return None if param is None else param.dtype


FACTS = (learning_rate,)
