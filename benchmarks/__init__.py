"""Benchmarks behind every number in the documentation; run them with `surefoot bench` in a checkout."""
