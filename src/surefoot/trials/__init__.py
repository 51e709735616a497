"""Trials: short runs from a kept snapshot over kept batches with one thing changed, which decide what helps."""
