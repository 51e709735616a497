"""Finds the operation that made a non-finite value, and the samples it came from."""
