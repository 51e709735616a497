"""Everything that `surefoot.attach` wires to one model and its optimizers."""
