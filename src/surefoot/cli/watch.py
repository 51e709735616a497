"""`surefoot watch`: shows a run while it trains, in the terminal or on a local page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

_TROUBLE, _USAGE, _INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of the command."""

    once: bool = False
    as_json: bool = False
    web: bool = False
    port: int = 0
    static: Path | None = None
    force: bool = False


def show(path: Path | None, options: WatchOptions) -> int:
    """Watch; every error is one message and exit code 2."""
    from surefoot.journal.output_files import OutputRefused
    from surefoot.watch.find_runs import NoRunFound

    try:
        return _show(path, options)
    except (NoRunFound, OutputRefused) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        return _refuse(f"{error.filename or path}: {error.strerror or error}")


def _show(path: Path | None, options: WatchOptions) -> int:
    from surefoot.watch.find_runs import choose_target

    if options.web and (options.once or options.as_json or options.static):
        return _refuse("--web serves a page until it is stopped; leave out --once, --json and --static")
    target = choose_target(path)
    if options.static is not None:
        from surefoot.watch.frozen_page import freeze

        freeze(target.first.path, options.static, force=options.force)
        typer.echo(f"page written to {options.static}", err=True)
        return 0
    if options.web:
        from surefoot.watch.web_server import serve

        return serve(target, port=options.port)
    from surefoot.watch import terminal

    if options.as_json:
        return terminal.print_json(target)
    if options.once or not sys.stdout.isatty() or not sys.stdin.isatty():
        return terminal.print_once(target)
    return terminal.watch_terminal(target)


def _refuse(message: str) -> int:
    typer.echo(f"surefoot watch: {message}", err=True)
    return _USAGE
