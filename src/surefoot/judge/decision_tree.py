"""Four questions about a failed run, asked in order, so that the user sees how the advice came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from surefoot.judge.thresholds import SETTLED_UPDATES
from surefoot.records import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the questions look at."""

    step: int
    """Updates applied before the incident."""
    mixed_precision: bool
    scaled: bool
    """Whether loss scaling is on."""
    large_gradients: bool
    """Whether gradients were large compared with the run's own baseline."""
    good_state: bool
    """Whether there is a good state to rewind to."""
    pattern: Pattern = Pattern.NONE


@dataclass(frozen=True, slots=True)
class Path:
    """The questions with their answers, and the advice they led to."""

    steps: tuple[tuple[str, bool], ...]
    advice: tuple[str, ...]

    def as_text(self) -> str:
        """The questions with their answers, in one line."""
        return "; ".join(f"{question}: {'yes' if answer else 'no'}" for question, answer in self.steps)


SHAPES: Mapping[Pattern, str] = MappingProxyType(
    {
        Pattern.NONFINITE: "Look for log of zero, division by zero and overflow first: nothing rose beforehand.",
        Pattern.JUMP: "Look at the last batch first: a single jump, as from a bad sample or an overflow.",
        Pattern.EXPONENTIAL: "Look at the learning rate, accumulation and momentum first: it grew step by step.",
        Pattern.OSCILLATING: "Look at the optimizer's state, the schedule and the mix of batches first: it oscillated.",
        Pattern.OVERFLOW_SKIPS: "Look at the loss scale first: it kept falling.",
    }
)
"""Where to look first, by the pattern of the loss."""


def _nothing(_: Facts) -> str:
    return ""


def _unscaled(facts: Facts) -> str:
    """Float16 needs loss scaling; bfloat16 does not."""
    off = facts.mixed_precision and not facts.scaled
    return "Turn loss scaling on if this is float16: it is off, and only bfloat16 works without it." if off else ""


def _shape(facts: Facts) -> str:
    return SHAPES.get(facts.pattern, "")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the advice for either answer, and extra advice from the facts."""

    text: str
    applies: Callable[[Facts], bool]
    yes: str
    no: str = ""
    extra: Callable[[Facts], str] = _nothing


QUESTIONS: tuple[Question, ...] = (
    Question(
        f"within the first {SETTLED_UPDATES} steps",
        lambda facts: facts.step < SETTLED_UPDATES,
        yes="Check initialisation and warmup.",
    ),
    Question(
        "mixed precision",
        lambda facts: facts.mixed_precision,
        yes="Check loss scaling and dtype casts.",
        no="Check for overflow in the model's own arithmetic.",
        extra=_unscaled,
    ),
    Question(
        "unusually large gradients",
        lambda facts: facts.large_gradients,
        yes="Lower the learning rate or clip harder.",
        no="Check the data and the loss function.",
        extra=_shape,
    ),
    Question(
        "a good state to go back to",
        lambda facts: facts.good_state,
        yes="Resume from the last good state with adjusted settings.",
        no="Restart from the beginning with conservative settings.",
    ),
)
"""Asked from top to bottom: no answer rules out another question."""


def walk(facts: Facts) -> Path:
    """Ask every question about the facts.

    >>> facts = Facts(step=5, mixed_precision=False, scaled=False, large_gradients=True, good_state=True)
    >>> walk(facts).advice[0]
    'Check initialisation and warmup.'
    """
    steps: list[tuple[str, bool]] = []
    advice: list[str] = []
    for question in QUESTIONS:
        answer = question.applies(facts)
        steps.append((question.text, answer))
        advice += [question.yes if answer else question.no, question.extra(facts)]
    return Path(tuple(steps), tuple(filter(None, advice)))
