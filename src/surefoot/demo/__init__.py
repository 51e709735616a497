"""Three runs of one recipe: undisturbed, broken by three planted faults, and kept on its feet by surefoot."""

from surefoot.demo.stage import show

__all__ = ["show"]
