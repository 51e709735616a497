"""The order of signals files: `scalars-000000.bin`, `layers-000004.bin`, and merged, `layers-000000-000003.bin`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from surefoot.journal.append import file_size
from surefoot.journal.row_file import BadHeader, RowHeader, RowFile, read_header

_NAME = re.compile(r"(scalars|layers)-(\d{6,18})(?:-(\d{6,18}))?\.bin")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file, standing for the numbers `first` to `last`."""

    path: Path
    kind: str
    first: int
    last: int


def make_segment(folder: Path, kind: str, first: int, last: int | None = None) -> Segment:
    last = first if last is None else last
    name = f"{kind}-{first:06d}" + ("" if last == first else f"-{last:06d}") + ".bin"
    return Segment(folder / name, kind, first, last)


def list_segments(folder: Path, kind: str) -> list[Segment]:
    """The files of one kind, oldest first, without those whose rows also stand in a merged one."""
    return _list_with_merged(folder, kind)[0]


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of thinning left behind; for the writer only."""
    for one in _list_with_merged(folder, "layers")[1]:
        one.path.unlink(missing_ok=True)
    for draft in folder.glob("*.bin.tmp"):
        draft.unlink(missing_ok=True)


def open_segment(folder: Path, header: RowHeader, *, max_rows: int | None = None) -> tuple[Segment, RowFile]:
    """Go on in the newest file if it holds the same columns and fewer than `most` rows, else begin the next one."""
    existing = list_segments(folder, header.kind)
    if existing:
        newest = existing[-1]
        if newest.first == newest.last and _continues(newest.path, header):
            file = RowFile(newest.path, header)
            if max_rows is None or file.rows < max_rows:
                return newest, file
            file.close()
    fresh = make_segment(folder, header.kind, existing[-1].last + 1 if existing else 0)
    return fresh, RowFile(fresh.path, header)


def _continues(path: Path, header: RowHeader) -> bool:
    try:
        return file_size(path) == 0 or read_header(path)[0] == header
    except BadHeader:
        return False


def _list_with_merged(folder: Path, kind: str) -> tuple[list[Segment], list[Segment]]:
    """The files of one kind that count, and those a merged one was made from, which only a kill leaves."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and match[1] == kind:
            found.append(Segment(path, kind, int(match[2]), int(match[3] or match[2])))
    kept: list[Segment] = []
    merged: list[Segment] = []
    for one in sorted(found, key=lambda one: (one.first, -one.last)):  # a merged one before its parts
        (merged if kept and one.last <= kept[-1].last else kept).append(one)
    return kept, merged
