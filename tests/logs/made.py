"""Synthetic loss curves with a shape, a length and noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

Numbers = dict[str, np.ndarray]


@dataclass(frozen=True)
class Course:
    """A healthy loss curve, into which tests plant faults."""

    loss: np.ndarray
    seed: int

    @property
    def chance(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def logged(self, loss: np.ndarray | None = None, **more: np.ndarray) -> Numbers:
        values = self.loss if loss is None else loss
        return {"step": np.arange(len(values)) * 10.0, "loss": values, **more}


@st.composite
def learning(draw: st.DrawFn, least: int = 40, noise: tuple[float, ...] = (0.005, 0.02, 0.05)) -> Course:
    """A loss that decreases by a power law, exponentially or linearly to a floor above zero."""
    count = draw(st.sampled_from([n for n in (20, 40, 100, 300, 1000, 5000) if n >= least]))
    seed = draw(st.integers(0, 2**31))
    chance = np.random.default_rng(seed)
    time = np.linspace(0, 1, count)
    floor = chance.uniform(0.05, 0.5)
    falls = (
        (1 + time * chance.uniform(10, 200)) ** -chance.uniform(0.4, 1),
        np.exp(-time * chance.uniform(2, 10)),
        1 - time * chance.uniform(0.4, 0.9),
    )
    fall = falls[draw(st.integers(0, 2))]
    scale = 10.0 ** chance.uniform(-2, 2)
    spread = draw(st.sampled_from(noise))
    return Course(scale * (floor + (1 - floor) * fall) * np.exp(chance.normal(0, spread, count)), seed + 1)
