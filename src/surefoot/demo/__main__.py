"""`python -m surefoot.demo`."""

import typer

from surefoot.demo.stage import show

typer.run(show)
