"""Where a run reports to besides its journal: the console, TensorBoard and Weights & Biases; first rank only."""
