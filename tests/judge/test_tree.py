"""Every path through the decision tree."""

from __future__ import annotations

import itertools

import pytest

from surefoot.judge.decision_tree import QUESTIONS, SHAPES, Facts, walk
from surefoot.judge.thresholds import SETTLED_UPDATES
from surefoot.records import Pattern

ANSWERS = list(itertools.product([True, False], repeat=4))
ADVICE_FRAGMENTS = (
    ("initialisation and warmup", ""),
    ("loss scaling and dtype casts", "overflow"),
    ("Lower the learning rate or clip harder", "data and the loss function"),
    ("with adjusted settings", "from the beginning with conservative settings"),
)


def facts(
    early: bool, mixed: bool, large: bool, good: bool, *, scaled: bool = True, pattern: Pattern = Pattern.NONE
) -> Facts:
    """Facts that lead to these answers."""
    return Facts(
        step=SETTLED_UPDATES - 1 if early else SETTLED_UPDATES,
        mixed_precision=mixed,
        scaled=scaled and mixed,
        large_gradients=large,
        good_state=good,
        pattern=pattern,
    )


@pytest.mark.parametrize("answers", ANSWERS)
def test_every_path_through_the_tree(answers: tuple[bool, bool, bool, bool]) -> None:
    path = walk(facts(*answers))
    assert tuple(is_yes for _, is_yes in path.steps) == answers
    assert [question for question, _ in path.steps] == [question.text for question in QUESTIONS]
    expected = [
        fragment
        for (yes, no), is_yes in zip(ADVICE_FRAGMENTS, answers, strict=True)
        if (fragment := yes if is_yes else no)
    ]
    assert len(path.advice) == len(expected)
    for fragment, advice in zip(expected, path.advice, strict=True):
        assert fragment in advice


def test_every_path_has_different_advice() -> None:
    assert len({walk(facts(*answers)).advice for answers in ANSWERS}) == 16


def test_path_as_one_line() -> None:
    assert walk(facts(False, True, False, True)).as_text() == (
        "within the first 1000 steps: no; mixed precision: yes; unusually large gradients: no; "
        "a good state to go back to: yes"
    )


def test_loss_scaling_is_advised_only_where_it_is_missing() -> None:
    missing = walk(facts(False, True, True, True, scaled=False)).advice
    assert missing[1].startswith("Turn loss scaling on if this is float16")
    assert len(walk(facts(False, True, True, True, scaled=True)).advice) == len(missing) - 1
    assert len(walk(facts(False, False, True, True, scaled=False)).advice) == len(missing) - 1


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("answers", ANSWERS)
def test_pattern_adds_its_own_advice(answers: tuple[bool, bool, bool, bool], pattern: Pattern) -> None:
    plain, shaped = walk(facts(*answers)), walk(facts(*answers, pattern=pattern))
    assert shaped.steps == plain.steps
    more = (SHAPES[pattern],) if pattern in SHAPES else ()
    assert shaped.advice == (*plain.advice[:-1], *more, plain.advice[-1])
