"""Finds the runs in a table and the symptoms of trouble in their curves."""
