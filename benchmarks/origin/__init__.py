"""How often `surefoot.locate` names the right module, operation and samples, on planted non-finite values."""
