"""Detectors, grouped by what they look at; each is `update(row, layers) -> list[Finding]` with explicit state."""
