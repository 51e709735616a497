"""Rules that other projects ship, reimplemented for comparison.

Alarm rules say at which steps they would raise an alarm and are scored on recorded runs. Intervention rules run live in
the loop. Each names its source. Quirks, such as a window that keeps rejected values, are reproduced too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from benchmarks.zoo.training import Protector, ZooRun


class AlarmRule(Protocol):
    """Sees one step after the other; a new instance is made for each run."""

    name: str
    source: str

    def update(self, loss: float, norm: float, lr: float) -> bool:
        """Whether this step raises an alarm."""
        ...


# -- shared by alarm and intervention rules


class _SixSigmaWindow:
    """The last 128 losses and norms. Outliers stay in the window, so one NaN causes 128 more alarms. Only values above
    the mean count as outliers, and none before the 64th step."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=129)
        self.norms: deque[float] = deque(maxlen=129)

    def is_outlier(self, loss: float, norm: float) -> bool:
        self.losses.append(loss)
        self.norms.append(norm)
        return len(self.losses) >= 64 and not (_within(self.losses) and _within(self.norms))


def _within(values: Iterable[float]) -> bool:
    """Whether the last value is at most 6 sigma above the mean of those before it; False with any NaN."""
    *past, now = values
    mean = sum(past) / len(past)
    variance = sum((value - mean) * (value - mean) for value in past) / (len(past) - 1)
    return now - mean <= 6 * math.sqrt(variance)


class _ZScoreStats:
    """ZClip's running mean and variance of the norm: the first 25 norms initialise them, each later norm has a weight
    of 0.03, and a clipped norm enters with its clipped value. After a NaN both stay NaN."""

    def __init__(self) -> None:
        self.warmup_norms: list[float] = []
        self.mean = self.variance = math.nan

    def limit(self, norm: float) -> float | None:
        """The value to which a norm above 2.5 sigma is clipped: the higher its z-score, the closer to the mean."""
        if len(self.warmup_norms) < 25:
            self.warmup_norms.append(norm)
            self.mean = sum(self.warmup_norms) / len(self.warmup_norms)
            self.variance = sum((value - self.mean) * (value - self.mean) for value in self.warmup_norms) / len(
                self.warmup_norms
            )
            return None
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        clip = self.mean + 2.5 * deviation * 2.5 / z if z > 2.5 else None
        entered = norm if clip is None else clip
        self.mean = 0.97 * self.mean + 0.03 * entered
        self.variance = 0.97 * self.variance + 0.03 * (entered - self.mean) * (entered - self.mean)
        return clip


# -- alarm rules


class NanCheck:
    """The loss is NaN or infinite. Megatron-LM checks the gradient norms as well; they are left out here because with a
    loss scale they overflow in healthy runs too."""

    name = "NaN check"
    source = "https://github.com/NVIDIA/Megatron-LM/blob/main/pretrain_gpt.py"

    def update(self, loss: float, norm: float, lr: float) -> bool:
        return not math.isfinite(loss)


class ThreeTimesMeanOfTen:
    """Lightning's SpikeDetection with its defaults: a relative tolerance of 2 over a window of 10, that is a loss of at
    least three times the mean. A nonfinite loss is an alarm too, a loss not above the previous one is not, and a loss
    that raised an alarm does not enter the mean. It judges from the second step on; in Lightning an alarm ends the
    run."""

    name = "3x the mean of 10"
    source = "https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/utilities/spike.py"

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=10)

    def update(self, loss: float, norm: float, lr: float) -> bool:
        alarm = bool(self.losses) and self._spikes(loss)
        if not alarm:
            self.losses.append(loss)
        return alarm

    def _spikes(self, loss: float) -> bool:
        mean = sum(self.losses) / len(self.losses)
        return not math.isfinite(loss) or (loss > self.losses[-1] and abs(loss - mean) >= abs(2 * mean))


