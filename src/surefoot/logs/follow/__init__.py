"""Follows a log while it grows and reports trouble as it appears."""
