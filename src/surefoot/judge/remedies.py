"""The remedies that are tried against an incident, least harmful first, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from surefoot.journal.aliases import ACTIONS, REMEDIES
from surefoot.records import Action, Cause, RemedyId


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to try; nearly every remedy rewinds to the last good state and goes on past the bad data."""

    id: RemedyId
    text: str
    """What is done besides rewinding, in words; it follows "back to step 120, "."""
    _: KW_ONLY
    rewind: bool = True
    cap_settings: bool = True
    """Cap learning rate and momentum at their last healthy values."""
    ceilings: bool = True
    """Refuse updates whose norm or loss stands out."""
    clip: bool = False
    """Clip gradients at their usual norm."""
    lr_factor: float = 1.0
    rewarmup_steps: int = 0
    reset_optimizer: bool = False
    float32: bool = False
    zero_stale_grads: bool = False
    """Zero the gradients that the last update left behind before backward adds to them."""
    tight_ceilings: bool = False
    """Set the ceilings low and wait until harmful data is over."""
    keep_overrides: bool = False
    """Leave the overrides in force as they are."""
    restore_loss_scale: bool = False
    """Set the loss scale back to its usual value."""

    @property
    def named(self) -> dict[str, Any]:
        """Its id and its words, as fields of a `Decision`."""
        return {"remedy_id": self.id, "remedy": self.text}


REWIND = Remedy(RemedyId.REWIND, "past the bad data, with lr and momentum capped at their healthy values")
CLIP = Remedy(RemedyId.CLIP, "with gradients clipped at their usual norm", clip=True, ceilings=False)
LOWER_LR = Remedy(
    RemedyId.LOWER_LR, "with half the learning rate, warmed up again", lr_factor=0.5, rewarmup_steps=10, clip=True
)
FRESH_OPTIMIZER = Remedy(
    RemedyId.FRESH_OPTIMIZER,
    "with a fresh optimizer at a quarter of the learning rate, warmed up again",
    lr_factor=0.25,
    rewarmup_steps=20,
    clip=True,
    reset_optimizer=True,
)
FLOAT32 = Remedy(
    RemedyId.FLOAT32, "in float32 for a while", rewind=False, cap_settings=False, ceilings=False, float32=True
)
FLOAT32_REWIND = Remedy(
    RemedyId.FLOAT32_REWIND, "in float32 for a while, with lr and momentum capped at their healthy values", float32=True
)
ZERO_GRADS = Remedy(
    RemedyId.ZERO_GRADS, "with gradients zeroed before each backward", zero_stale_grads=True, ceilings=False
)
WAIT_OUT = Remedy(
    RemedyId.WAIT_OUT,
    "past all batches that stand out, with lr and momentum capped at their healthy values",
    tight_ceilings=True,
)
RESTORE_SCALE = Remedy(
    RemedyId.RESTORE_SCALE,
    "with the loss scale set back to its usual value",
    rewind=False,
    cap_settings=False,
    restore_loss_scale=True,
)
CAP = Remedy(RemedyId.CAP, "with lr and momentum capped at their healthy values", rewind=False)
WARMUP = Remedy(
    RemedyId.WARMUP, "with the learning rate warmed up", rewarmup_steps=30, ceilings=False, cap_settings=False
)
GENTLE_WARMUP = Remedy(
    RemedyId.GENTLE_WARMUP,
    "with a tenth of the learning rate, warmed up",
    lr_factor=0.1,
    rewarmup_steps=50,
    ceilings=False,
    cap_settings=False,
)
EQUAL_WEIGHTS = Remedy(
    RemedyId.EQUAL_WEIGHTS, "with equal weights on all ranks", cap_settings=False, ceilings=False, keep_overrides=True
)

RESTART = Remedy(RemedyId.RESTART, "restarted from the initial state", cap_settings=False, ceilings=False)

DEFAULT_REMEDIES = (REWIND, LOWER_LR, FRESH_OPTIMIZER)
REMEDIES_BY_CAUSE: Mapping[Cause, tuple[Remedy, ...]] = {
    Cause.PRECISION_OVERFLOW: (FLOAT32, FLOAT32_REWIND, LOWER_LR),
    Cause.PRECISION_UNDERFLOW: (REWIND, FLOAT32_REWIND, LOWER_LR),
    Cause.ACCUMULATION: (CLIP, LOWER_LR, FRESH_OPTIMIZER),
    Cause.EXPLODING_GRADIENT: (CLIP, LOWER_LR, FRESH_OPTIMIZER),
    Cause.OPTIMIZER_STATE: (REWIND, FRESH_OPTIMIZER, LOWER_LR),
    Cause.INITIALISATION: (WARMUP, GENTLE_WARMUP),
}
"""Where the cause calls for another order than the default."""

EARLY_REMEDIES = (WARMUP, GENTLE_WARMUP)
"""For a run that went wrong before it had begun to learn."""
STALE_GRADS_REMEDIES = (ZERO_GRADS, CLIP, LOWER_LR)
"""For a loop that does not zero its gradients."""
EVAL_HARM_REMEDIES = (WAIT_OUT, LOWER_LR, FRESH_OPTIMIZER)
"""For an eval loss which shows that the run has lost much of what it had learnt."""
CAP_REMEDIES = (CAP, REWIND, LOWER_LR)
"""For an lr that was raised without gain or harm: a rewind would cost more."""
REPLICA_REMEDIES = (EQUAL_WEIGHTS,)
"""For ranks that should hold the same weights and do not: nothing else would make them equal again."""
LOW_SCALE_REMEDIES = (RESTORE_SCALE, FLOAT32_REWIND, LOWER_LR)
"""For a loss scale so low that gradients become zero: the weights are sound, because hardly any update moved them."""

ALL_REMEDIES = (
    REWIND,
    CLIP,
    LOWER_LR,
    FRESH_OPTIMIZER,
    FLOAT32,
    FLOAT32_REWIND,
    ZERO_GRADS,
    WAIT_OUT,
    RESTORE_SCALE,
    CAP,
    WARMUP,
    GENTLE_WARMUP,
    EQUAL_WEIGHTS,
    RESTART,
)
BY_NAME: Mapping[str, RemedyId] = {name: remedy.id for remedy in ALL_REMEDIES for name in (remedy.id, remedy.text)}
"""Decisions, and states that earlier versions saved, name a remedy by its text."""


def remedy_id(name: str) -> RemedyId | None:
    """The remedy with this id or text, today's or an earlier version's; None if there is none."""
    return BY_NAME.get(REMEDIES.get(name, name))


def load_remedies(saved: Sequence[str]) -> list[RemedyId]:
    """The remedies that a saved state lists, as far as they are known."""
    known = (remedy_id(name) for name in saved)
    return [remedy for remedy in known if remedy is not None]


def load_last(state: Any) -> tuple[Action, RemedyId | None] | None:
    """The last action and its remedy; older checkpoints hold the action alone."""
    if state is None:
        return None
    action, *remedy = state if isinstance(state, list) else [state]
    return Action(ACTIONS.get(action, action)), remedy_id(remedy[0]) if remedy else None