class TwiceTheMeanFiveTimes:
    """LLM Foundry's KillLossSpike: a loss of at least twice the mean of the last 100, five times in a row. The window
    keeps every loss, and a NaN in it silences the rule until it has left. In LLM Foundry the window grows in runs of
    more than 2000 steps; its second check, of losses that stay high, is not reproduced."""

    name = "2x the mean, five times"
    source = "https://github.com/mosaicml/llm-foundry/blob/main/llmfoundry/callbacks/kill_loss_spike_callback.py"

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=100)
        self.consecutive = 0

    def update(self, loss: float, norm: float, lr: float) -> bool:
        if len(self.losses) == 100:
            self.consecutive = self.consecutive + 1 if loss >= 2 * sum(self.losses) / 100 else 0
        self.losses.append(loss)
        return self.consecutive >= 5


class TenTimesFirstHundred:
    """Megatron-LM's rerun machine: at least ten times the largest of the first 100, for the loss and for the norm, each
    against its own. What is not finite neither counts nor alarms. Megatron-LM looks at the norm of each bucket of
    gradients; here it is the norm of all."""

    name = "10x the first 100"
    source = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/rerun_state_machine.py"

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def update(self, loss: float, norm: float, lr: float) -> bool:
        loss_beyond, norm_beyond = self._beyond(self.losses, loss), self._beyond(self.norms, norm)
        return loss_beyond or norm_beyond

    def _beyond(self, first: list[float], value: float) -> bool:
        if not math.isfinite(value):
            return False
        if len(first) < 100:
            first.append(abs(value))
            return False
        return abs(value) >= 10 * max(first)


class SixSigma:
    """OLMo-core's SkipStepOptimizer as an alarm only: loss or norm more than 6 sigma above the mean of the last 128,
    with the original window."""

    name = "six sigma over 128"
    source = "https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py"

    def __init__(self) -> None:
        self.window = _SixSigmaWindow()

    def update(self, loss: float, norm: float, lr: float) -> bool:
        return self.window.is_outlier(loss, norm)


class ZScoreAlarm:
    """The steps at which ZClip's z-score of 2.5 would clip, taken as alarms."""

    name = "z-score of 2.5"
    source = "https://github.com/bluorion-com/ZClip"

    def __init__(self) -> None:
        self.norms = _ZScoreStats()

    def update(self, loss: float, norm: float, lr: float) -> bool:
        return self.norms.limit(norm) is not None


class NotesPredictor:
    """The crash predictor of the notes (D7): four signals over the last 20 steps, combined as 1 - prod(1 - s), alert at
    0.8. It judges from the 20th step on.

    As written it never alerts. The 99th percentile of 20 norms with the present one on top is 0.81 of that norm and
    0.19 of the next, so no norm is above twice that, and the other three signals together come to 0.79. A NaN in the
    window silences the signal as well. Repaired, the percentile is that of the finite norms among the other 19 steps;
    together with a leap to five times the norm two steps earlier that gives just 0.8. Nothing else is changed.
    """

    source = "the notes this project began with, as D7 of its specification states them"

    def __init__(self, repaired: bool) -> None:
        self.name = "the notes' predictor, repaired" if repaired else "the notes' predictor"
        self.repaired = repaired
        self.losses: deque[float] = deque(maxlen=20)
        self.norms: deque[float] = deque(maxlen=20)
        self.probability = 0.0

    def update(self, loss: float, norm: float, lr: float) -> bool:
        self.losses.append(loss)
        self.norms.append(norm)
        if len(self.losses) < 20:
            return False
        self.probability = 1 - math.prod(1 - signal for signal in self.signals())
        return self.probability >= 0.8

    def signals(self) -> tuple[float, float, float, float]:
        """Three rises of the loss in a row; the last two second differences above a tenth of the loss; the norm above
        five times the one two steps earlier; the norm above twice the 99th percentile."""
        a, b, c, d = list(self.losses)[-4:]
        *others, norm = self.norms
        window = [value for value in others if math.isfinite(value)] if self.repaired else [*others, norm]
        return (
            0.3 if a < b < c < d else 0.0,
            0.4 if all(bend > 0 and bend > 0.1 * d for bend in (c - 2 * b + a, d - 2 * c + b)) else 0.0,
            0.5 if norm > 5 * self.norms[-3] else 0.0,
            0.6 if norm > 2 * _percentile(window, 0.99) else 0.0,
        )


