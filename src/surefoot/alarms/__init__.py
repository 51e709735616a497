"""Alarms to people: what happens to a run, sent from a process of its own; no torch."""
