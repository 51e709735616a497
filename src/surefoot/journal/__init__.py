"""The append-only truth of a run: a writer that never raises into training, and a reader for everybody else.

| file | what it does |
|---|---|
| `writer.py` | `Journal`: what training calls |
| `inbox.py`, `worker.py` | the queue and the thread between training and the disk |
| `scribe.py` | rows and events to bytes in the right files |
| `opening.py` | `run.json`, and what an earlier attach left behind |
| `lock.py` | one live writer per run directory, also across hosts |
| `append.py` | files that only grow |
| `signals.py` | fixed-width binary rows behind a JSON header |
| `segments.py` | which signals file comes after which |
| `layers.py` | per-layer rows in segments that are thinned as they age |
| `thinning.py` | what to thin next, and how |
| `strictjson.py` | valid JSON for any value |
| `reader.py`, `columns.py` | `read(run_dir)` and the mappings it hands out |
"""

from __future__ import annotations

from surefoot.journal.columns import Layers, LayerStats, Scalars
from surefoot.journal.lock import RunDirectoryInUse
from surefoot.journal.reader import Run, read
from surefoot.journal.writer import Journal, JournalLimits

__all__ = ["Journal", "LayerStats", "Layers", "JournalLimits", "Run", "RunDirectoryInUse", "Scalars", "read"]
