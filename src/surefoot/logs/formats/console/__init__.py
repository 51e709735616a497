"""Console output of any trainer: which lines are rows, what their numbers are called, and at which step they are."""
