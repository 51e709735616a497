"""The loss of a model that guesses: the logarithm of the number of classes, or of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping

COMMON_CLASS_COUNTS = (2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000)
"""A loss at the logarithm of one of these means that the model guesses."""
COMMON_VOCABULARIES = (28996, 30522, 32000, 32768, 50257, 50304, 65536, 100277, 128256, 151936, 256000)
LOG_CLASSES_TOLERANCE = 0.004
"""Relative distance from that logarithm."""
COUNT_SETTINGS = ("vocab_size", "num_classes", "n_classes", "num_labels", "n_vocab")
"""Names under which a log may say how many classes there are."""
START_TOLERANCE = 0.05
"""A first loss this near to that logarithm makes a usual number of classes plausible: an untrained model guesses."""


def guessed_classes(value: float, settings: Mapping[str, float | str]) -> int | None:
    """The number of classes, known from the log or a usual one, at whose logarithm a loss is."""
    usual = (*_known_counts(settings), *COMMON_CLASS_COUNTS, *COMMON_VOCABULARIES)
    return next((count for count in usual if _is_at(value, count, LOG_CLASSES_TOLERANCE)), None)


def chance_classes(value: float, first: float, settings: Mapping[str, float | str]) -> int | None:
    """The same, for a run that may have learnt: a usual number counts only if the run began at its logarithm."""
    known = _known_counts(settings)
    if (count := next((count for count in known if _is_at(value, count, START_TOLERANCE)), None)) is not None:
        return count
    count = None if known else guessed_classes(value, settings)
    return count if count is not None and _is_at(first, count, START_TOLERANCE) else None


def _known_counts(settings: Mapping[str, float | str]) -> tuple[int, ...]:
    counts = (settings.get(name) for name in COUNT_SETTINGS)
    return tuple(int(count) for count in counts if isinstance(count, int | float) and count > 1)


def _is_at(value: float, count: int, tolerance: float) -> bool:
    return abs(value - math.log(count)) < tolerance * math.log(count)
