"""`surefoot report`: the options of the command, and writing the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_REPORT = """Write a report of a run to keep: what happened, why, what was done, curves, checklists; needs no torch.

RUN is a run directory: of a finished, killed, failed or running run. The report is one HTML page without scripts or \
network, or with --markdown a text for a pull request. It replaces an earlier report, and no other file.

Exit codes: 0 written; 2 not a run, or bad usage.
"""
_REPORT_EXAMPLES = """Examples:

surefoot report runs/lm-tiny

surefoot report runs/lm-tiny --markdown --out report.md

surefoot report runs/lm-tiny --markdown --out - | gh pr comment --body-file -
"""


def add_report_command(app: typer.Typer) -> None:
    """Add the command to the application."""
    short = "Write a report of a run to keep, as HTML or Markdown."
    app.command(help=_REPORT, epilog=_REPORT_EXAMPLES, short_help=short)(report)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write, or -. Default: report.html or report.md here."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of HTML.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that surefoot did not write.")] = False,
) -> None:
    from surefoot.cli.diagnose import with_exit_code

    raise typer.Exit(with_exit_code(lambda: write_report(run, out, markdown=markdown, force=force), command="report"))


def write_report(run: Path, out: Path | None, *, markdown: bool, force: bool) -> int:
    """Write the report; returns the exit code."""
    from surefoot.cli.diagnose import FINE, print_notice, print_text
    from surefoot.journal.output_files import check_output
    from surefoot.logs.report.html_page import save_page
    from surefoot.report.report_markdown import as_markdown
    from surefoot.report.report_page import as_page
    from surefoot.report.run_report import make_report

    path = out or Path("report.md" if markdown else "report.html")
    if str(path) != "-":
        check_output(path, inputs=[str(run)], force=force)
    report = make_report(run)
    text = as_markdown(report) if markdown else as_page(report)
    if str(path) == "-":
        print_text(text)
        return FINE
    save_page(text, path, inputs=[str(run)], force=force, option="--out")
    print_notice(f"{report.verdict.upper()}  {report.sentence}\nreport written to {path}")
    return FINE
