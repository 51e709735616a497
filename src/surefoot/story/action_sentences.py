"""What surefoot did, in words: one sentence for each action, true to the fields of its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.records import Action, Cause

OVERRIDE_TEXTS = (
    ("lr_factor", "the learning rate times {}"),
    ("rewarmup_steps", "warmed up over {} updates"),
    ("lasting_lr_factor", "the learning rate times {} for the rest of the run"),
    ("max_lr", "lr capped at {}"),
    ("max_momentum", "momentum capped at {}"),
    ("clip", "gradients clipped at {}"),
    ("norm_ceiling", "updates with a gradient norm above {} refused"),
    ("loss_ceiling", "updates with a loss above {} refused"),
    ("float32", "computed in float32"),
    ("zero_stale_grads", "left-over gradients zeroed before each backward"),
)
"""The overrides of a decision in words, in the order they are told."""


def overrides_text(overrides: Any) -> str:
    """Overrides in words; empty if there are none."""
    if not isinstance(overrides, Mapping):
        return ""
    texts = [text.format(_value(overrides[name])) for name, text in OVERRIDE_TEXTS if overrides.get(name)]
    return ", ".join(texts)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " and ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def refusal_sentence(count: int, *, applied: bool = True) -> str:
    """What refusing an update means."""
    if not applied:
        return "would have refused the update" if count == 1 else f"would have refused {count} updates"
    if count == 1:
        return "refused the update: weights and optimizer state are unchanged"
    return f"refused {count} updates: none of them changed weights or optimizer state"


def refusal_outcome(count: int, loss: float, *, consecutive: bool = True) -> str:
    """That updates are applied again after `count` were refused."""
    each = "consecutive updates" if consecutive else "updates"
    summary = f"{count} {each} were refused" if count > 1 else "the refusal helped"
    return f"{summary}: updates are applied again, the loss is {loss:.4g}"


def decision_sentence(decision: Mapping[str, Any]) -> str:
    """A decision that is neither a refusal nor a rewind that was carried out."""
    action, reason = str(decision.get("action", "")), str(decision.get("reason") or "")
    remedy = str(decision.get("remedy") or "")
    if not decision.get("applied", True):
        return f"would have done: {_would(action, remedy)}"
    if action == Action.RELAX and decision.get("cause") == Cause.OUT_OF_MEMORY:
        return "computed in larger pieces again"
    overrides = overrides_text(decision.get("overrides"))
    sentences = {
        Action.REDUCE_MEMORY.value: "computed the same updates in smaller pieces",
        Action.STOP.value: "stopped the run",
        Action.REWIND.value: f"decided to go back to the last good state, {remedy or 'to be safe'}",
        Action.CONSTRAIN.value: "continued " + (remedy or f"with {overrides or 'overrides'}"),
        Action.ACCEPT.value: "accepted it as the new normal, and refuses such updates no more",
        Action.RELAX.value: f"relaxed overrides; still in force: {overrides}" if overrides else "lifted all overrides",
    }
    return sentences.get(action, f"{action}: {reason}" if reason else action)


def _would(action: str, remedy: str) -> str:
    if action == Action.REWIND:
        return f"go back to the last good state, {remedy or 'to be safe'}"
    if action == Action.CONSTRAIN:
        return f"continue {remedy}".strip()
    others = {
        Action.REDUCE_MEMORY.value: "compute the same updates in smaller pieces",
        Action.STOP.value: "stop the run",
        Action.ACCEPT.value: "accept it as the new normal",
    }
    return others.get(action, action)


def rewound_sentence(decision: Mapping[str, Any], note: Mapping[str, Any]) -> str:
    """A rewind that was carried out: a trial may have trained the updates again."""
    values = note.get("values") or {}
    if "kept" in values:
        return str(note.get("detail") or f"trained {values['kept']} updates again")
    return f"rewound to step {values.get('step', '?')}, {decision.get('remedy') or 'to be safe'}"


def lost_text(lost: int | None, kept: int) -> str:
    """What a rewind cost."""
    if lost is None:
        return ""
    if lost == 0:
        return "no update lost" if kept else ""
    return f"{lost} update{'s' if lost > 1 else ''} lost"


def trial_constrained_sentence(trial: Mapping[str, Any], decision: Mapping[str, Any]) -> str:
    """A trial found the state of the run sound: only overrides were left of a decision to rewind."""
    overrides = overrides_text(decision.get("overrides"))
    kept = f"continued with {overrides}" if overrides else "continued unchanged"
    why = str(trial.get("detail") or "a trial found no harm").removesuffix(": it is left alone")
    return f"did not rewind, because {why}; {kept}"
