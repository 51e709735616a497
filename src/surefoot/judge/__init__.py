"""Rows of numbers in, findings, diagnoses and decisions out; plain floats and numpy, no torch."""
