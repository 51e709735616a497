"""Console text of any trainer: what is a row, what its numbers are called, and where in the run it stands."""
