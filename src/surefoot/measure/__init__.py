"""The only code that measures tensors: gradients, weights, and what the machine is doing."""
