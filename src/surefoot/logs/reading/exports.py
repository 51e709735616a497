"""Exports of charts: columns that carry the name of a run, several runs side by side, and a band around each curve."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from surefoot.logs.table import LogTable

_BAND = ("__MIN", "__MAX")
_RUN_SEPARATOR = " - "


def split_by_run(table: LogTable) -> LogTable | list[LogTable]:
    """W&B writes `proud-sun-7 - train/loss`, and `__MIN` and `__MAX` twins: the twins go, each run is a table."""
    names = table.columns
    kept = [name for name in names if not (name.endswith(_BAND) and name[:-5] in names)]
    runs: dict[str, list[str]] = defaultdict(list)
    shared: list[str] = []
    for name in kept:
        run, apart, metric = name.rpartition(_RUN_SEPARATOR)
        runs[run].append(name) if apart and run.strip() and metric.strip() else shared.append(name)
    if not runs or (len(kept) == len(names) and len(shared) > 2):
        return table if len(kept) == len(names) else replace(table, columns={name: names[name] for name in kept})
    found = [_run_table(table, run, mine, shared) for run, mine in runs.items()]
    return found[0] if len(found) == 1 else found


def _run_table(table: LogTable, run: str, mine: list[str], shared: list[str]) -> LogTable:
    columns = {name: table.columns[name] for name in shared}
    columns |= {name.rpartition(_RUN_SEPARATOR)[2].strip(): table.columns[name] for name in mine}
    return replace(table, columns=columns, facts={**table.settings, "run": run.strip().strip('"')})
