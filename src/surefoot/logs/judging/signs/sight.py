"""The figures that decide what is a sign and what is noise, in one place; `surefoot bench logs` tries others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SymptomThresholds:
    """How much it takes; levels and rises are logarithms, so 0.1 is about 10 %."""

    blowup_rise: float = 0.7
    """Rise of the loss above its lowest level from which it has left its course: it has doubled."""
    rise_to_noise: float = 2.5
    """How many times the noise that rise has to be."""
    slow_rise: float = 0.1
    """Rise of the loss above its lowest level that is worth a word."""
    spike_to_noise: float = 10.0
    """How many times the noise a peak stands above the level on both sides."""
    overfit_rise: float = 0.15
    """Rise of the evaluation loss above its best, below which it may be called the same."""
    min_fall: float = 0.05
    """Fall of the loss from the first to the last level, below which nothing was learnt."""


DEFAULT_THRESHOLDS = SymptomThresholds()
