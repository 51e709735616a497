"""The error of a plan that cannot be made."""

from __future__ import annotations


class PlanError(ValueError):
    """Options or a model that cannot be planned; the message says what was wrong and the way out."""
