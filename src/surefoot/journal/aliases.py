"""Names that earlier versions wrote, and what they are called now: the one place that knows them, with
`policy_aliases.py` for the figures of a policy.

Run directories and checkpoints of schema 1, and recipes of that time, are read through these tables.
"""

from __future__ import annotations

import math
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
ADDED_COLUMNS = (
    "judged_by",
    "progress",
    "replicas",
    "nonfinite_buffers",
    "first_nonfinite_buffer",
    "memory_bandwidth",
    "saving",
)
"""Columns that files of the present schema may lack, because an earlier version wrote them."""
OVERRIDES = {
    "rate": "lr_factor",
    "rewarm": "rewarmup_steps",
    "rate_cap": "max_lr",
    "momentum_cap": "max_momentum",
    "empty": "zero_stale_grads",
}
"""Fields of `StepOverrides`."""
ACTIONS = {"restrain": "constrain", "loosen": "relax"}
DETECTORS = {
    "outlandish": "norm_outlier",
    "left_over": "stale_grads",
    "astray": "eval_regression",
    "bottleneck": "idle_device",
    "dead": "dead_units",
    "evaluation": "eval_rise",
    "exploding": "exploding_grads",
    "few_samples": "tiny_batches",
    "inputs": "input_shift",
    "level": "loss_level",
    "lost_clip": "clipping_changed",
    "memory": "memory_growth",
    "pace": "slow_steps",
    "repeats": "repeated_batches",
    "rhythm": "periodic_spikes",
    "settings": "hyperparam_change",
    "start": "large_initial_grads",
    "still": "frozen_weights",
    "units": "loss_rescaled",
    "vanishing": "vanishing_grads",
    "weights": "weight_jump",
}
"""Names of detectors, in findings and in the evidence of diagnoses."""
REMEDIES = {
    "on past the data, with rate and momentum no higher than there": (
        "past the bad data, with lr and momentum capped at their healthy values"
    ),
    "with half the rate, warmed up again": "with half the learning rate, warmed up again",
    "with a fresh optimizer at a quarter of the rate, warmed up again": (
        "with a fresh optimizer at a quarter of the learning rate, warmed up again"
    ),
    "in float32 for a while, with rate and momentum no higher than there": (
        "in float32 for a while, with lr and momentum capped at their healthy values"
    ),
    "with gradients emptied before each backward": "with gradients zeroed before each backward",
    "past all batches that stand out, with rate and momentum no higher than there": (
        "past all batches that stand out, with lr and momentum capped at their healthy values"
    ),
    "with the loss scale set back to what it was": "with the loss scale set back to its usual value",
    "with rate and momentum held at what they were when things were well": (
        "with lr and momentum capped at their healthy values"
    ),
    "with the rate warmed up": "with the learning rate warmed up",
    "with a tenth of the rate, warmed up": "with a tenth of the learning rate, warmed up",
}
"""Texts of remedies, by which the judge knows those it has tried."""
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
DETECTOR_ORDER = (
    "loss_rescaled",
    "input_shift",
    "tiny_batches",
    "weight_jump",
    "stale_grads",
    "clipping_changed",
    "hyperparam_change",
    "loss_scale",
    "frozen_weights",
    "jump",
    "loss_level",
    "growth",
    "oscillation",
    "exploding_grads",
    "vanishing_grads",
    "dead_units",
    "periodic_spikes",
    "repeated_batches",
    "large_initial_grads",
    "plateau",
    "eval_rise",
    "eval_regression",
    "clipping",
    "slow_steps",
    "memory_growth",
    "idle_device",
    "replicas",
)
"""The detectors in saved states that list them without their names."""
DETECTOR_STATE = {
    "clipping": {"_top": "_max_norm", "_often_told": "_often_reported", "_never_told": "_never_reported"},
    "clipping_changed": {"_beyond": "_rows_beyond"},
    "dead_units": {"_since": "_rows_beyond"},
    "eval_regression": {
        "_well": "_healthy_attempt",
        "_rate": "_healthy_lr",
        "_now": "_lr",
        "_top": "_max_lr",
        "_samples": "_best_samples",
        "_blamed": "_lr_blamed",
        "_far": "_worst",
        "_since": "_evals_since",
        "_lately": "_losses",
    },
    "eval_rise": {"_trained": "_train_at_best"},
    "exploding_grads": {"_since": "_rows_beyond"},
    "frozen_weights": {
        "had": "_had_grad",
        "_owned_told": "_unowned_reported",
        "_without": "_rows_missing",
        "_absent_told": "_missing_reported",
        "_usual": "_usual_size",
        "_looks": "_checks",
        "_slow": "_small_checks",
        "_slow_told": "_small_reported",
        "_moving": "_unchanged",
        "_had_all": "_had_all_grads",
        "_landed": "_applied_attempt",
    },
    "hyperparam_change": {"_rate": "_lr", "_fast": "_high", "_slow": "_low"},
    "input_shift": {
        "_recent": "_recent_means",
        "_moved": "_drifted",
        "_quiet": "_rows_since_novel",
        "_strange": "_novel_rows",
    },
    "jump": {"_last": "_last_attempt", "_quiet": "_quiet_rows", "_episodes": "_jumps"},
    "loss_level": {"_grave": "_severe", "_slowly": "_slow_reported"},
    "loss_scale": {"_landed": "_applied", "_streak_told": "_streak_reported", "_low_told": "_low_reported"},
    "periodic_spikes": {"_at": "_attempts", "_last": "_last_attempt"},
    "plateau": {"_fallen": "_fall_reported", "_since": "_rows_since_best"},
    "repeated_batches": {"_usual": "_usual_scatter"},
    "replicas": {
        "_well": "_equal_attempt",
        "_differs": "_different",
        "_asked": "_rewind_wanted",
        "_off": "_disabled",
    },
    "stale_grads": {"_times": "_updates"},
    "tiny_batches": {"_since": "_rows"},
    "vanishing_grads": {"_since": "_rows_beyond"},
    "weight_jump": {"_at": "_attempts", "_ratios": "_update_ratios"},
}
"""Keys in the saved state of detectors, by detector; `_told` is `_reported` in all of them."""
INCIDENT = {
    "start": "start_loss",
    "normal": "normal_loss",
    "moments": "steps",
    "named": "diagnosed",
    "treated": "acted_on",
    "rates": "healthy_lrs",
    "momenta": "healthy_momenta",
    "attention": "has_attention",
    "normed": "has_batch_norm",
    "samples": "usual_batch_size",
    "update": "update_excess",
    "weights": "weight_change",
}
"""Fields of a saved `Incident`."""
INCIDENT_STEP = {
    "norm_ratio": "log_norm_ratio",
    "rate_ratio": "lr_ratio",
    "factor": "loss_factor",
    "lead": "front_layers_lead",
    "attended": "attention_lead",
    "silent": "silent_fraction",
    "strange": "input_novelty",
}
"""Fields of a saved `IncidentStep`."""


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The same values under the names of today; a value that has its new name already is kept."""
    return {names.get(name, name): value for name, value in values.items() if names.get(name) not in values}


def upgraded_event(event: dict[str, Any]) -> dict[str, Any]:
    """An event as today's version would have written it."""
    kind = event.get("kind")
    if isinstance(kind, str) and kind in EVENTS:
        event = renamed(event, EVENTS[kind])
    for name, table in (
        ("action", ACTIONS),
        ("detector", DETECTORS if kind == "finding" else {}),
        ("remedy", REMEDIES),
    ):
        value = event.get(name)
        if isinstance(value, str) and value in table:
            event[name] = table[value]
    evidence = event.get("evidence")
    if kind == "diagnosis" and isinstance(evidence, dict) and isinstance(evidence.get("findings"), list):
        names = [DETECTORS.get(name, name) if isinstance(name, str) else name for name in evidence["findings"]]
        event["evidence"] = evidence | {"findings": names}
    if isinstance(event.get("overrides"), dict):
        event["overrides"] = renamed(event["overrides"], OVERRIDES)
    return event


