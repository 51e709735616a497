"""The figures that decide what is a sign and what is noise, in one place; `surefoot bench logs` tries others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How much it takes; levels and rises are logarithms, so 0.1 is about 10 %."""

    blowup: float = 0.7
    """Rise of the loss above its lowest level from which it has left its course: it has doubled."""
    out_of_noise: float = 2.5
    """How many times the noise that rise has to be."""
    creep: float = 0.1
    """Rise of the loss above its lowest level that is worth a word."""
    spike: float = 10.0
    """How many times the noise a peak stands above the level on both sides."""
    overfit: float = 0.15
    """Rise of the evaluation loss above its best, below which it may be called the same."""
    flat: float = 0.05
    """Fall of the loss from the first to the last level, below which nothing was learnt."""


SIGHT = Sight()
