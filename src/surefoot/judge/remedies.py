"""What is tried against a trouble, in order: the least harmful first. Ladders are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.records import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing to try; nearly each begins with the way back to the last good state, and goes on past the data."""

    words: str
    """What comes with the way back."""
    back: bool = True
    """The run goes back; else nothing but what is told here is changed."""
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
    strict: bool = False
    """The ceilings are low, and what is above them is waited out: it did harm."""
    keep: bool = False
    """What was asked of the steps before stays as it is."""
    rescale: bool = False
    """The loss scale is set to what it usually was."""


BACK = Remedy(words="on past the data, with rate and momentum no higher than there")
CLIP = Remedy(words="with gradients clipped at their usual norm", clip=True, ceilings=False)
LOWER = Remedy(words="with half the rate, warmed up again", rate=0.5, rewarm=10, clip=True)
FRESH = Remedy(
    words="with a fresh optimizer at a quarter of the rate, warmed up again",
    rate=0.25,
    rewarm=20,
    clip=True,
    reset=True,
)
SINGLE = Remedy(words="in float32 for a while", back=False, hold=False, ceilings=False, float32=True)
WIDER = Remedy(words="in float32 for a while, with rate and momentum no higher than there", float32=True)

EMPTY = Remedy(words="with gradients emptied before each backward", empty=True, ceilings=False)

PAST = Remedy(words="past all batches that stand out, with rate and momentum no higher than there", strict=True)
RESCALE = Remedy(words="with the loss scale set back to what it was", back=False, hold=False, rescale=True)
HOLD = Remedy(words="with rate and momentum held at what they were when things were well", back=False)

WARM = Remedy(words="with the rate warmed up", rewarm=30, ceilings=False, hold=False)
WARMER = Remedy(words="with a tenth of the rate, warmed up", rate=0.1, rewarm=50, ceilings=False, hold=False)

EQUAL = Remedy(words="with equal weights on all ranks", hold=False, ceilings=False, keep=True)

USUAL = (BACK, LOWER, FRESH)
LADDERS: Mapping[Cause, tuple[Remedy, ...]] = {
    Cause.PRECISION_OVERFLOW: (SINGLE, WIDER, LOWER),
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
ASTRAY = (PAST, LOWER, FRESH)
"""When held-out data says that the run has lost much of what it had learnt."""
HELD = (HOLD, BACK, LOWER)
"""When the rate has risen and nothing is gained by it, but nothing lost either: the way back would cost more."""
REPLICAS = (EQUAL,)
"""When ranks that should hold the same weights do not. Nothing else would make them equal again."""
LOW_SCALE = (RESCALE, WIDER, LOWER)
"""When the loss scale is so low that gradients become zero: the weights are sound, for next to nothing has landed."""
