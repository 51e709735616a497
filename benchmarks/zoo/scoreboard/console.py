"""Runs the zoo with a progress bar and prints its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.worker_pool import available_cores
from benchmarks.zoo import scoreboard
from benchmarks.zoo.scoreboard.tables import as_data, tables
from surefoot.journal.output_files import check_output


def show(selection: scoreboard.Selection, *, jobs: int, out: Path, page: Path | None, as_json: bool) -> int:
    """Run the selection and print its tables; 1 when a scenario did not end as stated."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TimeRemainingColumn(elapsed_when_finished=True),)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("zoo", total=None)

        def report(done: int, total: int, last: str) -> None:
            bar.update(task, completed=done, total=total, description=last[:60].ljust(60))
            if not console.is_terminal and done * 20 // total > (done - 1) * 20 // total:
                print(f"{done} of {total} runs done", file=sys.stderr, flush=True)

        try:
            if page is not None:
                check_output(page / "zoo.md", force=None)
            board = scoreboard.main(selection, folder=out, workers=jobs or available_cores(), progress=report)
        except ValueError as error:
            bar.stop()
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            bar.stop()
            print(f"interrupted; results are kept in {out}, run the same command to continue", file=sys.stderr)
            return 130
    print(json.dumps(as_data(board), indent=1) if as_json else tables(board))
    if page is not None:
        from benchmarks.zoo.scoreboard.page import write

        print(f"written: {write(board, page)}", file=sys.stderr)
    return 1 if board.not_as_stated else 0
