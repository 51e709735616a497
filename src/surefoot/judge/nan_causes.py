"""What it speaks for that a value which is not finite first came up in one place of a model, and not in another."""

from __future__ import annotations

from surefoot.judge.param_roles import Role, Trouble, role_of, word_of
from surefoot.records import Cause

ARITHMETIC = ("Linear", "Conv", "Embedding", "Bilinear", "LSTM", "GRU", "RNN")
"""Modules that only multiply and add: with sound inputs and weights it is their size that is wrong."""


def cause_of(module: str, kind: str, *, inputs: bool, weights: bool) -> tuple[Cause, str]:
    """The cause, and a sentence that says so.

    >>> cause_of("blocks.0.attention", "Attention", inputs=False, weights=False)[0]
    <Cause.ATTENTION_MASK: 'attention_mask'>
    """
    where = f"{module} ({kind})" if module else f"the model ({kind})"
    if inputs:
        return Cause.BAD_BATCH, "what came into the model was not finite already"
    if weights:
        return Cause.WEIGHTS_DAMAGED, f"the weights of {where} are not finite"
    if not kind:
        return Cause.LOG_OF_ZERO, "all that came out of the model was sound, and the loss was not"
    if kind.startswith(ARITHMETIC):
        return Cause.PRECISION_OVERFLOW, f"sound values went into {where}, and grew beyond all bounds there"
    role = Role.ATTENTION if "Softmax" in kind else role_of(module, kind)
    told = word_of(role, Trouble.NONFINITE)
    if told is None:
        return Cause.UNKNOWN, f"sound values went into {where}, and others came out"
    return told[0], f"{told[1]} It began in {where}."
