"""The numbers detectors and rules compare against: fixed scale constants, and `Thresholds`, which a user may set."""

from __future__ import annotations

from dataclasses import dataclass, fields

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
ROUNDING_NOISE_RATIO = 1e5
"""A gradient this many times smaller than those of the other tensors is rounding noise around zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From which value on a detector reports something; sigmas are robust standard deviations of the baseline."""

    baseline_rows: int = BASELINE_ROWS
    """Accepted values that form a baseline."""
    min_baseline_rows: int = WINDOW_ROWS
    """Accepted values needed before anything is compared with them."""
    norm_jump_ratio: float = STRONG_RATIO
    """A gradient norm this many times the largest one accepted recently is a jump."""
    large_norm_jump_ratio: float = HUGE_RATIO
    """The same, but no accident when it happens twice within 64 rows, or when the eval loss rises after it."""
    huge_norm_jump_ratio: float = 60.0
    """The same, severe at once if the update was applied and the loss jumped too."""
    loss_jump_sigmas: float = 8.0
    """A single loss this many sigmas above normal is a jump..."""
    loss_jump_ratio: float = CLEAR_RATIO
    """... if it is also this many times the largest one accepted recently."""
    lasting_steps: int = RECENT_ROWS
    """Steps in a row after which a spike counts as a lasting change."""
    max_spikes: int = REPEAT_COUNT
    """Spikes within `baseline_rows`; with more of them, spikes are normal for this run."""
    level_sigmas: float = 4.0
    """The loss level has risen when the median of the last 5 losses is this many sigmas above normal."""
    mean_level_sigmas: float = 1.5
    """The same for the mean of the last 16 losses, which scatters less and takes longer."""
    lost_level_ratio: float = DOUBLE_RATIO
    """A level this many times both the first losses and the largest recent one: the run lost what it had learnt."""
    growth_ratio: float = 3.0
    """Exponential growth: the loss or norm rose at each of 6 steps, and this many times in all."""
    lr_jump_ratio: float = 5.0
    """A learning rate, a momentum's memory 1 / (1 - momentum), or an update size at equal lr that is this many times
    its usual value."""
    input_shift_sigmas: float = 0.5
    """A batch is different when its mean lies this many input standard deviations from the usual mean..."""
    input_std_ratio: float = CLEAR_RATIO
    """... or when its standard deviation is this many times larger or smaller than usual."""
    input_drift_sigmas: float = NOTABLE_FRACTION
    """The data drifts when the mean of the last 16 batches has moved by this many input standard deviations."""
    clip_lost_ratio: float = DOUBLE_RATIO
    """The loop's own clipping is lost when the norm it applies is this many times the usual one."""
    eval_rise_fraction: float = 0.05
    """The eval loss has risen when it is above its best by this fraction, several times in a row."""
    eval_harm_fraction: float = NOTABLE_FRACTION
    """An eval loss above its best by this fraction, twice, is harm if the training loss misbehaves too."""
    slow_rise_fraction: float = SMALL_FRACTION
    """The loss has risen slowly when the mean of 32 losses is above the lowest such mean by this fraction."""
    lr_drop_ratio: float = 20.0
    """A learning rate that falls by this factor from one step to the next is as good as zero."""
    exploding_norm: float = 100.0
    """A layer's gradient norm above this, and above ten times its own baseline, explodes; ten times this is severe."""
    vanishing_norm: float = 1e-8
    """A layer's gradient norm below this vanishes..."""
    vanishing_ratio: float = 30.0
    """... and so does one that has become this many times smaller than its baseline."""
    dead_zeros_rise: float = 0.4
    """A layer is dead when the fraction of its gradient values that are zero has risen by this much."""
    silent_zeros_rise: float = SMALL_FRACTION
    """The same for a layer that only counts as more silent than before."""
    unchanged_rise: float = 0.4
    """Updates are rounded away when the fraction of weights that a step leaves unchanged has risen by this much."""
    frozen_update_ratio: float = 16.0
    """The weights hardly move when an update at the same lr has become this many times smaller."""
    loss_scale_drop_ratio: float = 64.0
    """A loss scale that has fallen by this factor is too low."""
    overflow_streak: int = 8
    """Overflows in a row that are reported."""
    repeated_loss_fraction: float = NOTABLE_FRACTION
    """Batches repeat when losses one period apart differ by less than this fraction of their usual scatter."""
    periodic_spike_count: int = REPEAT_COUNT
    """Equal distances between spikes that make them periodic."""
    clipped_often_fraction: float = 1 - SMALL_FRACTION
    """The clip threshold is too low when more than this fraction of the last 100 updates was clipped."""
    slow_step_ratio: float = 3.0
    """A step that takes this many times as long as usual is slow."""
    data_wait_fraction: float = 0.25
    """Fraction of a step spent waiting for data from which on the data loader is the bottleneck."""
    idle_utilisation: float = 0.6
    """Utilisation below which a device counts as idle..."""
    idle_seconds: float = 600.0
    """... and how long it must stay there before that is reported."""
    memory_growth_ratio: float = 1.05
    """Growth of memory over all readings, nearly without a pause, from which on it is a leak."""

    @property
    def slow_baseline_rows(self) -> int:
        """Rows of a baseline that a slow change must not be able to drag along."""
        return 4 * self.baseline_rows

    def __post_init__(self) -> None:
        wrong = [f.name for f in fields(self) if not getattr(self, f.name) > 0]
        if wrong:
            raise ValueError(f"Thresholds: {', '.join(wrong)} must be above 0.")
