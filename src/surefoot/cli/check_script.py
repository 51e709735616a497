"""`surefoot check script.py`: runs a script that attaches up to its first updates, and checks its loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from surefoot.journal.strict_json import dumps
from surefoot.train import exit_codes

NO_REPORT = (
    "surefoot check: {script} ended with exit code {code} before surefoot.attach had seen {updates} updates. It must "
    "call surefoot.attach(model, optimizer, step_fn=...) and train; arguments of the script go after --."
)


def show_script(script: str, arguments: Sequence[str], *, as_json: bool) -> int:
    """Run the script until the checks are made; 1 when something is wrong for sure."""
    from surefoot.guard.early_checks import BATCHES, REPORT_VARIABLE
    from surefoot.preflight_checks.findings import PreflightReport

    if not Path(script).is_file():
        typer.echo(f"surefoot check: there is no file {script}", err=True)
        return exit_codes.USAGE
    with tempfile.TemporaryDirectory(prefix="surefoot-check-") as folder:
        path = Path(folder) / "report.json"
        environment = {**os.environ, REPORT_VARIABLE: str(path)}
        process = subprocess.run(
            [sys.executable, script, *arguments], env=environment, stdout=sys.stderr.fileno(), check=False
        )
        if not path.is_file():
            typer.echo(NO_REPORT.format(script=script, code=process.returncode, updates=BATCHES), err=True)
            return exit_codes.FAILED
        values = json.loads(path.read_text(encoding="utf-8"))
    report = PreflightReport.from_json(values)
    typer.echo(dumps(values) if as_json else str(report))
    return exit_codes.FAILED if report.failed else exit_codes.DONE
