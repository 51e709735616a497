"""Every cause has a description, and its remedies include those of the design notes."""

from __future__ import annotations

import pytest

from surefoot.judge.cause_catalog import CAUSES
from surefoot.records import Cause

VERBS = (
    "Add Check Clamp Clip Compare Compute Cut Divide Find Get Give Go Group Initialise Keep Look Lower Normalise Plot "
    "Prepare Put Raise Remove Replace Reset Resume Run Set Shuffle Store Take Train Turn Unscale Use Warm"
)


def is_short_sentence(text: str) -> bool:
    """One sentence that fits on a line of a console."""
    return text[0].isupper() and text.endswith(".") and ". " not in text and len(text.split()) > 4 and len(text) <= 110


def test_every_cause_has_a_description() -> None:
    assert set(CAUSES) == set(Cause)


@pytest.mark.parametrize("cause", Cause)
def test_descriptions_are_short_single_sentences(cause: Cause) -> None:
    about = CAUSES[cause]
    assert is_short_sentence(about.sentence)
    assert about.sentence.split()[0] not in VERBS.split()
    assert 2 <= len(about.remedies) <= 4
    for remedy in about.remedies:
        assert len(remedy) <= 110
        assert remedy.endswith(".")
        assert ". " not in remedy
        assert remedy.split()[0] in VERBS.split(), "a remedy starts with a verb"


def test_no_text_is_repeated() -> None:
    sentences = [about.sentence for about in CAUSES.values()]
    assert len(set(sentences)) == len(sentences)
    for about in CAUSES.values():
        assert len(set(about.remedies)) == len(about.remedies)
    assert len({about.remedies for about in CAUSES.values()}) == len(CAUSES)


NOTES = {
    Cause.OUT_OF_MEMORY: ("smaller batch", "shorter sequence", "accumulation", "activation checkpointing"),
    Cause.LEARNING_RATE: ("lower the learning rate", "clip"),
    Cause.EXPLODING_GRADIENT: ("2-3x the normal maximum norm", "lower the learning rate", "after unscaling", "5-10"),
    Cause.DATA_STARVATION: ("more workers", "larger batch", "mixed precision", "devices"),
    Cause.PLATEAU: ("data", "learning rate"),
    Cause.PRECISION_OVERFLOW: ("lower the learning rate", "clip", "bfloat16", "loss scaling", "casts", "float32"),
    Cause.OVERFITTING: ("fewer epochs", "dropout", "more data"),
    Cause.LOG_OF_ZERO: ("1e-8", "log", "division", "clamp", "softmax with the maximum subtracted"),
    Cause.INPUT_SCALE: ("[-1, 1]", "[0, 1]", "normalise", "black", "white"),
    Cause.INITIALISATION: ("xavier", "kaiming", "projection", "dimensions", "warm"),
    Cause.ATTENTION_MASK: ("mask", "padding", "length", "-inf", "too long"),
    Cause.ZERO_VARIANCE: ("epsilon",),
    Cause.BAD_BATCH: ("wrong label", "go on past the bad data", "every epoch or every shard"),
    Cause.ACCUMULATION: ("divide the loss", "fewer accumulation steps"),
    Cause.MOMENTUM: ("momentum",),
    Cause.OPTIMIZER_STATE: ("reset the optimizer's state",),
    Cause.OSCILLATION: ("lower the learning rate", "batches are more alike", "schedule", "optimizer's state"),
    Cause.UNKNOWN: ("half the learning rate",),
}
"""Words that the design notes require in the remedies."""


@pytest.mark.parametrize(("cause", "expected"), NOTES.items())
def test_remedies_cover_the_design_notes(cause: Cause, expected: tuple[str, ...]) -> None:
    remedies = " ".join(CAUSES[cause].remedies).lower()
    assert [words for words in expected if words not in remedies] == []
