"""Incident bundles: what is needed to replay an incident, on this machine or another."""
