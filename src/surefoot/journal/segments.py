"""Names and order of signals files: `scalars-000000.bin`, `layers-000004.bin`, merged `layers-000000-000003.bin`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from surefoot.journal.row_file import BadHeader, RowFile, RowHeader, file_size, read_header

_NAME = re.compile(r"(scalars|layers)-(\d{6,18})(?:-(\d{6,18}))?\.bin")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file, which holds the segment numbers `first` to `last`."""

    path: Path
    kind: str
    first: int
    last: int


def make_segment(folder: Path, kind: str, first: int, last: int | None = None) -> Segment:
    last = first if last is None else last
    name = f"{kind}-{first:06d}" + ("" if last == first else f"-{last:06d}") + ".bin"
    return Segment(folder / name, kind, first, last)


def list_segments(folder: Path, kind: str) -> list[Segment]:
    """The files of one kind, oldest first, without those whose rows are also in a merged one."""
    return _list_with_merged(folder, kind)[0]


def remove_leftovers(folder: Path) -> None:
    """Remove files left behind by a kill in the middle of thinning; for the writer only."""
    for segment in _list_with_merged(folder, "layers")[1]:
        segment.path.unlink(missing_ok=True)
    for draft in folder.glob("*.bin.tmp"):
        draft.unlink(missing_ok=True)


def open_segment(folder: Path, header: RowHeader, *, max_rows: int | None = None) -> tuple[Segment, RowFile]:
    """Continue the newest file if it has the same columns and fewer than `max_rows` rows, else start the next one."""
    existing = list_segments(folder, header.kind)
    if existing:
        newest = existing[-1]
        if newest.first == newest.last and _same_columns(newest.path, header):
            file = RowFile(newest.path, header)
            if max_rows is None or file.rows < max_rows:
                return newest, file
            file.close()
    segment = make_segment(folder, header.kind, existing[-1].last + 1 if existing else 0)
    return segment, RowFile(segment.path, header)


def _same_columns(path: Path, header: RowHeader) -> bool:
    try:
        return file_size(path) == 0 or read_header(path)[0] == header
    except BadHeader:
        return False


def _list_with_merged(folder: Path, kind: str) -> tuple[list[Segment], list[Segment]]:
    """The current files of one kind, and those already merged into another, which only a kill leaves behind."""
    segments = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and match[1] == kind:
            segments.append(Segment(path, kind, int(match[2]), int(match[3] or match[2])))
    current: list[Segment] = []
    merged: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (segment.first, -segment.last)):  # merged ones before sources
        (merged if current and segment.last <= current[-1].last else current).append(segment)
    return current, merged
