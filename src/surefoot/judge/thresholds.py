"""The numbers detectors and rules compare against: fixed scale constants, and `Thresholds`, which a user may set."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import NormalDist

from surefoot.journal.policy_aliases import DERIVED_THRESHOLDS, ignore_derived

# -- how long, in rows (one row is one attempted update) or updates

REPEAT_COUNT = 3
"""Occurrences after which something is no accident."""
RECENT_ROWS = 5
"""The last few rows or weight checks: their majority or median says how things are now."""
WINDOW_ROWS = 16
"""Rows still being judged and not yet part of a baseline; their mean shows what single rows hide."""
TREND_ROWS = 32
"""Rows over which a slow change shows, and within which an event is close enough to be related to another."""
BASELINE_ROWS = 64
"""Rows that define normal, and after which something that did not come back is over."""
EARLY_UPDATES = 100
"""Updates by which a run should have begun to learn."""
SETTLED_UPDATES = 1000
"""Updates after which initialisation and warmup explain nothing any more."""
UPDATES_IN_FLIGHT = 4
"""Updates that may have been made, but not judged, when a decision takes effect: two, and two more under loss scaling,
because a skipped step is known only when the next backward begins."""
HISTORY_ROWS = 100
"""Losses, norms and clip factors kept in `History`."""

# -- how much, as a ratio to the usual value or a fraction of a whole

CLEAR_RATIO = 1.5
"""Clearly more than before, beyond the usual ups and downs."""
DOUBLE_RATIO = 2.0
"""It stands out."""
STRONG_RATIO = 4.0
"""Nothing ordinary explains it."""
HUGE_RATIO = 10.0
"""Of another kind altogether."""

NEGLIGIBLE_FRACTION = 0.02
"""Next to nothing of a whole."""
SMALL_FRACTION = 0.1
"""Little of a whole."""
NOTABLE_FRACTION = 0.2
"""A good part of a whole."""

LOG_FACTOR_TOLERANCE = 0.5
"""How far apart the logarithms of two factors that should be equal may lie: single batches scatter."""
MAX_MICROBATCHES = 300
"""Accumulation steps somebody may have forgotten to divide by; a larger factor is a division by nearly zero."""
TRIPLE_RATIO = DOUBLE_RATIO * CLEAR_RATIO
"""Clearly more than double."""
FROZEN_RATIO = STRONG_RATIO**2
"""Updates, or gradients that pass a clip, this many times smaller than usual hardly move anything; gradients twice as
much smaller vanish."""
ROUNDING_NOISE_RATIO = 1e5
"""A gradient this many times smaller than those of the other tensors is rounding noise around zero."""


@ignore_derived(DERIVED_THRESHOLDS)
@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """From which value on a detector reports something; sigmas are robust standard deviations of the baseline.

    The fields are what can be set; the properties follow from them.
    """

    false_alarms: float = 0.75
    """How often, in 100,000 healthy steps, scatter alone may take the level of the losses beyond its bounds. A target:
    losses that scatter normally stay below it, those with exponential tails exceed it some twenty times."""
    baseline_rows: int = BASELINE_ROWS
    """Accepted values that form a baseline; a quarter of them is needed before anything is compared with it."""
    norm_jump_ratio: float = STRONG_RATIO
    """A gradient norm this many times the largest one accepted recently is a jump."""
    lr_jump_ratio: float = 5.0
    """A learning rate, or a momentum's memory 1 / (1 - momentum), that is this many times its usual value."""
    eval_rise_fraction: float = 0.05
    """An eval loss above its best by this fraction, several times in a row, has risen; by four times this fraction,
    twice, it is harm. The mean of 32 training losses has risen slowly when it is up by twice this fraction."""
    exploding_norm: float = 100.0
    """A layer's gradient norm above this, and above ten times its own baseline, explodes; ten times this is severe."""
    input_shift_sigmas: float = 0.5
    """A batch is different when its mean lies this many input standard deviations from the usual mean, or its standard
    deviation has changed by this fraction."""
    idle_utilisation: float = 0.6
    """Utilisation below which a device counts as idle..."""
    idle_seconds: float = 600.0
    """... and how long it must stay there before that is reported."""

    def __post_init__(self) -> None:
        wrong = [f.name for f in fields(self) if not getattr(self, f.name) > 0]
        if wrong:
            raise ValueError(f"Thresholds: {', '.join(wrong)} must be above 0.")

    # -- from the target of false alarms. Sigma is itself estimated from few losses, so that single losses are taken to
    # have heavier tails than normal noise: P(z > s) = exp(-s) / 2.

    @cached_property
    def level_sigmas(self) -> float:
        """The loss level has risen when the median of the last 5 losses is this many sigmas above normal: 3 of 5 that
        are higher by chance alone (10 ways to choose them) are as rare as the target says."""
        return -math.log(2 * (self._chance / math.comb(RECENT_ROWS, RECENT_ROWS // 2)) ** (1 / (RECENT_ROWS // 2 + 1)))

    @cached_property
    def mean_level_sigmas(self) -> float:
        """The same for the mean of the last 16 losses, which scatters less and takes longer."""
        return -NormalDist().inv_cdf(self._chance) * math.sqrt(DOUBLE_RATIO / WINDOW_ROWS)

    @cached_property
    def loss_jump_sigmas(self) -> float:
        """A single loss this many sigmas above normal is a jump, if it also lies clearly above the largest one."""
        return DOUBLE_RATIO * self.level_sigmas

    @property
    def _chance(self) -> float:
        """The probability of a false alarm at one step; above a tenth there would be no threshold left."""
        return min(self.false_alarms / 1e5, SMALL_FRACTION)

    # -- from the length of a baseline

    @cached_property
    def min_baseline_rows(self) -> int:
        """Accepted values needed before anything is compared with them."""
        return max(1, self.baseline_rows // 4)

    @cached_property
    def slow_baseline_rows(self) -> int:
        """Rows of a baseline that a slow change must not be able to drag along."""
        return 4 * self.baseline_rows

    # -- from the other fields

    @cached_property
    def large_norm_jump_ratio(self) -> float:
        """A norm jump that is no accident when it happens twice within 64 rows, or when the eval loss rises after
        it."""
        return self.norm_jump_ratio * HUGE_RATIO / STRONG_RATIO

    @cached_property
    def huge_norm_jump_ratio(self) -> float:
        """A norm jump that is severe at once if the update was applied and the loss jumped too."""
        return self.norm_jump_ratio**3

    @cached_property
    def lr_drop_ratio(self) -> float:
        """A learning rate that falls by this factor from one step to the next is as good as zero."""
        return STRONG_RATIO * self.lr_jump_ratio

    @cached_property
    def slow_rise_fraction(self) -> float:
        """The loss has risen slowly when the mean of 32 losses is above the lowest such mean by this fraction."""
        return DOUBLE_RATIO * self.eval_rise_fraction

    @cached_property
    def eval_harm_fraction(self) -> float:
        """An eval loss above its best by this fraction, twice, is harm if the training loss misbehaves too."""
        return STRONG_RATIO * self.eval_rise_fraction

    @cached_property
    def input_std_ratio(self) -> float:
        """A batch is different when its standard deviation is this many times larger or smaller than usual."""
        return 1 + self.input_shift_sigmas