def upgraded_judge_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A judge's saved state in today's layout: detectors by name, and what several of them share with the signals."""
    saved = state["detectors"]
    if not isinstance(saved, list):
        return dict(state)
    if len(saved) not in (len(DETECTOR_ORDER), len(DETECTOR_ORDER) - 1):  # the last one came later
        raise ValueError(f"the state holds {len(saved)} detectors, but that version had {len(DETECTOR_ORDER)}")
    detectors = {
        name: renamed(values, {"_told": "_reported"} | DETECTOR_STATE.get(name, {}))
        for name, values in zip(DETECTOR_ORDER, saved, strict=False)
    }
    evals, weights = detectors["eval_regression"], detectors["frozen_weights"]
    shared = {
        "seen": evals.get("_losses", []),
        "lr": [evals.get("_lr", math.inf), evals.get("_max_lr", 0.0)],
        "applied_attempt": weights.get("_applied_attempt", -1),
        "recent_norms": state["book"]["norms"],
    }
    return dict(state) | {"detectors": detectors, "normal": state["normal"] | shared}


def upgraded_incident(state: Mapping[str, Any]) -> dict[str, Any]:
    """A saved incident; what is one stage now was two flags."""
    state = renamed(state, INCIDENT)
    diagnosed, acted_on = state.pop("diagnosed", False), state.pop("acted_on", False)
    return {"stage": "acted_on" if acted_on else "diagnosed" if diagnosed else "open"} | state


def upgraded_finding(state: Mapping[str, Any]) -> dict[str, Any]:
    """A saved finding of an incident; what is its severity now was a flag."""
    state = renamed(state, EVENTS["finding"])
    severity = "severe" if state.pop("severe", False) else "suspicious"
    return {"severity": severity} | state | {"detector": DETECTORS.get(state["detector"], state["detector"])}


def upgraded_columns(rows: np.ndarray) -> np.ndarray:
    """Rows with the column names of today, over the same memory."""
    names = rows.dtype.names or ()
    if not any(name in COLUMNS for name in names):
        return rows
    dtype = np.dtype(rows.dtype)
    dtype.names = tuple(COLUMNS.get(name, name) for name in names)
    return rows.view(dtype)
