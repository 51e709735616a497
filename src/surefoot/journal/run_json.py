"""`run.json`, and how far an earlier attach came: read and written once, when a journal opens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.journal.row_file import BadHeader, file_size, load_rows, read_tail, write_atomically
from surefoot.journal.segments import list_segments
from surefoot.journal.strict_json import loads_object, plain
from surefoot.records import SCHEMA

RUN_JSON = "run.json"
SIGNALS_DIR = "signals"
_MAX_EARLIER = 20
_TAIL_ROWS = 4096
_TAIL_BYTES = 1 << 18


def events_filename(rank: int) -> str:
    return "events.jsonl" if rank == 0 else f"events-rank{rank}.jsonl"


def write_run_json(run_dir: Path, info: Mapping[str, Any]) -> None:
    """Write `run.json`; the content written by earlier attaches moves to its list `earlier`."""
    header = {
        "schema": SCHEMA,
        "surefoot": __version__,
        "started": time.time(),
        "earlier": _earlier(run_dir / RUN_JSON),
    }
    plain_info = plain(info)
    content = (plain_info if isinstance(plain_info, dict) else {"info": plain_info}) | header
    write_atomically(run_dir / RUN_JSON, json.dumps(content, allow_nan=False, indent=1).encode("ascii") + b"\n")


def _earlier(path: Path) -> list[Any]:
    if not path.exists():
        return []
    text = path.read_bytes()
    try:
        last = json.loads(text)
    except (ValueError, RecursionError):
        return [{"unreadable": text[: 1 << 16].decode("utf-8", "replace")}]
    before = last.pop("earlier", []) if isinstance(last, dict) else []
    return plain([*(before if isinstance(before, list) else [before]), last][-_MAX_EARLIER:])


def find_last_attempt(run_dir: Path) -> int:
    """The highest attempt in the rows and events of a run directory; -1 for none.

    Attempts only grow, so reading the ends of the files is enough, and opening a long run stays quick.
    """
    return max((*_row_attempts(run_dir / SIGNALS_DIR), *_event_attempts(run_dir / events_filename(0))), default=-1)


def _row_attempts(folder: Path) -> Iterator[int]:
    for kind, num_rows in (("scalars", _TAIL_ROWS), ("layers", 16)):
        for segment in reversed(list_segments(folder, kind)):
            try:
                attempts = load_rows(segment.path, last=num_rows)[1]["attempt"]
            except (BadHeader, FileNotFoundError):  # other ranks may read while rank 0 removes leftovers
                continue
            if len(attempts):
                yield int(attempts.max())
                break


def _event_attempts(path: Path) -> Iterator[int]:
    if file_size(path) == 0:
        return
    for line in read_tail(path, _TAIL_BYTES).split(b"\n"):
        attempt = (loads_object(line) or {}).get("attempt")
        if isinstance(attempt, int) and attempt < 1 << 62:
            yield attempt
