"""From findings to causes: the shape of the trouble, and what it speaks for."""
