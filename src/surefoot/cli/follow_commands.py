"""The options of `surefoot watch` and `surefoot alarms`, which follow a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WATCH = """Watch a run while it trains: verdict, loss, gradients, speed, memory, events, gradient flow by layer.

PATH is a run directory or a folder; without one, the newest run below the current folder is shown. Keys: l scale, \
g layers, e events, r other runs, ? help, q quit. Where the output is no terminal, one snapshot is printed.

Reads the run directory only: it works over ssh, for runs of other machines on a shared disk, and for runs that ended.

Exit codes: 0 fine; 1 the verdict is warning, failed or killed; 2 no run there, or bad usage.
"""
WATCH_EXAMPLES = """Examples:

surefoot watch

surefoot watch runs/a --once

surefoot watch runs --web

surefoot watch runs/a --static page.html
"""


def watch(
    path: Annotated[Path | None, typer.Argument(metavar="[RUN|FOLDER]", help="A run, or a folder with runs.")] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page on this machine's loopback address.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 chooses a free one.")] = 0,
    static: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the page, with its data, to this one HTML file.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the --static file even if surefoot did not write it.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON and exit.")] = False,
) -> None:
    from surefoot.cli.watch import WatchOptions, show

    options = WatchOptions(once=once, as_json=as_json, web=web, port=port, static=static, force=force)
    raise typer.Exit(show(path, options))


ALARMS = """Follow a run and send alarms: findings, changes, a stop, a crash, no step for 10 minutes.

It only reads the run directory, so it also works for a run that was started without alarms, and from another host. \
Receivers are those in SUREFOOT_ALARMS, or --to: a plain webhook (gets JSON), or anything that apprise knows (mail, \
Slack, ntfy, ...). A training sends its own alarms with surefoot.attach(..., alarms=...) or `alarms:` in a recipe.

Exit codes: 0 the run ended, or the test was sent; 1 the run failed or its process is gone, or the test was not sent; \
2 bad usage.
"""
ALARMS_EXAMPLES = """Examples:

SUREFOOT_ALARMS=https://example.com/hook surefoot alarms runs/a

surefoot alarms runs/a --to @address.txt --levels crash,stop --no-step 5

surefoot alarms --test --to mailto://user:password@example.com
"""


def alarms(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The run directory.")] = None,
    to: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="A receiver, or @FILE with one; may be repeated.")
    ] = None,
    levels: Annotated[
        str, typer.Option(help="Which alarms: all, or some of crash, stop, stalled, action, severe, finding, end.")
    ] = "",
    no_step: Annotated[
        float | None, typer.Option(min=0, help="Minutes without a step that are an alarm; 0: never.")
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Send one test alarm to each receiver.")] = False,
) -> None:
    from surefoot.cli.alarm_command import AlarmOptions, show

    options = AlarmOptions(to=tuple(to or ()), levels=levels, no_step=no_step, test=test)
    raise typer.Exit(show(run, options))
