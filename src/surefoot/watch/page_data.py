"""What the web page asks for: the summary of a run, its curves and its gradient flow, as plain values.

Arrays are sent as base64 of little-endian numbers: small, exact, and NaN stays NaN.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from surefoot.journal.pyramid import MAX, MEAN, MIN, NONFINITE, SCALAR_COLUMNS
from surefoot.journal.strict_json import plain
from surefoot.watch.layer_flow import flow_grid
from surefoot.watch.live_run import LiveRun
from surefoot.watch.terminal import as_json

CURVES = (
    "loss", "eval_loss", "norm", "norm_limit", "lr", "loss_scale", "update_ratio", "seconds", "data_wait", "samples",
    "tokens", "memory", "memory_peak", "utilisation", "refused",
)  # fmt: skip
MAX_POINTS = 8000
MAX_BUCKETS = 1000
_MAX_LINES = 2000
_FIELDS = ("name", "batch", "torch", "host", "device")


def summary(run: LiveRun, *, lines_after: int = 0) -> dict[str, Any]:
    """Everything but the arrays; `lines` holds the event lines from number `lines_after` on."""
    lines = run.lines[max(0, lines_after, len(run.lines) - _MAX_LINES) :]
    values = as_json(run)
    values.pop("events")
    return values | {
        "name": run.name,
        "version": run.version,
        "last_attempt": run.scalars.last_attempt,
        "lines": [plain(asdict(line)) for line in lines],
        "lines_total": len(run.lines),
        "undone": run.undone(),
        "facts": _facts(run),
    }


def _facts(run: LiveRun) -> list[list[str]]:
    """A few lines from run.json, as text."""
    config, environment = run.info.get("config"), run.info.get("environment")
    config = config if isinstance(config, dict) else {}
    environment = environment if isinstance(environment, dict) else {}
    found = [
        ("model", config.get("model")),
        ("parameters", config.get("parameters")),
        ("processes", config.get("processes")),
        ("batch", config.get("effective_batch")),
        ("device", environment.get("device")),
        ("host", environment.get("host")),
        ("torch", environment.get("torch")),
    ]
    return [[name, f"{value:,}" if isinstance(value, int) else str(value)[:120]] for name, value in found if value]


def curves(run: LiveRun, first: int, last: int, points: int, names: Sequence[str] = CURVES) -> dict[str, Any]:
    """Minimum, maximum, mean and non-finite count of each curve in the attempts `first` to `last`."""
    first, last = max(0, first), min(last, run.scalars.last_attempt)
    columns = [SCALAR_COLUMNS.index(name) for name in names]
    entries = run.scalars.curve(columns, first, last, max(2, min(points, MAX_POINTS)))
    stats = entries["stats"]
    series: dict[str, Any] = {}
    for at, name in enumerate(names):
        values = stats[:, at]
        bad = values[:, NONFINITE]
        if not (np.isfinite(values[:, MEAN]).any() or bad.any()):
            continue
        series[name] = {"mean": _pack(values[:, MEAN])}
        if (values[:, MIN] != values[:, MAX])[np.isfinite(values[:, MEAN])].any():
            series[name] |= {"min": _pack(values[:, MIN]), "max": _pack(values[:, MAX])}
        if bad.any():
            series[name]["nonfinite"] = _pack(bad)
    return {
        "version": run.version,
        "first": first,
        "last": int(entries["attempt"][-1]) if len(entries) else first - 1,
        "attempts": _pack(entries["attempt"].astype("<f8")),
        "firsts": _pack(entries["first"].astype("<f8")),
        "steps": _pack(entries["step"].astype("<f8")),
        "rows": _pack(entries["rows"].astype("<f4")),
        "series": series,
    }


def flow(run: LiveRun, first: int, last: int, buckets: int) -> dict[str, Any]:
    """The grid of layers and attempts: a byte each, 0 for no value, 255 for non-finite, 1 to 254 on a log scale."""
    reader = run.layers
    if not reader.names:
        return {"names": [], "version": run.version}
    grid = flow_grid(reader, max(0, first), min(last, reader.last_attempt), max(2, min(buckets, MAX_BUCKETS)))
    with np.errstate(all="ignore"):
        logs = np.log10(np.where(grid.norms > 0, grid.norms, np.nan))
    known = logs[np.isfinite(logs)]
    low, high = (np.floor(known.min()), np.ceil(known.max())) if len(known) else (0.0, 1.0)
    high = max(high, low + 1)
    cells = np.where(np.isfinite(logs), 1 + np.round((logs - low) / (high - low) * 253), 0)
    cells[grid.nonfinite > 0] = 255
    return {
        "version": run.version,
        "names": [name[:200] for name in reader.names],
        "firsts": _pack(grid.firsts.astype("<f8")),
        "lasts": _pack(grid.lasts.astype("<f8")),
        "low": float(low),
        "high": float(high),
        "cells": _pack(cells.astype(np.uint8)),
    }


def _pack(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
