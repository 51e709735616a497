"""Names that earlier versions wrote, and what they are called now: the one place that knows them.

Run directories and checkpoints of schema 1, and recipes of that time, are read through these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

COLUMNS = {
    "micro": "bad_microbatch",
    "micros": "num_microbatches",
    "bad_weights": "nonfinite_params",
    "bad_buffers": "nonfinite_buffers",
    "bad_buffer": "first_nonfinite_buffer",
    "unmoved": "unchanged_fraction",
    "left_over": "stale_grads",
    "clip_share": "clip_fraction",
    "clipped": "clip_factor",
    "input_spread": "input_std",
    "input_top": "input_absmax",
    "limit": "norm_limit",
}
"""Fields of `StepMetrics`."""
OVERRIDES = {
    "rate": "lr_factor",
    "rewarm": "rewarmup_steps",
    "rate_cap": "max_lr",
    "momentum_cap": "max_momentum",
    "empty": "zero_stale_grads",
}
"""Fields of `StepOverrides`."""
ACTIONS = {"restrain": "constrain", "loosen": "relax"}
DETECTORS = {"outlandish": "norm_outlier", "left_over": "stale_grads"}
EVENTS = {
    "decision": {
        "restraint": "overrides",
        "rung": "remedy",
        "before": "max_attempt",
        "dated": "onset_known",
        "reset": "reset_optimizer",
        "scale": "loss_scale",
    },
    "finding": {"grave": "severe"},
}
"""Fields of events, by their kind."""
POLICY = {
    "outlandish": "max_norm_ratio",
    "fade": "norm_max_decay",
    "limit": "max_consecutive_vetoes",
    "hold": "max_vetoes_waiting",
    "overflow_limit": "max_consecutive_overflows",
    "failures": "max_failed_actions",
    "actions": "max_actions",
    "probation": "healthy_steps_to_confirm",
    "loosen_after": "relax_after",
    "ceiling": "norm_ceiling",
    "strict": "tight_ceiling",
    "proof": "healthy_steps_to_trust",
    "sight": "thresholds",
    "machine_every": "system_every",
    "ring_every": "snapshot_every",
    "ring_size": "max_snapshots",
    "ring_reach": "snapshot_reach",
    "careful": "cautious_after_crash",
}
"""Fields of `Policy`, in `run.json` and in recipes."""
THRESHOLDS: dict[str, str] = {}
"""Fields of `Thresholds`."""


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The same values under the names of today; a value that has its new name already is kept."""
    return {names.get(name, name): value for name, value in values.items() if names.get(name) not in values}


def upgraded_event(event: dict[str, Any]) -> dict[str, Any]:
    """An event as today's version would have written it."""
    kind = event.get("kind")
    if kind in EVENTS:
        event = renamed(event, EVENTS[kind])
    if event.get("action") in ACTIONS:
        event["action"] = ACTIONS[event["action"]]
    if kind == "finding" and event.get("detector") in DETECTORS:
        event["detector"] = DETECTORS[event["detector"]]
    if isinstance(event.get("overrides"), dict):
        event["overrides"] = renamed(event["overrides"], OVERRIDES)
    return event


def upgraded_policy(held: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a policy, those of its thresholds included, under the names of today."""
    policy = renamed(held, POLICY)
    if isinstance(policy.get("thresholds"), dict):
        policy["thresholds"] = renamed(policy["thresholds"], THRESHOLDS)
    return policy


def upgraded_columns(rows: np.ndarray) -> np.ndarray:
    """Rows with the column names of today, over the same memory."""
    names = rows.dtype.names or ()
    if not any(name in COLUMNS for name in names):
        return rows
    dtype = np.dtype(rows.dtype)
    dtype.names = tuple(COLUMNS.get(name, name) for name in names)
    return rows.view(dtype)
