"""What is tried against a trouble, in order: the least harmful first. Ladders are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.records import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One thing to try; each begins with the way back to the last good state, and goes on past the data from there."""

    words: str
    """What comes with the way back."""
    hold: bool = True
    """Rate and momentum are no higher than they were when things were well."""
    ceilings: bool = True
    """Updates that stand out are refused in their own step."""
    clip: bool = False
    """Gradients are clipped at their usual norm."""
    rate: float = 1.0
    rewarm: int = 0
    reset: bool = False
    """The optimizers' state is emptied."""
    float32: bool = False
    empty: bool = False
    """Gradients that the update before has left behind are emptied before they are added to."""


BACK = Rung(words="on past the data, with rate and momentum no higher than there")
CLIP = Rung(words="with gradients clipped at their usual norm", clip=True, ceilings=False)
LOWER = Rung(words="with half the rate, warmed up again", rate=0.5, rewarm=10, clip=True)
FRESH = Rung(
    words="with a fresh optimizer at a quarter of the rate, warmed up again",
    rate=0.25,
    rewarm=20,
    clip=True,
    reset=True,
)
WIDER = Rung(words="in float32 for a while", float32=True)

EMPTY = Rung(words="with gradients emptied before each backward", empty=True, ceilings=False)

WARM = Rung(words="with the rate warmed up", rewarm=30, ceilings=False, hold=False)
WARMER = Rung(words="with a tenth of the rate, warmed up", rate=0.1, rewarm=50, ceilings=False, hold=False)

USUAL = (BACK, LOWER, FRESH)
LADDERS: Mapping[Cause, tuple[Rung, ...]] = {
    Cause.PRECISION_OVERFLOW: (WIDER, BACK, LOWER),
    Cause.PRECISION_UNDERFLOW: (BACK, WIDER, LOWER),
    Cause.ACCUMULATION: (CLIP, LOWER, FRESH),
    Cause.EXPLODING_GRADIENT: (CLIP, LOWER, FRESH),
    Cause.OPTIMIZER_STATE: (BACK, FRESH, LOWER),
    Cause.INITIALISATION: (WARM, WARMER),
}
"""Where the cause speaks for another order than the usual one."""


EARLY = (WARM, WARMER)
"""When a run went wrong before it had begun to learn."""
LEFT_OVER = (EMPTY, CLIP, LOWER)
"""When nobody empties the gradients."""
