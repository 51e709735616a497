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


def guessed_classes(value: float, settings: Mapping[str, float | str]) -> int | None:
    """The number of classes, known from the log or a usual one, at whose logarithm a loss is."""
    known = [int(count) for name in COUNT_SETTINGS if isinstance(count := settings.get(name), int | float) and count > 1]
    for count in (*known, *COMMON_CLASS_COUNTS, *COMMON_VOCABULARIES):
        if abs(value - math.log(count)) < LOG_CLASSES_TOLERANCE * math.log(count):
            return count
    return None
