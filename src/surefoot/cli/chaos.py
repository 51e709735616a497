"""`surefoot bench chaos` on the console."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.chaos import main
from benchmarks.chaos.report import as_data, table, write
from surefoot.journal.output_files import check_output


def show(*, only: str, quick: bool, times: int | None, seed: int, page: Path | None, as_json: bool) -> int:
    """Try the faults and print the table; 1 when a run was lost."""
    try:
        if page is not None:
            check_output(page / "chaos.md", force=None)
        found = main(only=only, quick=quick, times=times, seed=seed, say=lambda line: print(line, file=sys.stderr))
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    print(json.dumps(as_data(found), indent=1) if as_json else table(found))
    if page is not None:
        options = [f"--only {only}"] if only else []
        options += ["--quick"] * quick + ([] if times is None else [f"--times {times}"])
        print(f"written: {write(found, page, ' '.join(['surefoot bench chaos', *options]))}", file=sys.stderr)
    return 1 if any(t.lost for t in found) else 0
