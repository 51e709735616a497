"""Measures gradients, weights, batches and the machine; the only package that reads tensor values for statistics."""
