"""`python -m surefoot.demo`."""

import typer

from surefoot.demo.present import show

typer.run(show)
