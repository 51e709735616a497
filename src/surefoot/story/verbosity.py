"""How much surefoot logs about what it does: `attach(..., verbosity=)`, or SUREFOOT_VERBOSITY in the environment."""

from __future__ import annotations

import logging
import os
from enum import StrEnum

VARIABLE = "SUREFOOT_VERBOSITY"


class Verbosity(StrEnum):
    """What is logged about incidents; what is not logged is logged at the level DEBUG."""

    QUIET = "quiet"
    """Only a stop, and what did not help."""
    NORMAL = "normal"
    """Each incident once, as a short block."""
    VERBOSE = "verbose"
    """Also every refusal, decision, trial and outcome, as it happens."""

    def level_of_detail(self, level: int) -> int:
        """The level of a line about a single event, which the block of its incident tells too."""
        return level if self is Verbosity.VERBOSE else logging.DEBUG


def read_verbosity(value: str) -> Verbosity:
    """The verbosity with this name, unless the environment names another; raises ValueError for an unknown name."""
    names = " or ".join(repr(v.value) for v in Verbosity)
    given = os.environ.get(VARIABLE, "")
    if given and given not in tuple(Verbosity):
        raise ValueError(f"{VARIABLE}={given} in the environment is unknown; set it to {names}.")
    if value not in tuple(Verbosity):
        raise ValueError(f"verbosity must be {names}, not {value!r}.")
    return Verbosity(given or value)