def _percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation, as in NumPy; NaN for no values or with a NaN among them."""
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


ALARM_RULES: tuple[Callable[[], AlarmRule], ...] = (
    NanCheck,
    ThreeTimesMeanOfTen,
    TwiceTheMeanFiveTimes,
    TenTimesFirstHundred,
    SixSigma,
    ZScoreAlarm,
    partial(NotesPredictor, repaired=False),
    partial(NotesPredictor, repaired=True),
)
"""Factories of alarm rules."""


# -- intervention rules


class InterventionRule(Protector):
    """A protector that changes gradients or skips updates. With a loss scale an overflowed update is skipped anyway; it
    is in `acted` all the same if the rule would have skipped it."""

    name: str
    source: str

    def _record(self, run: ZooRun, acts: bool) -> bool:
        if acts:
            self.acted = (*self.acted, run.step)
        return acts


def _norm(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


class SkipNonFinite(InterventionRule):
    """Skips an update when the loss or the norm is not finite; torch's loss scaling does so for gradients, and many
    loops do it without scaling."""

    name = "skip what is not finite"
    source = "common practice, as in https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling"

    def allow(self, run: ZooRun, loss: float) -> bool:
        return not self._record(run, not (math.isfinite(loss) and math.isfinite(_norm(run.model))))


class ClipAtOne(InterventionRule):
    """Torch's clipping at a global norm of 1.0 and nothing else; a nonfinite norm turns all gradients into NaN."""

    name = "clip at 1.0"
    source = "https://github.com/karpathy/nanoGPT/blob/master/train.py"

    def allow(self, run: ZooRun, loss: float) -> bool:
        norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))
        self._record(run, not norm <= 1.0)
        return True


class ClipAtOneAndSkip(InterventionRule):
    """Clipping at 1.0, and skipping an update when the norm is not finite, as ESPnet does with its own threshold; here
    a nonfinite loss counts too."""

    name = "clip at 1.0 and skip what is not finite"
    source = "https://github.com/espnet/espnet/blob/master/espnet2/train/trainer.py"

    def allow(self, run: ZooRun, loss: float) -> bool:
        norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))
        finite = math.isfinite(loss) and math.isfinite(norm)
        self._record(run, not finite or norm > 1.0)
        return finite


class SixSigmaSkip(InterventionRule):
    """OLMo-core's SkipStepOptimizer: skips an update when the loss or the norm is more than 6 sigma above the mean of
    the last 128. Rejected values stay in the window, and a NaN among them costs 128 more updates. The clipping that its
    trainer also does is left out."""

    name = "skip beyond six sigma"
    source = SixSigma.source

    def __init__(self) -> None:
        self.window = _SixSigmaWindow()

    def allow(self, run: ZooRun, loss: float) -> bool:
        return not self._record(run, self.window.is_outlier(loss, _norm(run.model)))


class ZClip(InterventionRule):
    """ZClip with its package's defaults: a norm more than 2.5 sigma above the running mean is clipped to the mean plus
    2.5 * 2.5 / z sigma, and every norm to `max_norm` as well. In the first 25 steps only `max_norm` applies. The
    z-score is from the paper (arXiv 2504.02507); the fixed bound of 1.0 is the package's."""

    name = "ZClip at 2.5"
    source = ZScoreAlarm.source

    def __init__(self, max_norm: float = 1.0) -> None:
        self.norms = _ZScoreStats()
        self.max_norm = max_norm

    def allow(self, run: ZooRun, loss: float) -> bool:
        norm = _norm(run.model)
        clip = self.norms.limit(norm)
        bound = min(norm if clip is None else clip, self.max_norm)
        if self._record(run, norm > bound):
            grads = [p.grad for p in run.model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, bound / (norm + 1e-6))
        return True


INTERVENTION_RULES: tuple[Callable[[], InterventionRule], ...] = (
    SkipNonFinite,
    ClipAtOne,
    ClipAtOneAndSkip,
    SixSigmaSkip,
    ZClip,
)
"""Factories of intervention rules."""
