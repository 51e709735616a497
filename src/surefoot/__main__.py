"""`python -m surefoot`."""

from __future__ import annotations

from surefoot.cli import main

main()
