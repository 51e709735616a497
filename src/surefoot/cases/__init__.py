"""Incidents of earlier runs: read from run directories or a case library, and compared with a new one. No torch."""
