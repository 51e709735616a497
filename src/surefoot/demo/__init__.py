"""The demo: one recipe trained without faults, with three planted faults, and with the faults and surefoot."""

from surefoot.demo.present import show

__all__ = ["show"]
