"""Checks a training loop before its first step: `surefoot.preflight(model, optimizer, batches, step_fn)`.

preflight            the function; the order of the facts; keeps the run as it was
findings             PreflightFinding and PreflightReport, as text and JSON
context              what every fact is given: model, optimizers, batches, observations, the short training
observe              one call of step_fn, seen from outside: calls of the model and of loss functions
short_training       some real updates, and what they did to losses, gradients and weights
*_facts              the facts, by topic; each yields findings and nothing else
"""
