"""The append-only record of a run: a writer that never raises into training, and a reader for everything else.

| file | contents |
|---|---|
| `writer.py` | `Journal`, which training calls, the queue behind it, and the thread that writes to disk |
| `row_writer.py` | rows and events to bytes in the right files; segments of per-layer rows |
| `thinning.py` | which old per-layer rows to drop next, and how |
| `pyramid.py`, `pyramid_writer.py`, `pyramid_reader.py` | rows summed up in buckets of attempts, for `surefoot watch` |
| `segments.py` | names and order of the signals files |
| `row_file.py` | fixed-width binary rows behind a JSON header; files that only grow, and atomic replacement |
| `run_json.py` | `run.json`, and the last attempt of an earlier attach |
| `lock.py` | one live writer per run directory, also across hosts |
| `strict_json.py` | valid JSON for any value |
| `reader.py`, `columns.py` | `read(run_dir)` and the mappings it returns |
| `aliases.py` | names that earlier versions wrote |
| `output_files.py` | output files named by the user, never overwritten by accident |
"""

from __future__ import annotations

from surefoot.journal.columns import Layers, LayerStats, Scalars
from surefoot.journal.lock import RunDirectoryInUse
from surefoot.journal.reader import Run, read
from surefoot.journal.writer import Journal, JournalLimits

__all__ = ["Journal", "JournalLimits", "LayerStats", "Layers", "Run", "RunDirectoryInUse", "Scalars", "read"]
